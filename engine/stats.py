"""Everything that the engine counts about itself. Plain numbers under one lock: the hot path adds, a scrape reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from engine.accounting import Peaks, Work, utilisation
from engine.scheduler import Row
from engine.stages import Seconds

_FINE = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)
SECONDS = (*(round(step * 10.0**power, 7) for power in range(-4, 2) for step in _FINE), 100.0, 200.0, 400.0)
"""Bounds of time histograms, 0.1 ms to 400 s, ten a decade: a quantile read from them is off by at most 26 %."""
TOKENS = tuple(sorted({int(base << shift) for shift in range(18) for base in (1, 3)} | {0}))
"""Bounds of length histograms: powers of two and halfway between."""
WINDOW_S = 10.0
"""Means and utilisation are over the steps of the last so many seconds."""
LENGTH_WINDOW_S = 60.0


class Histogram:
    """Counts by bucket, as Prometheus has them: a value belongs to the first bound that is not below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def __copy__(self) -> Histogram:
        made = Histogram(self.bounds)
        made.counts, made.sum = self.counts.copy(), self.sum
        return made

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Counters:
    generation_tokens_total: int = 0
    delivered_tokens_total: int = 0  # written by the server only, when a client's connection has taken a token
    prompt_tokens_total: int = (
        0  # computed or found in the cache, once a request; what preemption computes again is apart
    )
    prompt_tokens_computed_total: int = 0
    prefix_queries_total: int = 0  # tokens of requests that came in for the first time while the prefix cache is on
    prefix_hits_total: int = 0  # of these, tokens whose K and V were there
    prefix_evictions_total: int = 0
    recomputed_tokens_total: int = 0
    preemptions_total: int = 0
    preemptions_recompute_total: int = 0
    preemptions_swap_total: int = 0
    swap_out_blocks_total: int = 0
    swap_in_blocks_total: int = 0
    blocked_on_blocks_total: int = 0  # steps in which somebody waited, by what kept the next one out
    blocked_on_seqs_total: int = 0
    blocked_on_tokens_total: int = 0
    deadline_missed_total: int = 0
    requests_finished_total: int = 0
    requests_failed_total: int = 0
    requests_aborted_total: int = 0
    requests_migrated_out_total: int = 0
    requests_migrated_in_total: int = 0
    migrations_failed_total: int = 0  # that this engine began, and that came to nothing
    migrated_out_bytes_total: int = 0  # of the KV cache
    migrated_in_bytes_total: int = 0
    migrated_out_s: float = 0.0  # for which requests stood still on their way
    migrated_in_s: float = 0.0
    oom_total: int = 0
    steps_total: int = 0
    flops_total: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who is where after a step; slots and blocks of the KV pool."""

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_taken: int = 0
    blocks_cached: int = 0  # free ones that hold a known prefix
    blocks_swapped: int | None = None  # on the host; None where nothing is swapped
    free_run: int = 0  # blocks of the longest run of free neighbours
    block_size: int = 1
    slots_written: int = 0
    tokens_due: int = 0  # of running requests, known and not computed yet
    context_mean: float | None = None  # of running requests

    @property
    def kv_used_pct(self) -> float:
        return 100.0 * self.blocks_taken / self.blocks if self.blocks else 0.0

    @property
    def slots_unused(self) -> int:
        """Slots reserved but not written, in all taken blocks."""
        return self.blocks_taken * self.block_size - self.slots_written

    @property
    def kv_fragmentation_pct(self) -> float:
        """Slots reserved but not written, in % of the slots of taken blocks."""
        allocated = self.blocks_taken * self.block_size
        return 100.0 * self.slots_unused / allocated if allocated else 0.0


class Phase(Enum):
    """What a step computes. Prefill is bound by operations and decode by bytes, so each is judged by itself."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def phase_of(rows: Sequence[Row]) -> Phase:
    decoding = sum(row.decodes for row in rows)
    return Phase.DECODE if decoding == len(rows) else Phase.MIXED if decoding else Phase.PREFILL


@dataclass(slots=True)
class SpeculationStats:
    """Of an engine that speculates. Guarded by the lock of its EngineStats."""

    drafts_total: int = 0
    drafted_total: int = 0  # tokens that were guessed and computed
    accepted_total: int = 0  # of these, tokens that were right
    on: bool = True  # False: switched off for now, as it didn't pay at this number of decoding requests
    speedup: float | None = None  # tokens/s with drafts by tokens/s without, at this number of decoding requests
    recent: deque[tuple[float, int, int]] = field(default_factory=deque)  # of each draft: when, guessed, right

    def add(self, at_s: float, drafted: int, accepted: int) -> None:
        self.drafts_total += 1
        self.drafted_total += drafted
        self.accepted_total += accepted
        self.recent.append((at_s, drafted, accepted))
        while self.recent[0][0] < at_s - WINDOW_S:
            self.recent.popleft()

    def __copy__(self) -> SpeculationStats:
        return replace(self, recent=self.recent.copy())

    def acceptance(self, now_s: float) -> tuple[float, float] | None:
        """(share of guessed tokens that were right in %, tokens that a draft brought, its bonus token among them), over the last
        WINDOW_S seconds; None when nothing was drafted.
        """
        last = [(drafted, accepted) for at_s, drafted, accepted in self.recent if at_s >= now_s - WINDOW_S]
        if not last:
            return None
        drafted, accepted = (sum(side) for side in zip(*last, strict=True))
        return 100.0 * accepted / drafted, 1 + accepted / len(last)


