"""Contention: a second process on the GPU, or one that an engine left behind."""

from __future__ import annotations

from rules.evidence import Evidence, rise, value
from rules.finding import (
    Effect,
    Finding,
    cleared,
    confirmed,
    effect_of,
    fix,
    harmless,
    line,
    names_cause,
    no_data,
    pair_line,
    summary,
    unread_gpus,
)
from rules.priors import Strength
from rules.thresholds import Bar
from rules.verdict import Cause, Cost

LEAD_NS = 30 * 10**9
"""A process that came so long before the work was slow may compute only now; it may as well have nothing to do with it."""


def contention(evidence: Evidence, bar: Bar) -> Finding:
    """A second process on the GPU since the pair became slow."""
    effect: Effect = effect_of(evidence, bar)
    held = [gpu for gpu in evidence.gpus if gpu.left_behind]
    if held and (effect.hurts or evidence.told):  # what nobody serves from is of no use, whether or not requests come
        return _left_behind(evidence, effect)
    counted = [gpu for gpu in evidence.gpus if gpu.processes is not None]
    if not counted:
        return no_data(Cause.CONTENTION, line("no_gpu" if not evidence.gpus else "no_processes"))
    shared = [gpu for gpu in counted if bar.reached("contention.processes_rise", rise(gpu.processes))]
    most = max(counted, key=lambda gpu: value(gpu.processes) or 0)
    count = int(value(most.processes) or 0)
    seen = line("processes", "gpu.processes", gpu=most.index, count=count)
    if count == 1:
        seen = line("one_process", "gpu.processes", gpu=most.index)
    if not shared or not effect.hurts_work:
        missing = [] if evidence.told else unread_gpus(evidence, "gpu.processes", lambda gpu: gpu.processes is not None)
        several = any((value(gpu.processes) or 0) > 1 and rise(gpu.processes) is None for gpu in counted)
        if (shared or several) and not missing:
            return harmless(Cause.CONTENTION, effect, seen)
        return cleared(Cause.CONTENTION, [seen], missing)
    came_ns, slow_ns = shared[0].processes.since_ns if shared[0].processes else None, evidence.output.since_ns
    long_there = came_ns is not None and slow_ns is not None and slow_ns - came_ns > LEAD_NS
    return confirmed(
        Cause.CONTENTION,
        Strength.WEAK if long_there else Strength.FAIR,
        (seen, pair_line(evidence)),
        summary("contention", loss_pct=effect.loss_pct or 0.0),
        (fix("evict_tenant", Cost.OPERATIONS_CHEAP),),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in shared),
    )


def _left_behind(evidence: Evidence, effect: Effect) -> Finding:
    used = next((gpu.mem_used_bytes for gpu in evidence.gpus if gpu.mem_used_bytes is not None), None)
    return confirmed(
        Cause.CONTENTION,
        Strength.STRONG,
        (
            line("left_behind", "gpu.processes"),
            line("memory_used", "gpu.mem_used_bytes", gib=used.value / 2**30) if used is not None else None,
        ),
        names_cause(Cause.CONTENTION, effect),
        (fix("end_left_behind", Cost.OPERATIONS_CHEAP),),
        alone=True,
    )
