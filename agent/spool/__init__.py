"""The spool: samples that outlive a crash, a power cut, a full disk and an outage of the store, until they are delivered.

`spool.py` is the whole of it; `segment.py` the form of its files, `cursor.py` what was delivered, `disk.py` the system calls.
"""

from __future__ import annotations

from agent.spool.lane import Block
from agent.spool.spool import Spool, SpoolError

__all__ = ["Block", "Spool", "SpoolError"]
