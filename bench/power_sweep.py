"""Recorded power sweeps as samples: what a real card spent and yielded at each power cap, judged against the same card uncapped.

A sweep is a folder with one folder a workload; in it `power_300w.csv` (epoch s, GPU, power W, temperature C, SM clock MHz, GPU-Util %,
every two seconds) beside `load_300w.csv` (slot, start and end in epoch s, output tokens, one line a request), for each cap. No headers.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rules.triage import Triage
from telemetry.catalogue import REPLAYED
from telemetry.sample import Sample

SECOND = 10**9
T0_NS = 1_767_225_600 * SECOND
TICK_S = 2.0  # the cadence of the recordings
RAMP_S = 10.0  # of a cell's beginning, while the first requests come
JUDGED_EVERY_S = 5
COSTS_PCT = 5.0
"""A cap that costs as much must be named, one that costs less must not: the smallest effect that repeats beyond run-to-run noise."""

WITHIN_POINTS = 5.0
_CAP = re.compile(r"power_(\d+)w\.csv")


@dataclass(frozen=True, slots=True)
class Reading:
    """What the card said at one moment."""

    time_s: float
    power_w: float
    temp_c: float
    sm_clock_mhz: float
    util_pct: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One cap under one workload, with times in seconds since its load began."""

    workload: str
    cap_w: int
    readings: tuple[Reading, ...]
    requests: tuple[tuple[float, float, int], ...]  # start, end, tokens

    @property
    def end_s(self) -> float:
        """When the last request of full concurrency began: after it the load runs out."""
        return max(start for start, _, _ in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return self.made(RAMP_S, self.end_s) / (self.end_s - RAMP_S)

    def made(self, start_s: float, end_s: float) -> float:
        """Tokens made in the span, each request's spread evenly over its time: the recordings tell no more."""
        return sum(
            tokens * (min(end, end_s) - max(start, start_s)) / (end - start)
            for start, end, tokens in self.requests
            if start < end_s and end > start_s
        )

    def running(self, start_s: float, end_s: float) -> float:
        """Requests that run, mean of the span."""
        busy_s = sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end, _ in self.requests)
        return busy_s / (end_s - start_s)


@dataclass(frozen=True, slots=True)
class Row:
    """One cell judged: what the cap costs by the recording, and what was said of it."""

    workload: str
    cap_w: int
    cost_pct: float
    causes: tuple[str, ...]  # of all moments
    called: str  # at the end
    loss_pct: float | None  # median of the moments with a verdict

    @property
    def costs(self) -> bool:
        return self.cost_pct >= COSTS_PCT

    @property
    def right(self) -> bool:
        if not self.costs:
            return not self.causes
        near = self.loss_pct is not None and abs(self.loss_pct - self.cost_pct) <= WITHIN_POINTS
        return self.called == "power" and set(self.causes) == {"power"} and near


def cells_of(folder: Path) -> Iterator[list[Cell]]:
    """The cells of each workload, the highest cap first. ValueError names what can't be read."""
    workloads = sorted({path.parent for path in folder.glob("*/power_*w.csv")})
    if not workloads:
        raise ValueError(f"{folder}: no folder with power_<cap>w.csv in it")
    for workload in workloads:
        caps = [int(found[1]) for path in workload.iterdir() if (found := _CAP.fullmatch(path.name))]
        yield [_cell(workload, cap) for cap in sorted(caps, reverse=True)]


def _cell(folder: Path, cap_w: int) -> Cell:
    try:
        load = [
            (float(start), float(end), int(tokens)) for _, start, end, tokens in _lines(folder / f"load_{cap_w}w.csv")
        ]
        power = [tuple(map(float, line)) for line in _lines(folder / f"power_{cap_w}w.csv")]
        zero_s = min(start for start, _, _ in load)
        readings = [Reading(t - zero_s, w, c, mhz, util) for t, _, w, c, mhz, util in power]
    except ValueError as error:
        raise ValueError(f"{folder.name}, cap {cap_w} W: {error}") from None
    requests = tuple((start - zero_s, end - zero_s, tokens) for start, end, tokens in load if end > start)
    return Cell(folder.name, cap_w, tuple(readings), requests)


