"""Step 0: is the number true? Silence, missing metrics, skewed clocks, stale statistics; and demand, which exonerates."""

from __future__ import annotations

from math import isinf

from rules.evidence import Evidence, ratio, value
from rules.finding import Finding, confirmed, effect_of, fix, line, no_data, ruled_out, summary, unread
from rules.priors import Strength
from rules.steps.figures import untrue
from rules.thresholds import Bar
from rules.verdict import Cause, Cost


def is_silent(evidence: Evidence, bar: Bar) -> bool:
    """No fresh sample of the node: nothing about now can be said, by any step."""
    return bar.reached("telemetry.stale_s", evidence.silent_s)


def telemetry(evidence: Evidence, bar: Bar) -> Finding:
    """R0: the node is silent, a device of it is, the engine answers without metrics, or its clock is off."""
    if is_silent(evidence, bar):
        seen = line("silent", "", age_s=min(evidence.silent_s, 1e6))
        if isinf(evidence.silent_s) or not bar.reached("telemetry.named_s", evidence.silent_s):  # inf: never heard
            return no_data(Cause.TELEMETRY, seen)
        return confirmed(
            Cause.TELEMETRY,
            Strength.PROOF,
            (seen,),
            summary("silent", age_s=evidence.silent_s),
            (fix("restore_agent", Cost.OPERATIONS_CHEAP),),
            since_ns=evidence.at_ns - int(evidence.silent_s * 1e9),
            scope="node",
            alone=True,
        )
    return (
        _silent_device(evidence, bar) or _blind_engine(evidence, bar) or untrue(evidence, bar) or _clock(evidence, bar)
    )


def _silent_device(evidence: Evidence, bar: Bar) -> Finding | None:
    silent = [gpu for gpu in evidence.gpus if bar.reached("telemetry.named_s", gpu.age_s)]
    engine = evidence.engine
    if silent:
        oldest = max(gpu.age_s for gpu in silent)
        which = ", ".join(gpu.index for gpu in silent)
        return confirmed(
            Cause.TELEMETRY,
            Strength.STRONG,
            (line("gpu_silent", "gpu.util_pct", gpus=which, age_s=min(oldest, 1e6)),),
            summary("gpu_silent", gpus=which),
            (fix("restart_gpu_reader", Cost.OPERATIONS_CHEAP),),
            since_ns=evidence.at_ns - int(min(oldest, 1e6) * 1e9),
            gpus=tuple(gpu.index for gpu in silent),
            alone=True,
        )
    if engine is not None and bar.reached("telemetry.named_s", engine.age_s):
        return confirmed(
            Cause.TELEMETRY,
            Strength.STRONG,
            (line("engine_silent", "engine.up", engine=engine.name, age_s=engine.age_s),),
            summary("engine_silent", engine=engine.name),
            (fix("check_engine_target", Cost.SOFTWARE_CHEAP),),
            since_ns=evidence.at_ns - int(engine.age_s * 1e9),
            alone=True,
        )
    return None


def _blind_engine(evidence: Evidence, bar: Bar) -> Finding | None:
    engine = evidence.engine
    if engine is None:
        return None
    if engine.blind:
        return confirmed(
            Cause.TELEMETRY,
            Strength.PROOF,
            (line("metrics_absent", "engine.up", engine=engine.name),),
            summary("metrics_absent", engine=engine.name),
            (fix("enable_stats", Cost.SOFTWARE_CHEAP),),
            alone=True,
        )
    age = value(engine.stats_age)
    if evidence.told and engine.stalled and not engine.probe_ok:
        return None  # nothing comes out, by another witness than the statistics
    if bar.reached("telemetry.stats_age_s", age) and age is not None and not engine.down_s:
        return confirmed(
            Cause.TELEMETRY,
            Strength.FAIR,
            (line("stats_old", "engine.stats_age_s", engine=engine.name, age_s=age),),
            summary("stats_old", engine=engine.name, age_s=age),
            (fix("check_engine_target", Cost.SOFTWARE_CHEAP),),
            since_ns=evidence.at_ns - int(age * 1e9),
            alone=True,
        )
    return None


def _clock_apart(evidence: Evidence) -> Finding | None:
    """Its samples are stamped far from everybody's; what it says of itself is judged by its own newest ones."""
    off_s = evidence.clock_off_s
    if off_s is None:
        return None
    key = "clock_ahead" if off_s > 0 else "clock_behind"
    return confirmed(
        Cause.TELEMETRY,
        Strength.STRONG,
        (line(key, "host.clock_offset_s", by_s=abs(off_s)), line("own_time", "")),
        summary(key, node=evidence.node, by_s=abs(off_s)),
        (fix("sync_clock", Cost.OPERATIONS_CHEAP),),
        scope="node",
        alone=True,
    )


def _clock(evidence: Evidence, bar: Bar) -> Finding:
    apart = _clock_apart(evidence)
    if apart is not None:
        return apart
    offset = value(evidence.host.clock_offset) if evidence.host else None
    if offset is not None and bar.reached("telemetry.clock_offset_s", abs(offset)):
        return confirmed(
            Cause.TELEMETRY,
            Strength.FAIR,
            (line("clock_off", "host.clock_offset_s", offset_s=offset),),
            summary("clock_off", offset_s=offset),
            (fix("sync_clock", Cost.OPERATIONS_CHEAP),),
            alone=True,
        )
    engine = evidence.engine
    if evidence.told:
        return no_data(Cause.TELEMETRY, line("nothing_to_compare"))
    fresh = line("fresh", "", age_s=evidence.silent_s)
    if engine is not None and engine.tokens_per_s is not None:
        fresh = line("fresh_engine", "engine.up", age_s=evidence.silent_s, engine=engine.name)
    return ruled_out(Cause.TELEMETRY, fresh)


def demand(evidence: Evidence, bar: Bar) -> Finding:
    """R18: fewer requests and none waiting is less asked, not less done."""
    engine = evidence.engine
    if engine is None or engine.running is None:
        return no_data(Cause.DEMAND, unread("engine.requests_running") if engine is not None else None)
    running, waiting = engine.running.value, value(engine.waiting) or 0.0
    asked = ratio(engine.running)
    if engine.waiting is None:  # how many wait is not known
        return ruled_out(Cause.DEMAND, line("running_only", "engine.requests_running", running=running))
    if running < 0.3 and waiting < 1:
        return ruled_out(Cause.DEMAND, line("idle", "engine.requests_running"))
    if asked is not None and asked <= 0.7 and waiting < 1 and not effect_of(evidence, bar).slow:
        usual = engine.running.usual or 0.0
        return ruled_out(
            Cause.DEMAND, line("less_asked", "engine.requests_running", running=running, usual=usual, waiting=waiting)
        )
    return ruled_out(Cause.DEMAND, line("asked", "engine.requests_running", running=running, waiting=waiting))


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [telemetry(evidence, bar), demand(evidence, bar)]
