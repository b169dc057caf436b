"""Cold start: the engine starts, takes long to start, or is so young that first requests pay for its warm-up."""

from __future__ import annotations

from rules.evidence import EngineEvidence, Evidence, LoadEvidence, value
from rules.finding import (
    Finding,
    Sign,
    against,
    cleared,
    confirmed,
    effect_of,
    fix,
    harmless,
    line,
    names_cause,
    no_data,
    pair_line,
    ruled_out,
    strongest,
    summary,
)
from rules.priors import Strength
from rules.thresholds import Bar
from rules.verdict import Cause, Cost
from rules.window import Event

DEPLOYS = ("deploy", "config")


def concerns(event: Event, engine: str) -> bool:
    return event.subject in ("", engine) or not engine


def cold_start(evidence: Evidence, bar: Bar) -> Finding:
    """R21, R22: the engine is starting, or so young that first requests pay for its warm-up."""
    engine = evidence.engine
    if engine is None:
        return no_data(Cause.COLD_START, line("no_engine"))
    if engine.load is not None:
        return _long_start(evidence, engine.load, bar)
    since = evidence.at_ns - int(max(engine.down_s, 1.0) * 1e9)
    started = [
        event
        for event in evidence.events
        if event.kind in ("restart", "deploy") and event.time_ns >= since - 10**10 and concerns(event, engine.name)
    ]
    starting = line("starting", "engine.starting", engine=engine.name, down_s=engine.down_s)
    slow_start = engine.starting and bar.reached("cold_start.starting_s", engine.down_s)
    if engine.starting and not started and not slow_start:
        return ruled_out(Cause.COLD_START, starting)  # it loads, as it should
    if slow_start or (bar.reached("scheduling.silent_s", engine.down_s) and started):
        return confirmed(
            Cause.COLD_START,
            Strength.STRONG,
            (
                line(
                    f"changed_{started[-1].kind}", "", text=started[-1].text or engine.name, minutes=engine.down_s / 60
                )
                if started
                else starting,
                line("not_answering", "engine.up", engine=engine.name, down_s=engine.down_s),
            ),
            summary("starting", engine=engine.name, down_s=engine.down_s),
            (fix("wait_warm", Cost.SOFTWARE_CHEAP), fix("faster_load", Cost.SOFTWARE_CHEAP)),
            since_ns=started[0].time_ns if started else since,
            alone=True,
        )
    return _young(evidence, engine, bar)


def begins_empty(evidence: Evidence, bar: Bar) -> bool:
    """A restart is told, no other change, and no prompt finds its prefix: a cache begins empty, whatever the program does."""
    engine, kinds = evidence.engine, {event.kind for event in evidence.events}
    if engine is None or not evidence.told or "restart" not in kinds or kinds & {*DEPLOYS, "driver"}:
        return False
    hit = value(engine.prefix_hit)
    return engine.no_reuse or bar.reached("software.no_hits_pct", 100 * hit if hit is not None else None)


def _young(evidence: Evidence, engine: EngineEvidence, bar: Bar) -> Finding:
    """Started within the last minutes, unchanged, and slow since: kernels compile, caches fill."""
    uptime = engine.uptime_s
    if uptime is None and begins_empty(evidence, bar):
        return confirmed(
            Cause.COLD_START,
            Strength.FAIR,
            (line("told_restart", ""), line("no_reuse", "engine.prefix_hits_total"), pair_line(evidence)),
            names_cause(Cause.COLD_START, effect_of(evidence, bar)),
            (fix("wait_warm", Cost.SOFTWARE_CHEAP),),
            support=3.0,
        )
    if uptime is None:
        return no_data(Cause.COLD_START, line("no_uptime"))
    if uptime >= bar.enter("cold_start.warm_s"):
        return ruled_out(Cause.COLD_START, line("warm", "engine.uptime_s", minutes=uptime / 60))
    effect = effect_of(evidence, bar)
    first_s = value(engine.ttft) if engine.ttft is not None and not engine.ttft.relative else None
    if evidence.told and bar.reached("cold_start.first_ratio", evidence.output.ttft_ratio):
        return confirmed(
            Cause.COLD_START,
            Strength.FAIR,
            (line("young", "engine.uptime_s", uptime_s=uptime), against(engine.ttft)),
            names_cause(Cause.COLD_START, effect),
            (fix("wait_warm", Cost.SOFTWARE_CHEAP),),
            alone=True,
        )
    seen = line("young", "engine.uptime_s", uptime_s=uptime)
    began = evidence.at_ns - int(uptime * 1e9)
    since = evidence.output.since_ns
    changed = any(
        event.kind in DEPLOYS and concerns(event, engine.name) and abs(event.time_ns - began) <= 180 * 10**9
        for event in evidence.events
    )
    if not effect.slow_work or changed or (since is not None and since > began + bar.enter("cold_start.lag_s") * 10**9):
        return harmless(Cause.COLD_START, effect, seen)
    return confirmed(
        Cause.COLD_START,
        Strength.FAIR,
        (
            seen,
            line("first_slow", "engine.ttft_p95_s", ttft_s=first_s) if first_s is not None else None,
            pair_line(evidence),
        ),
        summary("cold", engine=engine.name, uptime_s=uptime, loss_pct=effect.loss_pct or 0.0),
        (fix("wait_warm", Cost.SOFTWARE_CHEAP),),
        since_ns=began,
    )


def _long_start(evidence: Evidence, load: LoadEvidence, bar: Bar) -> Finding:
    """R22: a start that takes long beyond reading its weights, or models that are loaded again and again."""
    signs: list[Sign] = []
    took = load.total_s if load.total_s is not None else load.load_s
    if load.repeated or load.memory_sawtooth:
        signs.append(
            Sign(Strength.STRONG if load.repeated else Strength.FAIR, line("loads_again", "gpu.mem_used_bytes"))
        )
    if took is not None and not load.read_bound:
        if load.weights_s is not None and bar.reached("cold_start.beyond_weights_s", took - load.weights_s):
            signs.append(Sign(Strength.STRONG, line("start_beyond", "", took_s=took, weights_s=load.weights_s)))
        elif load.weights_s is None and bar.reached("cold_start.load_s", took):
            signs.append(Sign(Strength.FAIR, line("start_took", "", took_s=took)))
    if not signs:
        return cleared(Cause.COLD_START, [line("start_took", "", took_s=took) if took is not None else None], [])
    return confirmed(
        Cause.COLD_START,
        strongest(signs),
        (*(sign.line for sign in signs), pair_line(evidence)),
        names_cause(Cause.COLD_START, effect_of(evidence, bar)),
        (fix("warm_caches", Cost.SOFTWARE_CHEAP), fix("faster_load", Cost.SOFTWARE_CHEAP)),
        alone=True,
    )
