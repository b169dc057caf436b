"""The PCIe link: under load, a generation or width below what this link usually has, beside a loss."""

from __future__ import annotations

from rules.evidence import Evidence, GpuEvidence, rise, value
from rules.finding import Finding, confirmed, effect_of, fix, line, names, no_data, pair_line, ruled_out, summary
from rules.priors import Strength
from rules.steps.physical.readings import fall
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


def pcie_link(evidence: Evidence, bar: Bar) -> Finding:
    """R24: under load, a generation or width below what this link usually has, beside a loss."""
    loaded = [
        gpu
        for gpu in evidence.gpus
        if gpu.pcie_gen is not None
        and bar.reached("pcie_link.util_pct", value(gpu.util))
        and (gpu.pstate is None or gpu.pstate <= bar.enter("pcie_link.idle_pstate"))
    ]
    if not loaded:
        return no_data(Cause.PCIE_LINK, line("no_gpu" if not evidence.gpus else "no_link"))
    bad = [gpu for gpu in loaded if _link_is_low(gpu)]
    if not bad or not effect_of(evidence, bar).slow:
        worst = min(loaded, key=lambda gpu: (value(gpu.pcie_gen) or 0, value(gpu.pcie_width) or 0))
        return ruled_out(Cause.PCIE_LINK, _link_line(worst, "link_harmless" if bad else "link"))
    worst = bad[0]
    noisy = bar.reached("pcie_link.replays_per_min", value(worst.replays_per_min))
    return confirmed(
        Cause.PCIE_LINK,
        Strength.FAIR,
        (
            _link_line(worst, "link_low"),
            line("replays", "gpu.pcie_replays_total", gpu=worst.index, per_min=value(worst.replays_per_min) or 0.0)
            if noisy
            else None,
            pair_line(evidence),
        ),
        summary("pcie_link", gpus=names(gpu.index for gpu in bad), **fall(evidence, effect_of(evidence, bar))),
        (fix("reseat", Cost.OPERATIONS_CHEAP), fix("replace_riser", Cost.HARDWARE_COSTLY)),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in bad),
        support=2.0 if noisy else 1.0,
    )


def _link_is_low(gpu: GpuEvidence) -> bool:
    """Below its own usual where that is known; else below its maximum, for the generation only: narrow slots exist by design."""
    gen, width = gpu.pcie_gen, gpu.pcie_width
    narrow = width is not None and (rise(width) or 0.0) < 0
    if gen is None:
        return narrow
    if gen.usual is not None:
        return narrow or gen.value < gen.usual
    return narrow or (gpu.pcie_gen_max is not None and gen.value < gpu.pcie_gen_max)


def _link_line(gpu: GpuEvidence, key: str) -> Line:
    return line(
        key,
        "gpu.pcie_gen",
        gpu=gpu.index,
        gen=int(value(gpu.pcie_gen) or 0),
        gen_max=int(gpu.pcie_gen_max or value(gpu.pcie_gen) or 0),
        width=int(value(gpu.pcie_width) or 0),
    )
