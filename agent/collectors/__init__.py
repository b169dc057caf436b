"""Collectors: the machine room, one file a source. Each reads its source, converts units once, and never sleeps or logs per tick.

To add a source: one file beside this one, one line in the registry of `agent.sampler`.
"""