def _lines(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [[cell.strip() for cell in line] for line in csv.reader(file) if line]


def samples_of(parts: Sequence[tuple[Cell, float, float]], default_w: float) -> Iterator[list[Sample]]:
    """The parts (cell, from s, to s) one after the other as one pair's samples, a list a tick. The cap is the enforced limit."""
    tags = {"node": "recorded", "origin": REPLAYED}
    engine = {**tags, "engine": "e", "kind": "vllm", "model": parts[0][0].workload, "gpus": "0"}
    gpu = {**tags, "gpu": "0", "uuid": "recorded-0"}
    at_s, total = 0.0, 0.0
    for cell, begin_s, end_s in parts:
        for reading in cell.readings:
            now_s = reading.time_s
            if not begin_s + TICK_S <= now_s <= end_s:
                continue
            at_s += TICK_S
            tokens = cell.made(now_s - TICK_S, now_s)
            total += tokens
            time_ns = T0_NS + round(at_s * SECOND)
            yield [
                Sample(
                    "gpu",
                    gpu,
                    {
                        "util_pct": reading.util_pct,
                        "temp_c": reading.temp_c,
                        "power_w": reading.power_w,
                        "sm_clock_mhz": reading.sm_clock_mhz,
                        "power_limit_w": float(cell.cap_w),
                        "power_limit_default_w": default_w,
                        "state": 0,
                    },
                    time_ns,
                ),
                Sample(
                    "engine",
                    engine,
                    {
                        "up": 1,
                        "tokens_per_s": tokens / TICK_S,
                        "generation_tokens_total": int(total),
                        "requests_running": cell.running(now_s - TICK_S, now_s),
                        "requests_waiting": 0.0,
                    },
                    time_ns,
                ),
            ]


def judged(uncapped: Cell, cell: Cell) -> Row:
    """The cell after the uncapped one, or the uncapped one's second half after its first."""
    middle_s = uncapped.end_s / 2
    own = cell is uncapped
    before = (uncapped, RAMP_S, middle_s if own else uncapped.end_s)
    after = (cell, middle_s if own else RAMP_S, cell.end_s)
    usual = uncapped.made(before[1], before[2]) / (before[2] - before[1])
    now = cell.made(after[1], after[2]) / (after[2] - after[1])
    strike_ns = T0_NS + round(TICK_S * SECOND) * sum(1 for _ in samples_of([before], float(uncapped.cap_w)))
    triage, next_ns = Triage(), T0_NS
    named: list[tuple[str, float | None]] = []
    last = ""
    for samples in samples_of([before, after], float(uncapped.cap_w)):
        triage.add(samples)
        now_ns = samples[0].time_ns
        if now_ns < next_ns:
            continue
        next_ns = now_ns + JUDGED_EVERY_S * SECOND
        (diagnosis,) = triage.evaluate(now_ns)
        top = diagnosis.verdicts[0] if diagnosis.verdicts else None
        last = str(top.cause) if top else ""
        if top is not None:
            # a verdict before the strike is one too many wherever it is: it counts for this cell
            named.append((str(top.cause) if now_ns > strike_ns else f"{top.cause} before", top.loss_pct))
    losses = [loss for _, loss in named if loss is not None]
    return Row(
        workload=cell.workload,
        cap_w=cell.cap_w,
        cost_pct=100 * (1 - now / usual),
        causes=tuple(sorted({cause for cause, _ in named})),
        called=last,
        loss_pct=statistics.median(losses) if losses else None,
    )


def sweep(folder: Path) -> list[Row]:
    return [judged(cells[0], cell) for cells in cells_of(folder) for cell in cells]


def told(rows: Sequence[Row]) -> Iterator[str]:
    """The table, and one line of totals."""
    yield f"{'workload':<28} {'cap W':>5} {'costs %':>8} {'called':<10} {'loss %':>7}  "
    for row in rows:
        loss = "" if row.loss_pct is None else f"{row.loss_pct:.1f}"
        called = row.called or (f"once {', '.join(row.causes)}" if row.causes else "nothing")
        yield f"{row.workload:<28} {row.cap_w:>5} {row.cost_pct:>8.1f} {called:<10} {loss:>7}  {'+' if row.right else '-'}"
    costly, others = [row for row in rows if row.costs], [row for row in rows if not row.costs]
    apart = [abs(row.loss_pct - row.cost_pct) for row in costly if row.loss_pct is not None]
    yield (
        f"power sweep: {sum(row.right for row in costly)}/{len(costly)} cells whose cap costs {COSTS_PCT:.0f} % or more are called power "
        f"within {WITHIN_POINTS:.0f} points of the loss (furthest {max(apart, default=0.0):.1f}); "
        f"{sum(row.right for row in others)}/{len(others)} others are called nothing"
    )
