"""What the store has acknowledged and may still lose: kept on disk, and not noted as delivered, until that time is over."""

from __future__ import annotations

from dataclasses import dataclass

from agent.spool.lane import Block


@dataclass(frozen=True, slots=True)
class _Entry:
    until_s: float
    block: Block | None  # while it may be in memory only


class Held:
    """Blocks by lane and sequence, those first that were acknowledged first. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], _Entry] = {}

    def __contains__(self, block: Block) -> bool:
        return (block.lane, block.sequence) in self._entries

    def add(self, block: Block, until_s: float) -> None:
        """Until `until_s` of the monotonic clock."""
        self._entries.pop((block.lane, block.sequence), None)
        self._entries[block.lane, block.sequence] = _Entry(until_s, None if block.durable else block)

    def release(self, now_s: float) -> bool:
        """Let go of those whose time is over; whether there were any."""
        over = []
        for key, entry in self._entries.items():
            if entry.until_s > now_s:
                break
            over.append(key)
        for key in over:
            del self._entries[key]
        return bool(over)

    def numbers(self, lane: str) -> list[int]:
        return [sequence for name, sequence in self._entries if name == lane]

    def forget(self, lane: str, first: int, last: int) -> None:
        """Those of first..last are on disk no more."""
        for key in [key for key in self._entries if key[0] == lane and first <= key[1] <= last]:
            del self._entries[key]

    def take_all(self) -> dict[tuple[str, int], Block | None]:
        """All of them, which are held no longer; the block where it may be in memory only."""
        taken = {key: entry.block for key, entry in self._entries.items()}
        self._entries.clear()
        return taken
