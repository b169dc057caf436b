"""Step 4: is the work stuck, badly spread, or starved by the host? A hung engine and imbalance here; host CPU, a second tenant and
the network beside it, one file each.
"""

from __future__ import annotations

from dataclasses import replace

from rules.evidence import Evidence, ratio, value
from rules.finding import (
    Finding,
    Sign,
    confirmed,
    effect_of,
    fix,
    line,
    names,
    names_cause,
    no_data,
    pair_line,
    ruled_out,
    strongest,
    summary,
    unread,
)
from rules.priors import Strength
from rules.steps.contention import contention
from rules.steps.host_cpu import host_cpu
from rules.steps.memory import is_deadlock, is_stalled, queue_line
from rules.steps.network import network, never_joined
from rules.steps.physical.readings import fall
from rules.steps.requests import is_queued
from rules.straggler import Straggler, straggler_of, told_ranks
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line, Status


def scheduling(evidence: Evidence, bar: Bar, slow: Straggler | None = None) -> Finding:
    """R7, R19, R20: requests run and no token comes, the engine does not answer, the queue is here while peers idle, or `slow` holds the
    other ranks up."""
    engine = evidence.engine
    if engine is None:
        return no_data(Cause.SCHEDULING, line("no_engine"))
    return (
        _hung(evidence, bar)
        or _not_answering(evidence, bar)
        or _dead_inside(evidence, bar)
        or _uneven(evidence, bar)
        or _sawtooth(evidence, bar)
        or _skewed(evidence, bar)
        or _straggling(evidence, slow, bar)
        or _alone(evidence, _moving(evidence, bar))
    )


def _hung(evidence: Evidence, bar: Bar) -> Finding | None:
    engine = evidence.engine
    if engine is None or not is_stalled(engine, bar) or is_deadlock(evidence, bar) or never_joined(evidence, bar):
        return None
    if bar.reached("telemetry.stats_age_s", value(engine.stats_age)) and (not engine.stalled or engine.probe_ok):
        return None  # the counters may be old rather than still
    frozen = engine.frozen_s or engine.stalled_s or 0.0
    running = value(engine.running) or 0.0
    return confirmed(
        Cause.SCHEDULING,
        Strength.PROOF,
        (
            line("frozen", "engine.generation_tokens_total", frozen_s=frozen, running=running)
            if frozen
            else line("stalled", "engine.stalled"),
            line("health_lies", "engine.up") if value(engine.up) else None,
            line("probe_failed", "engine.probe_ok") if engine.probe_ok is False else None,
            _util_line(evidence),
            pair_line(evidence),
        ),
        summary("hung", frozen_s=frozen, running=running),
        (fix("restart_engine", Cost.SOFTWARE_CHEAP), fix("drain_node", Cost.OPERATIONS_CHEAP)),
        since_ns=evidence.at_ns - int(frozen * 1e9),
        alone=True,
    )


def _dead_inside(evidence: Evidence, bar: Bar) -> Finding | None:
    """It serves nobody: no answer, no token for the probe or a client, requests that no client waits for, or that wait and none runs."""
    engine = evidence.engine
    if engine is None or engine.starting or engine.load is not None or evidence.output.baseline != "told":
        return None
    signs: list[Sign] = []
    if engine.probe_ok is False:
        signs.append(Sign(Strength.STRONG, line("probe_failed", "engine.probe_ok")))
    if engine.undelivered:
        signs.append(Sign(Strength.STRONG, line("undelivered", "engine.delivered_tokens_total")))
    if value(engine.up) == 0:
        signs.append(Sign(Strength.FAIR, line("health_silent", "engine.up")))
    idle = engine.running is not None and engine.running.value < 1
    if engine.connections == 0 and engine.running is not None and not idle:
        signs.append(Sign(Strength.FAIR, line("no_client", "engine.requests_running", running=engine.running.value)))
    if idle and bar.reached("memory_kv.waiting", value(engine.waiting)):
        signs.append(
            Sign(Strength.FAIR, line("none_runs", "engine.requests_waiting", waiting=value(engine.waiting) or 0))
        )
    if not signs:
        return None
    return confirmed(
        Cause.SCHEDULING,
        strongest(signs),
        (
            *(sign.line for sign in signs),
            line("health_lies", "engine.up") if value(engine.up) else None,
            _util_line(evidence),
        ),
        names_cause(Cause.SCHEDULING, effect_of(evidence, bar)),
        (fix("restart_engine", Cost.SOFTWARE_CHEAP), fix("probe_health", Cost.SOFTWARE_CHEAP)),
        alone=True,
    )


