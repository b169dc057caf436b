"""A running request leaves one engine process and goes on in another, with its KV cache and the same tokens."""
