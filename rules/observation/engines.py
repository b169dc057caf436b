"""What is seen of an engine: its counters, its queue, its lengths, and whether it moves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice

from rules.evidence import EngineEvidence, Observation, Seen
from rules.observation.reader import BACK_S, NOW_S, SPAN_S, Reader
from rules.window import CHANGE_KINDS, SECOND, Device


def observe_engine(reader: Reader, engine: Device) -> EngineEvidence:
    up = reader.gauge(engine, "up")
    probe = reader.last(engine, "probe_ok")
    uptime = reader.last(engine, "uptime_s")
    blocks = reader.last(engine, "kv_blocks_count")
    oom = reader.growth(engine, "oom_total", BACK_S)
    hit = prefix_hit(engine, reader.start(2 * NOW_S), reader.at_ns)
    swing = _swing(reader, engine)
    return EngineEvidence(
        name=engine.tags.get("engine", ""),
        age_s=(reader.at_ns - engine.last_ns) / SECOND if engine.last_ns else math.inf,
        up=up,
        down_s=_down_s(reader, engine),
        away=_does_not_answer(reader, engine),
        starting=_is_starting(reader, engine),
        blind=_is_blind(reader, engine),
        tokens_per_s=reader.gauge(engine, "tokens_per_s"),
        prompt_tokens_per_s=reader.gauge(engine, "prompt_tokens_per_s"),
        running=reader.gauge(engine, "requests_running"),
        waiting=reader.gauge(engine, "requests_waiting"),
        kv_used=reader.gauge(engine, "kv_used_pct"),
        kv_newest=reader.gauge(engine, "kv_used_pct", "newest", look_s=SPAN_S),
        kv_per_token=_kv_per_token(reader, engine),
        kv_fragmentation=reader.gauge(engine, "kv_fragmentation_pct"),
        kv_blocks=blocks,
        preemptions_per_s=reader.rate(engine, "preemptions_total", "engine.preemptions_total"),
        oom_new=None if oom is None else Observation(oom[0], "engine.oom_total", "", 0.0),
        ttft=reader.gauge(engine, "ttft_p95_s") or reader.gauge(engine, "ttft_p50_s"),
        itl=reader.gauge(engine, "itl_mean_s"),
        prompt_len=reader.gauge(engine, "prompt_len_mean"),
        output_len=reader.gauge(engine, "output_len_mean"),
        context=reader.gauge(engine, "context_mean"),
        prompt_share=_prompt_share(reader, engine),
        prefix_hit=None if hit is None else reader.plain(hit, "engine.prefix_hits_total"),
        stats_age=reader.last(engine, "stats_age_s"),
        uptime_s=None if uptime is None else uptime.value,
        frozen_s=_frozen_s(reader, engine),
        probe_ok=None if probe is None else bool(probe.value),
        stalled_s=_stalled_s(reader, engine),
        versioned=not engine.texts.keys().isdisjoint(CHANGE_KINDS),
        kv_used_kind=engine.texts.get("kv_used_kind", ""),
        acceptance=_acceptance(reader, engine),
        thread_max=reader.gauge(engine, "proc_cpu_max_pct"),
        running_cv=None if swing is None else swing[0],
        chance_cv=None if swing is None else swing[1],
        arrivals_cv=_arrivals_cv(reader, engine) if swing is not None and swing[0] > STEADY_CV else None,
    )


def prefix_hit(engine: Device, start_ns: int, end_ns: int) -> float | None:
    """Share of queried prompt tokens found in the prefix cache, 0..1; None without counters or queries."""
    queries, hits = (engine.ends(name, start_ns, end_ns) for name in ("prefix_queries_total", "prefix_hits_total"))
    if queries is None or hits is None or queries[1] <= queries[0] or hits[1] < hits[0]:
        return None
    return min((hits[1] - hits[0]) / (queries[1] - queries[0]), 1.0)


def _prompt_share(reader: Reader, engine: Device) -> Seen:
    """Computed prompt tokens for each output token; of means, since prompts come in bursts and a median of bursts is zero."""
    out = engine.values("tokens_per_s", reader.start(NOW_S), reader.at_ns)
    into = engine.values("prompt_tokens_per_s", reader.start(NOW_S), reader.at_ns)
    if not into or sum(out) <= 0:
        return None
    computed = 1 - (prefix_hit(engine, reader.start(NOW_S), reader.at_ns) or 0.0)
    share = computed * (sum(into) / len(into)) / (sum(out) / len(out))
    return reader.plain(share, "engine.prompt_tokens_per_s", "share")


def _kv_per_token(reader: Reader, engine: Device) -> Seen:
    """Percent of the KV pool for each token that the running sequences hold, sample by sample, so that all three are of one moment."""
    start = reader.start(SPAN_S)
    used, running, context = (
        dict(engine.points(name, start, reader.at_ns)) for name in ("kv_used_pct", "requests_running", "context_mean")
    )
    each = [
        pct / (running[time_ns] * context[time_ns])
        for time_ns, pct in used.items()
        if running.get(time_ns, 0) >= 1 and context.get(time_ns, 0) >= 1
    ]
    if not each:
        return None
    return reader.plain(statistics.median(each), "engine.kv_used_pct", "per_token")


def _is_blind(reader: Reader, engine: Device) -> bool:
    """It answers, for most of the window, and shows none of the numbers that its output is read from."""
    start = reader.start(NOW_S)
    answers = engine.points("up", start, reader.at_ns)
    if not answers or not all(up for _, up in answers) or answers[-1][0] - answers[0][0] < 0.6 * NOW_S * SECOND:
        return False
    return not any(
        engine.values(name, start, reader.at_ns)
        for name in ("generation_tokens_total", "tokens_per_s", "requests_running")
    )


def _cv(readings: Sequence[float]) -> float | None:
    """Standard deviation over mean; None of nothing or of zeros."""
    mean = sum(readings) / len(readings) if readings else 0.0
    return math.sqrt(sum((reading - mean) ** 2 for reading in readings) / len(readings)) / mean if mean > 0 else None


def _swing(reader: Reader, engine: Device) -> tuple[float, float] | None:
    """How the batch swings over a minute, (coefficient of variation, what it is by chance), in the half in which it swings less: what
    fills and empties does so in both, a level that moves once does not.

    By chance: requests that come and go independently of each other overlap with the variance of their mean (Poisson).
    """
    start_ns, middle_ns = reader.start(2 * NOW_S), reader.start(NOW_S)
    halves = [
        engine.values("requests_running", start_ns, middle_ns),
        engine.values("requests_running", middle_ns, reader.at_ns),
    ]
    if sum(map(len, halves)) < LEAST_SWINGING:
        return None
    found = []
    for readings in halves:
        cv = _cv(readings)
        if cv is None:
            return None
        found.append((cv, 1 / math.sqrt(sum(readings) / len(readings))))
    return min(found, key=lambda half: half[0] / half[1])


def _arrivals_cv(reader: Reader, engine: Device) -> float | None:
    """Of the arrivals in spans of ten seconds over a minute: what finished, and what more runs and waits than before."""
    spans = []
    for span in range(6):
        ends = reader.at_ns - int(span * 10 * SECOND)
        known = [
            engine.ends(name, ends - 10 * SECOND, ends)
            for name in ("requests_finished_total", "requests_running", "requests_waiting")
        ]
        if known[0] is None or known[1] is None:
            return None
        spans.append(max(sum(last - first for first, last in filter(None, known)), 0.0))
    return _cv(spans)


STEADY_CV = 0.25
"""A batch that varies less swings for nobody: how its requests come is not looked at."""

LEAST_SWINGING = 20
"""Readings in a minute, without which no swing can be told."""


def _down_s(reader: Reader, engine: Device) -> float:
    since: int | None = None
    last: int | None = None
    for time_ns, up in engine.backwards("up", reader.start(BACK_S), reader.at_ns):
        if up:
            break
        last = last or time_ns
        since = time_ns
    return (last - since) / SECOND if since is not None and last is not None else 0.0


def _does_not_answer(reader: Reader, engine: Device) -> bool:
    points = engine.points("up", reader.start(NOW_S), reader.at_ns)
    return bool(points and not points[-1][1])


def _is_starting(reader: Reader, engine: Device) -> bool:
    starting = engine.points("starting", reader.start(NOW_S), reader.at_ns)
    up = engine.points("up", reader.start(NOW_S), reader.at_ns)
    # `starting` is told only while it does not answer, so an older one says nothing once it does
    return bool(starting and up and starting[-1][1] and not up[-1][1])


def _stalled_s(reader: Reader, engine: Device) -> float | None:
    """Seconds for which the engine's own watch has said without a break that nothing comes out; None where nobody watches."""
    newest: tuple[int, float] | None = None
    first_ns = 0
    for time_ns, stalled in engine.backwards("stalled", reader.start(BACK_S), reader.at_ns):
        newest = newest or (time_ns, stalled)
        first_ns = time_ns
        if not stalled:
            break
    if newest is None or newest[0] < reader.start(NOW_S):
        return None
    return (newest[0] - first_ns) / SECOND if newest[1] else 0.0


