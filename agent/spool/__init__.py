"""The spool: samples that outlive a crash, a power cut, a full disk and an outage of the store, until they are delivered.

`spool.py` is its face; `journal.py` decides what is kept where and what goes first, in two lanes (`lane.py`) of segment files
(`segment.py`) and in memory (`live.py`); `cursor.py` remembers what was delivered, `held.py` what of it the store may still lose;
`disk.py` holds the system calls.
"""

from __future__ import annotations

from agent.spool.lane import Block
from agent.spool.spool import Spool, SpoolError

__all__ = ["Block", "Spool", "SpoolError"]
