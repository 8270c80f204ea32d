"""gRPC servers and clients, and protobuf to domain values and back; the only place that imports ``tierkv.v1``."""

import os

# gRPC's core writes its own lines to stderr (a refused bind, a lost peer); what they say reaches users as errors and
# events. Someone who debugs gRPC sets the variable before we do.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
