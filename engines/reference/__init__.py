"""The reference engine: a Llama-family decoder in NumPy, with continuous batching, paged KV and LoRA a request."""
