"""What a collector is: a source that is read once a tick and answers with samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from telemetry.sample import Sample


@dataclass(frozen=True, slots=True)
class Tick:
    """One moment of sampling. Every sample made in it carries `time_ns`; rates come from differences of `monotonic_s`."""

    number: int
    time_ns: int  # wall clock
    monotonic_s: float


class Collector(Protocol):
    """One source. `collect` never sleeps, never waits longer than its own deadline and never raises for a source that is
    absent or broken: what can't be read is left out, and counted in `errors`.
    """

    name: str  # gpu, engine, host ...
    errors: int  # reads that failed since start

    def collect(self, tick: Tick) -> Sequence[Sample]: ...

    def close(self) -> None: ...


Tags = Mapping[str, str]
"""The tags of this host (node and, where configured, rack, circuit, cluster); each collector adds its own to them."""