def _acceptance(reader: Reader, engine: Device) -> Seen:
    """Share of drafted tokens that were accepted; None without drafts."""
    drafted = reader.growth(engine, "spec_drafted_total", BACK_S)
    accepted = reader.growth(engine, "spec_accepted_total", BACK_S)
    if drafted is None or accepted is None or drafted[0] <= 0:
        return None
    return reader.plain(min(accepted[0] / drafted[0], 1.0), "engine.spec_accepted_total")


def _frozen_s(reader: Reader, engine: Device) -> float | None:
    """Seconds without a token, a prompt token or a step while requests ran the whole time. None without counters or readings.

    An engine that counts tokens at a request's end stands still between ends by design: None.
    """
    if engine.texts.get("counter_style") == "finish":
        return None
    start_ns, at_ns = reader.start(BACK_S), reader.at_ns
    newest = next(engine.backwards("requests_running", start_ns, at_ns), None)
    if newest is None or newest[0] < reader.start(NOW_S):
        return None
    if not any(True for _ in islice(engine.backwards("generation_tokens_total", start_ns, at_ns), 1, 2)):
        return None
    names = ("generation_tokens_total", "prompt_tokens_total", "steps_total")
    moved = [time_ns for name in names if (time_ns := _moved_ns(engine, name, start_ns, at_ns)) is not None]
    progress_ns = max(moved, default=start_ns)
    since = newest[0]
    for time_ns, count in engine.backwards("requests_running", start_ns, at_ns):
        if count < 1 or time_ns <= progress_ns:
            break
        since = time_ns
    return (newest[0] - since) / SECOND


def _moved_ns(engine: Device, name: str, start_ns: int, end_ns: int) -> int | None:
    """When the counter last changed; None if it has not, or is not known."""
    later: tuple[int, float] | None = None
    for point in engine.backwards(name, start_ns, end_ns):
        if later is not None and point[1] != later[1]:
            return later[0]
        later = point
    return None
