"""Doctor: what works on this host, what doesn't, and what to do about it. One file a question; `examination` asks them all.

Imports what the rest of agent/ may import; nothing here writes, starts or changes anything.
"""