def _skewed(evidence: Evidence, bar: Bar) -> Finding | None:
    """R7, R19: of the ranks or replicas that work together, one carries far more than its share while others idle."""
    group, effect = evidence.group, effect_of(evidence, bar)
    if not (effect.hurts or is_queued(evidence, bar)):
        return None
    signs: list[Sign] = []
    if group.uneven:
        signs.append(Sign(Strength.STRONG, line("ranks_uneven", "engine.requests_waiting")))
    for key, parts in (("requests", group.running), ("share", group.share)):
        if len(parts) > 1 and bar.reached("scheduling.skew", max(parts) * len(parts) / max(sum(parts), 1e-9)):
            total = max(sum(parts), 1e-9)
            seen = line(f"skew_{key}", "", high=100 * max(parts) / total, low=100 * min(parts) / total, of=len(parts))
            signs.append(Sign(Strength.STRONG, seen))
    busiest, idlest = max(group.util, default=0.0), min(group.util, default=0.0)
    if effect.hurts and bar.reached("gpu_fault.stuck_util_pct", busiest) and idlest < 1:
        signs.append(Sign(Strength.FAIR, line("rank_idle", "gpu.util_pct", of=len(group.util))))
    if group.mixed:
        signs.append(Sign(Strength.FAIR, line("mixed_gpus", "")))
    if not signs:
        return None
    return confirmed(
        Cause.SCHEDULING,
        strongest(signs),
        (*(sign.line for sign in signs), queue_line(evidence), pair_line(evidence)),
        names_cause(Cause.SCHEDULING, effect),
        (fix("balance_by_eta", Cost.SOFTWARE_CHEAP),),
        since_ns=evidence.output.since_ns,
        alone=True,
    )


def _straggling(evidence: Evidence, slow: Straggler | None, bar: Bar) -> Finding | None:
    """R7: one rank computes longer than the others, and they wait for it in every step.

    Heat, a cap, a fault or a link of its GPU is told in step 1, and this is its symptom then. A rank whose card shows nothing of the
    kind has more work, a slow process or a card that does not tell: an outlier among peers is no proof of a bad card.
    """
    effect = effect_of(evidence, bar)
    if slow is None or not effect.slow_work:
        return None
    compute = slow.rank.compute
    return confirmed(
        Cause.SCHEDULING,
        Strength.STRONG if slow.compared else Strength.FAIR,
        (slow.line, _util_line(evidence), pair_line(evidence)),
        summary("straggler", rank=slow.rank.rank, ratio=slow.compute_s / slow.others_s, **fall(evidence, effect)),
        (fix("even_ranks", Cost.SOFTWARE_CHEAP), fix("drain_reset", Cost.OPERATIONS_CHEAP)),
        since_ns=compute.since_ns if compute is not None else None,
        gpus=(slow.rank.gpu,) if slow.rank.gpu else (),
    )


def _alone(evidence: Evidence, moving: Finding) -> Finding:
    """Of a split model a rank whose step times come alone can't be compared: that none is slow is not known then."""
    told = [rank.rank for rank in told_ranks(evidence)]
    if not told or (len(told) > 1 and len(told) >= len(evidence.gpus)) or moving.status is not Status.RULED_OUT:
        return moving
    return no_data(moving.cause, *moving.evidence, line("ranks_missing", "rank.step_compute_mean_s", ranks=names(told)))


