"""KV blocks of one node in shared memory: keys, leases and slots over gRPC, the bytes beside it."""
