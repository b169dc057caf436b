"""Step 2: is memory the limit? KV pool full or fragmented, out of memory, swap, GPU memory spilled.

A full pool alone is thrift, not a fault: it takes a queue or preemptions, and harm beside it.
"""

from __future__ import annotations

from rules.evidence import Evidence, ratio, value
from rules.finding import Effect, Finding, confirmed, effect_of, fix, line, no_data, pair_line, ruled_out, summary
from rules.priors import Strength
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


def memory_kv(evidence: Evidence, bar: Bar) -> Finding:
    effect = effect_of(evidence, bar)
    return (
        _out_of_memory(evidence, bar)
        or _full(evidence, effect, bar)
        or _fragmented(evidence, effect, bar)
        or _swapping(evidence, effect, bar)
        or _clean(evidence)
    )


def _out_of_memory(evidence: Evidence, bar: Bar) -> Finding | None:
    """R11, R12: the engine counted an out-of-memory event, or the kernel reported one."""
    recent = evidence.at_ns - int(bar.enter("memory_kv.recent_s") * 1e9)
    events = [event for event in evidence.events if event.kind == "oom" and event.time_ns >= recent]
    counted = value(evidence.engine.oom_new) if evidence.engine else None
    if not events and not counted:
        return None
    count = max(len(events), int(counted or 0))
    return confirmed(
        Cause.MEMORY_KV,
        Strength.PROOF,
        (line("oom", "engine.oom_total", count=count), _kv_line(evidence), pair_line(evidence)),
        summary("oom", count=count),
        (fix("smaller_batch", Cost.SOFTWARE_CHEAP), fix("more_memory", Cost.HARDWARE_COSTLY)),
        since_ns=min((event.time_ns for event in events), default=None),
        alone=True,
    )


def _full(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """R9: the pool is full, sequences are preempted or wait, and someone is hurt.

    Preemption counters come late (they ride on the victim's next output), so a queue beside fewer running sequences counts too.
    """
    engine = evidence.engine
    if engine is None or engine.kv_used is None or not bar.reached("memory_kv.kv_used_pct", engine.kv_used.value):
        return None
    preempting = bar.reached("memory_kv.preemptions_per_s", value(engine.preemptions_per_s))
    waiting = bar.reached("memory_kv.waiting", value(engine.waiting))
    latency = bar.reached("memory_kv.harm_ratio", ratio(engine.itl)) or bar.reached(
        "memory_kv.harm_ratio", ratio(engine.ttft)
    )
    longer_queue = engine.waiting is not None and engine.waiting.value > 1 + 1.5 * (engine.waiting.usual_high or 0.0)
    if not (preempting or waiting) or not (effect.slow or (latency and longer_queue) or (preempting and longer_queue)):
        return None
    shrunk = bar.reached("memory_kv.blocks_ratio", ratio(engine.kv_blocks))
    fewer = engine.running is not None and (engine.running.ratio or 1.0) <= 0.9
    return confirmed(
        Cause.MEMORY_KV,
        Strength.STRONG if preempting or fewer or shrunk else Strength.FAIR,
        (
            _kv_line(evidence),
            _preemption_line(evidence),
            _queue_line(evidence),
            line(
                "kv_shrunk", "engine.kv_blocks_count", blocks=engine.kv_blocks.value, usual=engine.kv_blocks.usual or 0
            )
            if shrunk and engine.kv_blocks is not None
            else None,
            pair_line(evidence),
        ),
        summary("kv_full", kv_pct=engine.kv_used.value, waiting=value(engine.waiting) or 0.0),
        (
            fix("kv_room", Cost.SOFTWARE_CHEAP),
            fix("fewer_sequences", Cost.SOFTWARE_CHEAP),
            fix("more_replicas", Cost.HARDWARE_COSTLY),
        ),
        since_ns=engine.kv_used.since_ns or (engine.waiting.since_ns if engine.waiting else None),
        support=3.0 if shrunk else 1.0,
    )


def _fragmented(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """R10: room that can't be used: fragmentation high, pool not full, requests wait."""
    engine = evidence.engine
    if engine is None or engine.kv_fragmentation is None or engine.kv_used is None:
        return None
    free = 100 - engine.kv_used.value
    if not (
        bar.reached("memory_kv.fragmentation_pct", engine.kv_fragmentation.value)
        and bar.reached("memory_kv.free_pct", free)
        and bar.reached("memory_kv.waiting", value(engine.waiting))
        and effect.slow
    ):
        return None
    return confirmed(
        Cause.MEMORY_KV,
        Strength.FAIR,
        (
            line("fragmented", engine.kv_fragmentation.lane, frag_pct=engine.kv_fragmentation.value, free_pct=free),
            _queue_line(evidence),
            pair_line(evidence),
        ),
        summary("fragmented", frag_pct=engine.kv_fragmentation.value, free_pct=free),
        (fix("paging", Cost.SOFTWARE_CHEAP),),
        since_ns=engine.kv_fragmentation.since_ns,
    )


def _swapping(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    host = evidence.host
    if host is None or host.swap is None or not effect.slow:
        return None
    if not bar.reached("memory_kv.swap_bytes_s", host.swap.value) or host.swap.value <= 2 * (host.swap.usual or 0.0):
        return None
    return confirmed(
        Cause.MEMORY_KV,
        Strength.FAIR,
        (
            line("swap", host.swap.lane, mb_s=host.swap.value / 1e6),
            line("host_memory", "host.mem_used_pct", used_pct=host.mem_used.value) if host.mem_used else None,
            pair_line(evidence),
        ),
        summary("swap", mb_s=host.swap.value / 1e6),
        (fix("smaller_batch", Cost.SOFTWARE_CHEAP), fix("more_memory", Cost.HARDWARE_COSTLY)),
        since_ns=evidence.output.since_ns,
    )


def _clean(evidence: Evidence) -> Finding:
    engine = evidence.engine
    if engine is None or engine.kv_used is None:
        return no_data(Cause.MEMORY_KV, line("no_kv"))
    return ruled_out(Cause.MEMORY_KV, _kv_line(evidence), _preemption_line(evidence), _queue_line(evidence))


def _kv_line(evidence: Evidence) -> Line | None:
    engine = evidence.engine
    if engine is None or engine.kv_used is None:
        return None
    if engine.kv_used.usual is None:
        return line("kv", "engine.kv_used_pct", kv_pct=engine.kv_used.value)
    return line("kv_usual", "engine.kv_used_pct", kv_pct=engine.kv_used.value, usual_pct=engine.kv_used.usual)


def _preemption_line(evidence: Evidence) -> Line | None:
    rate = value(evidence.engine.preemptions_per_s) if evidence.engine else None
    return None if rate is None else line("preemptions", "engine.preemptions_total", per_s=rate)


def _queue_line(evidence: Evidence) -> Line | None:
    engine = evidence.engine
    if engine is None or engine.waiting is None or engine.running is None:
        return None
    return line("queue", "engine.requests_waiting", waiting=engine.waiting.value, running=engine.running.value)


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [memory_kv(evidence, bar)]
