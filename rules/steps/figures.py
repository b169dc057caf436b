"""Figures that can't be true: two witnesses of one thing that disagree, a reading that nothing can have, a sensor that is not defined."""

from __future__ import annotations

from rules.evidence import Evidence, GpuEvidence, value
from rules.finding import Finding, Sign, confirmed, effect_of, fix, line, names_cause, strongest
from rules.launch_line import findings
from rules.priors import Strength
from rules.steps.arithmetic import contradicted
from rules.thresholds import Bar
from rules.verdict import Cause, Cost


def untrue(evidence: Evidence, bar: Bar) -> Finding | None:
    """Evidence order 0: blank sentinels, GPU-Util under MIG, client and server that count differently, spans that are no latencies."""
    signs = [*_gpus(evidence, bar), *_counts(evidence, bar), *contradicted(evidence, bar)]
    if evidence.tells is not None and any(key == "no_stats" for key, _ in findings(evidence.tells.launch)):
        signs.append(Sign(Strength.FAIR, line("launch_no_stats", "engine.up", flag="--disable-log-stats")))
    if evidence.impossible:
        signs.append(Sign(Strength.STRONG, line("impossible", "", keys=", ".join(evidence.impossible[:5]))))
    if not signs:
        return None
    return confirmed(
        Cause.TELEMETRY,
        strongest(signs),
        (sign.line for sign in signs),
        names_cause(Cause.TELEMETRY, effect_of(evidence, bar)),
        (fix("count_at_server", Cost.SOFTWARE_CHEAP), fix("other_sensor", Cost.SOFTWARE_CHEAP)),
        alone=True,
    )


def _gpus(evidence: Evidence, bar: Bar) -> list[Sign]:
    """Two sensors of one thing disagree: GPU-Util is not defined for instances, and a profiling sensor may have stopped."""
    found = []
    for gpu in evidence.gpus:
        util, active = value(gpu.util), value(gpu.active)
        still = util is None if gpu.partitioned else False
        if (still or bar.reached("telemetry.idle_util_pct", util)) and bar.reached("telemetry.active_pct", active):
            seen = line("sensors_differ", "gpu.sm_active_pct", util_pct=util or 0.0, active_pct=active or 0.0)
            found.append(Sign(Strength.STRONG if gpu.partitioned else Strength.FAIR, seen))
        elif _is_dead(evidence, bar, util, active):
            seen = line("sensors_differ", "gpu.sm_active_pct", util_pct=util or 0.0, active_pct=active or 0.0)
            found.append(Sign(Strength.FAIR, seen))
        elif evidence.told and bar.reached("telemetry.busy_util_pct", util) and _for_nobody(evidence, gpu):
            nobody = value(gpu.processes) == 0
            key = "busy_without_process" if nobody else "busy_without_requests"
            found.append(
                Sign(Strength.STRONG if nobody else Strength.WEAK, line(key, "gpu.util_pct", util_pct=util or 0.0))
            )
        elif gpu.partitioned and bar.reached("telemetry.idle_util_pct", util) and _works(evidence):
            found.append(Sign(Strength.FAIR, line("util_undefined", "gpu.util_pct", util_pct=util or 0.0)))
    return found


def _is_dead(evidence: Evidence, bar: Bar, util: float | None, active: float | None) -> bool:
    """Busy by one sensor and nothing by the other, while the work goes on: of an engine that stands still both may be true."""
    if not bar.reached("telemetry.busy_util_pct", util) or not bar.reached("telemetry.dead_active_pct", active):
        return False
    engine = evidence.engine
    if engine is None or engine.away or engine.stalled or engine.stalled_s:
        return False
    return evidence.told or (engine.frozen_s is not None and not bar.reached("telemetry.still_s", engine.frozen_s))


def _for_nobody(evidence: Evidence, gpu: GpuEvidence) -> bool:
    """Util counts a kernel that waits, and the moment in which a driver wakes for whoever looks, like one that works."""
    engine = evidence.engine
    idle = engine is not None and engine.running is not None and engine.running.value + (value(engine.waiting) or 0) < 1
    return value(gpu.processes) == 0 or (idle and not gpu.left_behind)


def _works(evidence: Evidence) -> bool:
    engine = evidence.engine
    if engine is None:
        return False
    return engine.moving or bool(value(engine.tokens_per_s) or value(engine.running))


def _counts(evidence: Evidence, bar: Bar) -> list[Sign]:
    engine = evidence.engine
    if engine is None:
        return []
    found = []
    client = engine.client_tokens_per_s
    if client is not None and client.usual and client.value > 0:
        apart = max(client.value / client.usual, client.usual / client.value)
        if bar.reached("telemetry.counts_apart", apart):
            seen = line("counts_differ", "", client=client.value, server=client.usual)
            found.append(Sign(Strength.STRONG, seen))
    if bar.reached("telemetry.delta_share", value(engine.delta_share)):
        found.append(Sign(Strength.FAIR, line("deltas_merge", "", pct=100 * (value(engine.delta_share) or 0.0))))
    each = value(engine.tokens_per_step)
    running = max(value(engine.running) or 1.0, 1.0)
    if each is not None and not engine.prefill_heavy and bar.reached("telemetry.tokens_per_step", each / running):
        found.append(Sign(Strength.FAIR, line("steps_hold_several", "engine.tokens_per_step", tokens=each)))
    return found
