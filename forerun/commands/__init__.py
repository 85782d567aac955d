"""What `forerun generate` and `forerun bench` do; forerun/cli.py registers them. Nothing here imports torch."""

import os

# gRPC's core logs to stderr what the user is told anyway; it reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
