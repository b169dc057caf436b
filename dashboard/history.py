"""One pair over a window of time: its columns in uniform buckets, its events, and when triage named a cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dashboard.selection import SECOND_NS, Window
from telemetry.sample import Sample

Values = list[float | None]
STAGES = ("tokenise", "schedule", "embed", "attention", "mlp", "sample", "detokenise")
"""The way of a token, in order; `stage_<name>_s` of the engine's measurement counts the seconds of each."""
HOLE_SHARE = 0.05
"""Reading the whole window again never takes more of the time than this."""
HOLE_S = 45  # triage repeats a standing verdict every 30 s, and tells a change at once


@dataclass(frozen=True, slots=True)
class Series:
    """One field of one device over the window."""

    tags: Mapping[str, str]
    values: Values


@dataclass(frozen=True, slots=True)
class Incident:
    """Buckets in a row in which triage named this cause."""

    cause: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class History:
    """`columns` by (measurement, field); `shares` is the part of each bucket (0..1) that each GPU spent in a throttle reason,
    `stages` the engine's seconds by stage, as far as they have been read.

    What lies before `read_from_ns` has not been read yet, which is not the same as nothing being there.
    """

    window: Window
    columns: Mapping[tuple[str, str], Sequence[Series]] = field(default_factory=dict)
    shares: Mapping[str, Sequence[Series]] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    events: Sequence[Sample] = ()
    incidents: Sequence[Incident] = ()
    read_from_ns: int = 0

    @property
    def partial(self) -> bool:
        return self.read_from_ns > self.window.start_ns


def merged(several: Sequence[Series], window: Window) -> list[Series]:
    """One series a GPU (or one in all): a device whose other tags changed, say its rack or model, is still the same one.

    Where two have a value in one bucket, the one that goes on longer is right.
    """
    groups: dict[str, list[Series]] = {}
    for series in several:
        groups.setdefault(series.tags.get("gpu", ""), []).append(series)
    made: list[Series] = []
    for group in groups.values():
        group.sort(key=lambda series: max(i for i, value in enumerate(series.values) if value is not None))
        values: Values = [None] * window.count
        for series in group:
            values = [old if new is None else new for old, new in zip(values, series.values, strict=True)]
        made.append(Series(group[-1].tags, values))
    return made


def incidents(verdicts: Sequence[Series], window: Window) -> list[Incident]:
    """The spans in which triage named a cause: from its first verdict until another follows, or `HOLE_S` after the last."""
    patience = max(3, HOLE_S * SECOND_NS // window.step_ns)
    said: list[tuple[int, str]] = sorted(
        (place, series.tags.get("cause", "none"))
        for series in verdicts
        for place, value in enumerate(series.values)
        if value is not None
    )
    found: list[Incident] = []
    first = 0
    for number, (place, cause) in enumerate(said):
        following = said[number + 1] if number + 1 < len(said) else None
        if following is not None and following[1] == cause and following[0] - place <= patience:
            continue
        if cause != "none":
            end = min(place + patience, window.count)
            if following is not None:
                end = max(place + 1, min(end, following[0]))
            start_ns = window.start_ns + said[first][0] * window.step_ns
            found.append(Incident(cause, start_ns, window.start_ns + end * window.step_ns))
        first = number + 1
    return found
