"""Step 2: is memory the limit? KV pool full or fragmented, out of memory, swap, GPU memory spilled.

A full pool alone is thrift, not a fault: it takes a queue or preemptions, and harm beside it.
"""

from __future__ import annotations

from rules.evidence import EngineEvidence, Evidence, ratio, value
from rules.finding import (
    Effect,
    Finding,
    against,
    cleared,
    confirmed,
    effect_of,
    fix,
    line,
    names_cause,
    no_data,
    pair_line,
    ruled_out,
    summary,
    unread,
)
from rules.priors import Strength
from rules.steps.arithmetic import kv_line, kv_share_line
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


def memory_kv(evidence: Evidence, bar: Bar) -> Finding:
    effect = effect_of(evidence, bar)
    return (
        _out_of_memory(evidence, bar)
        or _deadlocked(evidence, bar)
        or _shrunk(evidence, effect, bar)
        or _spilled(evidence, effect, bar)
        or _full(evidence, effect, bar)
        or _preempting(evidence, effect, bar)
        or _fragmented(evidence, effect, bar)
        or _swapping(evidence, effect, bar)
        or _clean(evidence, bar)
    )


def _out_of_memory(evidence: Evidence, bar: Bar) -> Finding | None:
    """R11, R12: the engine counted an out-of-memory event, or the kernel reported one."""
    recent = evidence.at_ns - int(bar.enter("memory_kv.recent_s") * 1e9)
    events = [event for event in evidence.events if event.kind == "oom" and event.time_ns >= recent]
    counted = value(evidence.engine.oom_new) if evidence.engine else None
    told = evidence.tells is not None and evidence.tells.out_of_memory
    if not events and not counted and not told:
        return None
    count = max(len(events), int(counted or 0), 1)
    scattered = _scattered(evidence, bar)
    return confirmed(
        Cause.MEMORY_KV,
        Strength.PROOF,
        (
            line("oom", "engine.oom_total", count=count),
            *scattered,
            kv_line(evidence.tells),
            _kv_line(evidence),
            pair_line(evidence),
        ),
        summary("oom_scattered" if scattered else "oom", count=count),
        (
            *((fix("growing_segments", Cost.SOFTWARE_CHEAP),) if scattered else ()),
            fix("smaller_batch", Cost.SOFTWARE_CHEAP),
            fix("more_memory", Cost.HARDWARE_COSTLY),
        ),
        since_ns=min((event.time_ns for event in events), default=None),
        alone=True,
    )


def _scattered(evidence: Evidence, bar: Bar) -> list[Line]:
    """R11: memory is free and can't be had in one piece: much is free, or the allocator holds what it does not use."""
    found = []
    for gpu in evidence.gpus:
        free, used = value(gpu.mem_free_bytes), value(gpu.mem_used_bytes)
        share = 100 * free / (free + used) if free is not None and used else None
        enough = bar.reached("memory_kv.oom_free_pct", share)
        if free is not None and (enough or (share is None and bar.reached("memory_kv.oom_free_bytes", free))):
            found.append(line("free_at_oom", "gpu.mem_used_bytes", gb=free / 1e9))
            break
    told = evidence.tells
    if told is not None and told.largest_free_bytes is not None:
        found.append(line("largest_free", "gpu.mem_used_bytes", gb=told.largest_free_bytes / 1e9))
    if told is not None and bar.reached("memory_kv.unused_bytes", told.unused_bytes):
        found.append(line("held_unused", "gpu.mem_used_bytes", gb=(told.unused_bytes or 0.0) / 1e9))
    return found