@dataclass(frozen=True, slots=True)
class StepRecord:
    at_s: float  # monotonic, at its end
    seconds: float
    tokens: int
    work: Work
    waited: bool = True  # whether its end was waited for: a device may still be at work on it
    phase: Phase = Phase.MIXED


@dataclass(slots=True)
class RankTimes:
    """Of one rank since the start. A rank that is slow computes long and waits little; the others wait for it in every sum."""

    steps: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0  # in collectives: until the others came, and the transfer itself

    def add(self, compute_s: float, wait_s: float) -> None:
        self.steps += 1
        self.compute_s += compute_s
        self.wait_s += wait_s


@dataclass(slots=True)
class EngineStats:
    """One per engine. Take `lock` for writing, and a snapshot for reading several numbers that must fit together."""

    started_s: float
    peaks: Peaks
    lock: threading.Lock = field(default_factory=threading.Lock)
    counters: Counters = field(default_factory=Counters)
    occupancy: Occupancy = field(default_factory=Occupancy)
    speculation: SpeculationStats | None = None  # None: the engine does not speculate
    ranks: Sequence[RankTimes] = ()  # of a model over several processes
    beat_s: float = 0.0  # when the loop last came round, monotonic
    steps: deque[StepRecord] = field(default_factory=deque)
    stage_seconds: list[float] | None = None  # by Stage since the start; None: not timed
    prompt_lengths: deque[tuple[float, int]] = field(default_factory=deque)
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    request_latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    step_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_length: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def snapshot(self) -> EngineStats:
        """All of it as it is now. To make text of the numbers takes milliseconds, in which steps must not wait for the lock."""
        with self.lock:
            own = {f.name: copy(getattr(self, f.name)) for f in fields(self) if f.name != "lock"}
        return EngineStats(**own)

    def record_step(self, record: StepRecord) -> None:
        self.counters.steps_total += 1
        self.counters.flops_total += record.work.flops
        self.counters.bytes_total += record.work.bytes
        self.step_time.observe(record.seconds)
        if record.waited:
            self._raise_peaks(record)
        self.steps.append(record)
        while self.steps[0].at_s < record.at_s - WINDOW_S:
            self.steps.popleft()

    def _raise_peaks(self, record: StepRecord) -> None:
        """A probe beside a busy neighbour reads low; what a step has reached can be reached."""
        flops_per_s, bytes_per_s = record.work.flops / record.seconds, record.work.bytes / record.seconds
        if flops_per_s > self.peaks.flops_per_s or bytes_per_s > self.peaks.bytes_per_s:
            self.peaks = Peaks(max(flops_per_s, self.peaks.flops_per_s), max(bytes_per_s, self.peaks.bytes_per_s))

    def add_stages(self, seconds: Seconds) -> None:
        if self.stage_seconds is not None:
            self.stage_seconds = [had + more for had, more in zip(self.stage_seconds, seconds, strict=True)]

    def record_prompt(self, now_s: float, tokens: int) -> None:
        self.prompt_length.observe(tokens)
        self.prompt_lengths.append((now_s, tokens))
        while self.prompt_lengths[0][0] < now_s - LENGTH_WINDOW_S:
            self.prompt_lengths.popleft()


@dataclass(frozen=True, slots=True)
class Recent:
    """Over the steps of the last WINDOW_S seconds. Utilisation counts the time inside steps: it says how well a step uses
    the device, while idle time shows in the counters.
    """

    step_mean_s: float
    tokens_per_step: float
    mfu_pct: float | None  # unknown while no step's end was waited for
    mbu_pct: float | None
    mfu_prefill_pct: float | None  # of the steps that only compute prompts
    mbu_decode_pct: float | None  # of the steps that only decode


def recent(stats: EngineStats, now_s: float) -> Recent | None:
    """None when no step ran in the window: unknown, not zero."""
    steps = [step for step in stats.steps if step.at_s >= now_s - WINDOW_S]
    seconds = sum(step.seconds for step in steps)
    if not steps or seconds <= 0:
        return None
    whole = _utilisation(steps, stats.peaks)
    prefill = _utilisation([step for step in steps if step.phase is Phase.PREFILL], stats.peaks)
    decode = _utilisation([step for step in steps if step.phase is Phase.DECODE], stats.peaks)
    return Recent(
        step_mean_s=seconds / len(steps),
        tokens_per_step=sum(step.tokens for step in steps) / len(steps),
        mfu_pct=whole[0] if whole else None,
        mbu_pct=whole[1] if whole else None,
        mfu_prefill_pct=prefill[0] if prefill else None,
        mbu_decode_pct=decode[1] if decode else None,
    )


def _utilisation(steps: Sequence[StepRecord], peaks: Peaks) -> tuple[float, float] | None:
    """MFU and MBU in %; None when the time isn't known: without steps, or where nobody has waited for their end."""
    seconds = sum(step.seconds for step in steps)
    if seconds <= 0 or not any(step.waited for step in steps):
        return None
    return utilisation(
        Work(sum(step.work.flops for step in steps), sum(step.work.bytes for step in steps)), seconds, peaks
    )


def prompt_len_max(stats: EngineStats, now_s: float) -> int | None:
    """The longest prompt of the last LENGTH_WINDOW_S seconds, in tokens; None when none came."""
    return max((tokens for at_s, tokens in stats.prompt_lengths if at_s >= now_s - LENGTH_WINDOW_S), default=None)