def _util_line(evidence: Evidence) -> Line | None:
    util = evidence.util_pct
    powers = [gpu.power for gpu in evidence.gpus if gpu.power is not None]
    if util is None:
        return None
    if powers and not any(seen.relative for seen in powers):
        mean = sum(seen.value for seen in powers) / len(powers)
        return line("util_power", "gpu.power_w", util_pct=util, power_w=mean)
    if evidence.effort == "gpu":
        return line("util_gpu", "gpu.util_pct", util_pct=util)
    return line("util_cpu", "host.cpu_pct", util_pct=util)


def _not_answering(evidence: Evidence, bar: Bar) -> Finding | None:
    engine = evidence.engine
    if engine is None or engine.starting or not bar.reached("scheduling.silent_s", engine.down_s):
        return None
    since = evidence.at_ns - int(engine.down_s * 1e9)
    if any(event.kind in ("restart", "deploy") and event.time_ns >= since - 10**10 for event in evidence.events):
        return None  # it was started anew: the cold start's matter
    return confirmed(
        Cause.SCHEDULING,
        Strength.STRONG,
        (line("not_answering", "engine.up", engine=engine.name, down_s=engine.down_s), _util_line(evidence)),
        summary("not_answering", engine=engine.name, down_s=engine.down_s),
        (fix("restart_engine", Cost.SOFTWARE_CHEAP),),
        since_ns=since,
        alone=True,
    )


def _uneven(evidence: Evidence, bar: Bar) -> Finding | None:
    """The queue is here and not at the peers, while a unit of work takes as long as ever and more of it comes: the balancer.

    More comes when more goes through than usual, prompts and output alike, or when the peers have less than usual.
    """
    engine, peers = evidence.engine, evidence.peers
    if engine is None or engine.waiting is None or peers.pairs < 2 or peers.waiting is None or peers.running is None:
        return None
    waiting, running = engine.waiting.value, value(engine.running) or 0.0
    if effect_of(evidence, bar).slow_work or not bar.reached("scheduling.peer_waiting", waiting):
        return None
    if not bar.reached("scheduling.queue_share", waiting / max(running, 1.0)):
        return None
    share = (waiting + running) / max(peers.waiting + peers.running, 1.0)
    usual_queue = engine.waiting.usual_high or 0.0
    if not bar.reached("scheduling.peer_ratio", share) or waiting <= 2 * usual_queue or peers.waiting >= 1:
        return None
    fewer_there = peers.usual_running is not None and bar.reached(
        "scheduling.peers_fall", peers.running / max(peers.usual_running, 1e-9)
    )
    more_here = bar.reached(
        "scheduling.more_ratio", min(ratio(engine.prompt_tokens_per_s) or 0, ratio(engine.tokens_per_s) or 0)
    )
    if not (more_here or (fewer_there and (ratio(engine.running) or 0) >= 1)):
        return None
    return confirmed(
        Cause.SCHEDULING,
        Strength.FAIR,
        (
            line("queue", "engine.requests_waiting", waiting=waiting, running=running),
            line(
                "peers_idle", "engine.requests_waiting", pairs=peers.pairs, waiting=peers.waiting, running=peers.running
            ),
        ),
        summary("uneven", ratio=share),
        (fix("balance_by_eta", Cost.SOFTWARE_CHEAP),),
        since_ns=engine.waiting.since_ns,
        alone=True,
    )


