"""Changes: what happened to a node's power and cooling between two readings of its BMC, one sentence each."""

from __future__ import annotations

from dataclasses import dataclass

from agent.power.reading import BmcReading
from telemetry.catalogue import REDUNDANCY_STATES
from telemetry.messages import say

CAP_CHANGE_W = 0.5
"""A cap that differs by less is the same one, rounded differently."""

UNCAPPED_READINGS = 3
"""So many readings in a row that tell the node's power and no cap mean that there is none; fewer, that it was not read."""


@dataclass(frozen=True, slots=True)
class Change:
    """`detail` is the change in fixed English words, the same in every language; `code` a number that goes with it."""

    text: str
    detail: str
    code: int


class Changes:
    """Remembers the last known state of each supply, of redundancy, cap and leak. What can't be read is not a change, and neither
    is the first reading: the agent can't know when that came to be.
    """

    def __init__(self, language: str = "en") -> None:
        self._language = language
        self._supplies: dict[str, bool | None] | None = None
        self._redundancy: int | None = None
        self._cap_w: float | None = None
        self._without_cap = 0  # readings in a row
        self._leak: bool | None = None

    def update(self, reading: BmcReading, redundancy: int | None) -> list[Change]:
        """What is different from before; `redundancy` is the state that is written, by the BMC or by its setting."""
        return [
            *self._of_supplies(reading),
            *self._of_redundancy(redundancy),
            *self._of_cap(reading),
            *self._of_leak(reading.leak),
        ]

    def _of_supplies(self, reading: BmcReading) -> list[Change]:
        if reading.supplies is None:
            return []
        before, now = self._supplies, {supply.name: supply.ok for supply in reading.supplies}
        self._supplies = {
            name: ok if ok is not None or before is None else before.get(name) for name, ok in now.items()
        }
        if before is None:
            return []
        found = []
        for name, ok in now.items():
            if name not in before:
                found.append(self._change("psu_added", f"{name}: added", psu=name))
            if ok is False and before.get(name) is not False:
                found.append(self._change("psu_failed", f"{name}: failed", psu=name))
            elif ok and before.get(name) is False:
                found.append(self._change("psu_back", f"{name}: back", psu=name))
        found += [self._change("psu_gone", f"{name}: gone", psu=name) for name in before if name not in now]
        return found

    def _of_redundancy(self, state: int | None) -> list[Change]:
        before, self._redundancy = self._redundancy, self._redundancy if state is None else state
        if state is None or before is None or state == before:
            return []
        word = REDUNDANCY_STATES[state]
        return [self._change(f"redundancy_{word}", f"redundancy {word}", state)]

    def _of_cap(self, reading: BmcReading) -> list[Change]:
        cap_w, before, without = reading.cap_w, self._cap_w, self._without_cap
        if cap_w is None:
            self._without_cap += reading.node_w is not None
            if before is None or self._without_cap < UNCAPPED_READINGS:
                return []
            self._cap_w = None
            return [self._change("cap_lifted", f"cap {before:.0f} W lifted", before_w=before)]
        self._cap_w, self._without_cap = cap_w, 0
        if before is None:
            was_uncapped = without >= UNCAPPED_READINGS
            return (
                [self._change("cap_set", f"cap {cap_w:.0f} W set", round(cap_w), cap_w=cap_w)] if was_uncapped else []
            )
        if abs(cap_w - before) < CAP_CHANGE_W:
            return []
        detail = f"cap {before:.0f} W -> {cap_w:.0f} W"
        return [self._change("cap", detail, round(cap_w), before_w=before, cap_w=cap_w)]

    def _of_leak(self, leak: bool | None) -> list[Change]:
        before, self._leak = self._leak, self._leak if leak is None else leak
        if leak is None or before is None or leak == before:
            return []
        return [self._change("leak" if leak else "leak_over", "leak" if leak else "leak over", int(leak))]

    def _change(self, key: str, detail: str, code: int = 0, **values: object) -> Change:
        return Change(say(f"agent.bmc.event.{key}", self._language, **values), detail, code)
