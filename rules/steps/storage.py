"""Storage: I/O pressure beside a loss, and starts that wait for their weights."""

from __future__ import annotations

from rules.evidence import Evidence, LoadEvidence
from rules.finding import (
    Finding,
    Sign,
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
from rules.steps.memory import is_swapping
from rules.thresholds import Bar
from rules.verdict import Cause, Cost

TOGETHER_NS = 60 * 10**9
"""Waiting for storage and the loss began within a minute of each other: the span over which either is seen. Own choice."""


def storage(evidence: Evidence, bar: Bar) -> Finding:
    """R25: I/O pressure beside a loss."""
    load = evidence.engine.load if evidence.engine else None
    if load is not None:
        waits = _waits_for_weights(evidence, load, bar)
        if waits is not None:
            return waits
    host = evidence.host
    if host is None or host.psi_io is None:
        return no_data(Cause.STORAGE, line("no_io"))
    seen = line("psi_io", host.psi_io.lane, now=host.psi_io.value)
    above = host.psi_io.usual is None or host.psi_io.value > 2 * host.psi_io.usual + 2
    effect = effect_of(evidence, bar)
    pressed = bar.reached("storage.pressure_pct", host.psi_io.value) and above
    if not pressed or is_swapping(evidence, bar):  # then the pressure is its pages'
        return ruled_out(Cause.STORAGE, seen)
    if not effect.hurts_work:
        return harmless(Cause.STORAGE, effect, seen)
    signs = [Sign(Strength.WEAK, seen)]
    if host.disk_busy is not None and bar.reached("storage.disk_busy_pct", host.disk_busy.value):
        signs.append(Sign(Strength.FAIR, line("disk_busy", host.disk_busy.lane, now=host.disk_busy.value)))
    since, slow_since = host.psi_io.since_ns, evidence.output.since_ns
    if since is not None and slow_since is not None and abs(since - slow_since) <= TOGETHER_NS:
        signs.append(Sign(Strength.FAIR, line("psi_io_together", host.psi_io.lane)))
    return confirmed(
        Cause.STORAGE,
        strongest(signs),
        (*(sign.line for sign in signs), line("weights_stay", ""), pair_line(evidence)),
        summary("storage", now=host.psi_io.value),
        (fix("move_io", Cost.OPERATIONS_CHEAP),),
        since_ns=host.psi_io.since_ns,
        scope="node",
    )


def _waits_for_weights(evidence: Evidence, load: LoadEvidence, bar: Bar) -> Finding | None:
    """The start waits for reading: said so, or most of a long start is weights."""
    took = load.total_s if load.total_s is not None else load.load_s
    mostly = load.weights_s is not None and bar.reached("storage.weights_s", load.weights_s)
    mostly = mostly and (
        took is None or bar.reached("storage.weights_share", (load.weights_s or 0.0) / max(took, 1e-9))
    )
    if not (load.read_bound or mostly):
        return None
    return confirmed(
        Cause.STORAGE,
        Strength.STRONG if load.read_bound else Strength.FAIR,
        (
            line("read_bound", "") if load.read_bound else None,
            line("start_took", "", took_s=took) if took is not None else None,
            line("weights_took", "", weights_s=load.weights_s) if load.weights_s is not None else None,
        ),
        names_cause(Cause.STORAGE, effect_of(evidence, bar)),
        (fix("faster_load", Cost.SOFTWARE_CHEAP), fix("move_io", Cost.OPERATIONS_CHEAP)),
        scope="node",
        alone=True,
    )