def _sawtooth(evidence: Evidence, bar: Bar) -> Finding | None:
    """R23: the batch fills and empties while requests come evenly, and util swings with it: the scheduler admits in gulps.

    A few requests that come one by one do so as well: it must swing more than their overlapping by chance makes it.
    """
    engine, effect = evidence.engine, effect_of(evidence, bar)
    if engine is None:
        return None
    swings = [gpu.util_swing for gpu in evidence.gpus if gpu.util_swing is not None]
    widest = max(swings, default=None)
    even = bar.reached("scheduling.arrivals_cv", engine.arrivals_cv)
    if widest is None or not bar.reached("scheduling.util_swing_pct", widest) or not even:
        return None
    late = any(bar.reached("memory_kv.harm_ratio", ratio(seen)) for seen in (engine.ttft, engine.itl))
    if not bar.reached("scheduling.running_cv", engine.running_cv) or not (effect.hurts or late):
        return None
    if engine.chance_cv and not bar.reached("scheduling.chance_ratio", (engine.running_cv or 0.0) / engine.chance_cv):
        return None
    return confirmed(
        Cause.SCHEDULING,
        Strength.STRONG,
        (
            line("util_swings", "gpu.util_pct", points=widest),
            line(
                "batch_swings",
                "engine.requests_running",
                running_cv=engine.running_cv or 0.0,
                arrivals_cv=engine.arrivals_cv or 0.0,
            ),
            pair_line(evidence),
        ),
        names_cause(Cause.SCHEDULING, effect),
        (fix("even_steps", Cost.SOFTWARE_CHEAP),),
        since_ns=evidence.output.since_ns,
    )


def _moving(evidence: Evidence, bar: Bar) -> Finding:
    engine = evidence.engine
    if engine is None or (engine.frozen_s is None and engine.tokens_per_s is None):
        return no_data(Cause.SCHEDULING, line("no_progress_counter"))
    peers = evidence.peers
    waiting = engine.waiting
    if waiting is not None and bar.reached("scheduling.peer_waiting", waiting.value):
        usual = waiting.usual or 0.0
        if waiting.value > 2 * max(waiting.usual_high or 0.0, 1.0):
            seen = (
                line("queue_only", waiting.lane, waiting=waiting.value)
                if waiting.usual is None
                else line("queue_up", waiting.lane, waiting=waiting.value, usual=usual)
            )
            return Finding(Cause.SCHEDULING, Status.SYMPTOM, (seen,))
    beside = (
        line("peers", "engine.requests_waiting", pairs=peers.pairs, waiting=peers.waiting, running=peers.running or 0.0)
        if peers.pairs and peers.waiting is not None
        else None,
        unread("engine.requests_waiting") if waiting is None and not evidence.told else None,
    )
    tokens, running = value(engine.tokens_per_s), value(engine.running)
    if tokens or evidence.told:
        return ruled_out(Cause.SCHEDULING, line("moving", "engine.tokens_per_s", tokens_s=tokens or 0.0), *beside)
    if engine.frozen_s == 0:
        key, lane = ("none_running", "engine.requests_running") if not running else ("counting", "engine.up")
        return ruled_out(Cause.SCHEDULING, line(key, lane), *beside)
    if engine.frozen_s is not None and running is not None:
        still = line("frozen", "engine.generation_tokens_total", frozen_s=engine.frozen_s, running=running)
        return no_data(Cause.SCHEDULING, still, *beside)  # too short to tell
    missing = "engine.requests_running" if running is None else "engine.generation_tokens_total"
    return no_data(Cause.SCHEDULING, unread(missing), *beside)


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    slow = straggler_of(evidence, bar)
    starved = [_with_straggler(found, slow) for found in (host_cpu(evidence, bar), contention(evidence, bar))]
    if any(found.status is Status.CONFIRMED for found in starved):
        slow = None  # that is what makes it slow
    return [scheduling(evidence, bar, slow), *starved, network(evidence, bar)]


def _with_straggler(found: Finding, slow: Straggler | None) -> Finding:
    if slow is None or found.status is not Status.CONFIRMED:
        return found
    return replace(found, evidence=(*found.evidence, slow.line))
