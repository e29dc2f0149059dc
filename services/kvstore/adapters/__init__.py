"""The kvstore's edges: shared memory, gRPC, metrics."""
