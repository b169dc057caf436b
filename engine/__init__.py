"""Engine: an LLM inference engine on torch with a paged KV cache and continuous batching, and its OpenAI-compatible server.

It is the yield side of the pair, and reports honestly what it does. The scheduler knows requests and blocks, never tensors.
May import `telemetry` only.
"""
