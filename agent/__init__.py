"""Agent: the daemon of a GPU host. Collectors read hardware and engines, one sampler tick makes one paired record,
the spool makes it durable, delivery carries it to the store; it also hosts engines as processes, and simulates fleets.
May import `telemetry` only (an engine is reached through its endpoint, never by import).
"""
