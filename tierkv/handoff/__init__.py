"""Between an engine's hook and the inference agent: a Unix socket for messages and shared memory for bytes.

``protocol`` says what goes over the socket, ``arena`` owns the shared memory, ``client`` and ``mover`` are the
engine's end, ``server`` is the agent's. The engine's end needs nothing but the standard library and numpy.
"""