def _full(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """R9: the pool is full, sequences are preempted or wait, and someone is hurt.

    Preemption counters come late (they ride on the victim's next output), so a queue beside fewer running sequences counts too.
    """
    engine = evidence.engine
    if engine is None or engine.kv_used is None:
        return None
    leaks = _leaks(evidence, bar)
    if not bar.reached("memory_kv.kv_used_pct", engine.live_kv_pct) and not leaks:
        return None
    if evidence.told:
        return _full_told(evidence, effect, bar)
    preempting = bar.reached("memory_kv.preemptions_per_s", value(engine.preemptions_per_s))
    waiting = bar.reached("memory_kv.waiting", value(engine.waiting))
    latency = bar.reached("memory_kv.harm_ratio", ratio(engine.itl)) or bar.reached(
        "memory_kv.harm_ratio", ratio(engine.ttft)
    )
    longer_queue = engine.waiting is not None and engine.waiting.value > 1 + 1.5 * (engine.waiting.usual_high or 0.0)
    hurt = effect.slow or (latency and longer_queue) or (preempting and longer_queue)
    if not ((preempting or waiting) and hurt) and not leaks:
        return None
    shrunk = bar.reached("memory_kv.blocks_ratio", ratio(engine.kv_blocks))
    fewer = engine.running is not None and (engine.running.ratio or 1.0) <= 0.9
    return confirmed(
        Cause.MEMORY_KV,
        Strength.STRONG if preempting or fewer or shrunk else Strength.FAIR,
        (
            _kv_line(evidence),
            _preemption_line(evidence),
            queue_line(evidence),
            line("held_by_nobody", "engine.kv_used_pct", ratio=ratio(engine.kv_per_token) or 0.0)
            if is_held_by_nobody(evidence, bar)
            else None,
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
        since_ns=_full_and_hurt_since(evidence),
        support=3.0 if shrunk or is_held_by_nobody(evidence, bar) else 1.0,
    )


def _full_and_hurt_since(evidence: Evidence) -> int | None:
    """A pool that is full and hurts nobody is no trouble: it began when both stood, the pool was full and a queue or a loss was there.
    What a slow card makes of a pool that was long full is then no older than the card's fault."""
    engine = evidence.engine
    queued = engine.waiting.since_ns if engine is not None and engine.waiting is not None else None
    hurt = [since for since in (queued, evidence.output.since_ns) if since is not None]
    full = engine.kv_used.since_ns if engine is not None and engine.kv_used is not None else None
    if full is None or not hurt:
        return full or (min(hurt) if hurt else None)
    return max(full, min(hurt))


def is_held_by_nobody(evidence: Evidence, bar: Bar) -> bool:
    """The pool holds far more than the running sequences' tokens need: leaked or scattered. Prompts that share less need more room, too."""
    engine = evidence.engine
    if (
        engine is None
        or engine.live_kv_pct is None
        or bar.reached("request_mix.prefix_ratio", ratio(engine.prefix_hit))
    ):
        return False
    return bar.reached("memory_kv.room_ratio", ratio(engine.kv_per_token))


def _leaks(evidence: Evidence, bar: Bar) -> bool:
    """Blocks that nobody's tokens fill are a sign of its own: the pool's newest level and one slow span are enough beside it."""
    engine = evidence.engine
    if engine is None or not evidence.output.slow_share or not is_held_by_nobody(evidence, bar):
        return False
    return bar.reached("memory_kv.kv_used_pct", value(engine.kv_newest))


def _full_told(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """The pool is full, and somebody waits or is preempted; without what is usual, the queue itself is the harm."""
    engine = evidence.engine
    preempting = engine is not None and bar.reached("memory_kv.preemptions_per_s", value(engine.preemptions_per_s))
    waiting = engine is not None and bar.reached("memory_kv.waiting", value(engine.waiting))
    slower = bar.reached("memory_kv.harm_ratio", ratio(engine.itl) if engine else None)
    if engine is None or engine.kv_used is None or not (preempting or waiting or slower) or not effect.hurts:
        return None
    return confirmed(
        Cause.MEMORY_KV,
        Strength.STRONG if preempting else Strength.FAIR,
        (_kv_line(evidence), _preemption_line(evidence), queue_line(evidence), pair_line(evidence)),
        names_cause(Cause.MEMORY_KV, effect),
        (
            fix("kv_room", Cost.SOFTWARE_CHEAP),
            fix("fewer_sequences", Cost.SOFTWARE_CHEAP),
            fix("more_replicas", Cost.HARDWARE_COSTLY),
        ),
    )


def _preempting(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """Preemptions beside harm, and nobody tells how full the pool is: nothing else preempts."""
    engine = evidence.engine
    if not evidence.told or engine is None or engine.kv_used is not None or not effect.hurts:
        return None
    if not bar.reached("memory_kv.preemptions_per_s", value(engine.preemptions_per_s)):
        return None
    return confirmed(
        Cause.MEMORY_KV,
        Strength.FAIR,
        (_preemption_line(evidence), queue_line(evidence), pair_line(evidence)),
        names_cause(Cause.MEMORY_KV, effect),
        (fix("kv_room", Cost.SOFTWARE_CHEAP), fix("fewer_sequences", Cost.SOFTWARE_CHEAP)),
    )


def _deadlocked(evidence: Evidence, bar: Bar) -> Finding | None:
    if not is_deadlock(evidence, bar):
        return None
    return confirmed(
        Cause.MEMORY_KV,
        Strength.PROOF,
        (_kv_line(evidence), line("stalled", "engine.stalled"), queue_line(evidence)),
        summary("kv_deadlock", kv_pct=value(evidence.engine.kv_used) or 0.0 if evidence.engine else 0.0),
        (fix("restart_engine", Cost.SOFTWARE_CHEAP), fix("kv_room", Cost.SOFTWARE_CHEAP)),
        since_ns=evidence.engine.kv_used.since_ns if evidence.engine and evidence.engine.kv_used else None,
        alone=True,
    )


def is_deadlock(evidence: Evidence, bar: Bar) -> bool:
    """Nothing moves because nobody can get room: the pool was full before the tokens stopped."""
    engine = evidence.engine
    if engine is None or engine.kv_used is None or not bar.reached("memory_kv.deadlock_pct", engine.live_kv_pct):
        return False
    if not is_stalled(engine, bar):
        return False
    still_s = engine.stalled_s or engine.frozen_s
    if still_s is None or evidence.told:
        return True
    full_since = engine.kv_used.since_ns
    return full_since is not None and full_since < evidence.at_ns - (still_s + LED_S) * 1e9


LED_S = 5.0
"""So much earlier one thing must begin to lead another that stands still."""


def is_stalled(engine: EngineEvidence, bar: Bar) -> bool:
    """Requests run and nothing comes out: by the counters, by the agent's own watch, or as somebody says."""
    return (
        engine.stalled
        or bar.reached("scheduling.frozen_s", engine.frozen_s)
        or bar.reached("scheduling.stalled_s", engine.stalled_s)
    )


def _shrunk(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """The pool has fewer blocks than at the last start, and somebody is hurt."""
    engine = evidence.engine
    if not evidence.told or engine is None or engine.kv_blocks is None or not effect.hurts:
        return None
    if not bar.reached("memory_kv.blocks_ratio", engine.kv_blocks.ratio):
        return None
    return confirmed(
        Cause.MEMORY_KV,
        Strength.PROOF,
        (against(engine.kv_blocks), _kv_line(evidence), queue_line(evidence), pair_line(evidence)),
        names_cause(Cause.MEMORY_KV, effect),
        (fix("kv_room", Cost.SOFTWARE_CHEAP), fix("free_memory_first", Cost.SOFTWARE_CHEAP)),
    )


def _spilled(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """No memory is free on the GPU and its memory hardly works, or data lies in host memory: the rest is fetched over the link."""
    if not effect.hurts:
        return None
    for gpu in evidence.gpus:
        free, spilled = value(gpu.mem_free_bytes), value(gpu.spilled_bytes)
        full = bar.reached("memory_kv.free_bytes", free)
        starved = full and bar.reached("memory_kv.idle_mem_util_pct", value(gpu.mem_util)) and gpu.loaded
        outside = bar.reached("memory_kv.spilled_bytes", spilled)
        if starved or outside or (full and effect.told):
            seen = [
                line("memory_free", "gpu.mem_used_bytes", mib=(free or 0.0) / 2**20) if free is not None else None,
                line("spilled", "", gb=(spilled or 0.0) / 1e9) if outside else None,
                line("memory_idle", "gpu.mem_util_pct", pct=value(gpu.mem_util) or 0.0) if starved else None,
                pair_line(evidence),
            ]
            return confirmed(
                Cause.MEMORY_KV,
                Strength.STRONG if outside or starved else Strength.FAIR,
                seen,
                names_cause(Cause.MEMORY_KV, effect),
                (fix("smaller_batch", Cost.SOFTWARE_CHEAP), fix("more_memory", Cost.HARDWARE_COSTLY)),
                since_ns=evidence.output.since_ns,
                gpus=(gpu.index,),
            )
    return None


def _fragmented(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """R10: room that can't be used, whether it counts as free or as held: fragmentation high, and requests wait."""
    engine = evidence.engine
    if engine is None or engine.kv_fragmentation is None or engine.kv_used is None:
        return None
    lost = engine.kv_used.value * engine.kv_fragmentation.value / 100
    free = 100 - engine.kv_used.value + lost
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
            queue_line(evidence),
            pair_line(evidence),
        ),
        summary("fragmented", frag_pct=engine.kv_fragmentation.value, free_pct=free),
        (fix("paging", Cost.SOFTWARE_CHEAP),),
        since_ns=engine.kv_fragmentation.since_ns,
    )


def _swapping(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    host = evidence.host
    if host is None or host.swap is None or not effect.hurts or not is_swapping(evidence, bar):
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


def is_swapping(evidence: Evidence, bar: Bar) -> bool:
    swap = evidence.host.swap if evidence.host else None
    if swap is None or not bar.reached("memory_kv.swap_bytes_s", swap.value):
        return False
    return swap.value > 2 * (swap.usual or 0.0)


def _clean(evidence: Evidence, bar: Bar) -> Finding:
    """A pool that has room hurts nobody; of one that is full, or that counts no pressure, only the queue or preemptions can tell."""
    engine = evidence.engine
    if engine is None or engine.kv_used is None:
        share = kv_share_line(evidence)
        return ruled_out(Cause.MEMORY_KV, share) if share is not None else no_data(Cause.MEMORY_KV, line("no_kv"))
    kind = line("kv_kind", "engine.kv_used_kind", kind=engine.kv_used_kind) if engine.live_kv_pct is None else None
    seen = (_kv_line(evidence), kv_share_line(evidence), kind, _preemption_line(evidence), queue_line(evidence))
    blind = engine.waiting is None and engine.preemptions_per_s is None and not evidence.told
    roomy = engine.live_kv_pct is not None and not bar.reached("memory_kv.kv_used_pct", engine.live_kv_pct)
    return cleared(Cause.MEMORY_KV, seen, [unread("engine.requests_waiting")] if blind and not roomy else [])


def _kv_line(evidence: Evidence) -> Line | None:
    engine = evidence.engine
    if engine is None or engine.kv_used is None:
        return None
    if engine.kv_used.usual is None:
        return line("kv", "engine.kv_used_pct", kv_pct=engine.kv_used.value)
    return line("kv_usual", "engine.kv_used_pct", kv_pct=engine.kv_used.value, usual_pct=engine.kv_used.usual)


def _preemption_line(evidence: Evidence) -> Line | None:
    rate = value(evidence.engine.preemptions_per_s) if evidence.engine else None
    if rate is not None and evidence.told:
        return line("preempting" if rate else "no_preemption", "engine.preemptions_total")
    return None if rate is None else line("preemptions", "engine.preemptions_total", per_s=rate)


def queue_line(evidence: Evidence) -> Line | None:
    engine = evidence.engine
    if engine is None or engine.waiting is None:
        return None
    if engine.running is None:
        return line("queue_only", "engine.requests_waiting", waiting=engine.waiting.value)
    return line("queue", "engine.requests_waiting", waiting=engine.waiting.value, running=engine.running.value)


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [memory_kv(evidence, bar)]
