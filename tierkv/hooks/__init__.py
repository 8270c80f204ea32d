"""What runs inside an engine: thin, light in its imports, never in the engine's way.

A hook turns the engine's cache into named arrays (``tierkv.state``) and hands them to the inference agent beside it
(``tierkv.handoff``). Without an agent it does nothing. It may import the standard library, numpy, psutil, mlx and
the engine; nothing else.
"""
