"""The PCIe link: under load, a generation or width below what this link usually has, beside a loss."""

from __future__ import annotations

from rules.evidence import Evidence, GpuEvidence, ratio, rise, value
from rules.finding import (
    Effect,
    Finding,
    Sign,
    cleared,
    confirmed,
    effect_of,
    fix,
    harmless,
    line,
    names,
    names_cause,
    no_data,
    pair_line,
    strongest,
    summary,
    unread_gpus,
)
from rules.priors import Strength
from rules.steps.physical.readings import fall
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


def pcie_link(evidence: Evidence, bar: Bar) -> Finding:
    """R24: under load, a generation or width below what this link usually has, beside a loss."""
    effect = effect_of(evidence, bar)
    measured = _measured(evidence, effect, bar)
    if measured is not None:
        return measured
    loaded = [
        gpu
        for gpu in evidence.gpus
        if (gpu.pcie_gen is not None or gpu.pcie_width is not None)
        and (
            bar.reached("pcie_link.util_pct", value(gpu.util))
            or (
                evidence.told
                and (gpu.util is None or (effect.slow and bar.reached("pcie_link.width", value(gpu.pcie_width))))
            )
        )
        and (gpu.pstate is None or gpu.pstate <= bar.enter("pcie_link.idle_pstate"))
    ]
    if not loaded:
        return no_data(Cause.PCIE_LINK, line("no_gpu" if not evidence.gpus else "no_link"), *_not_seen(evidence))
    bad = [gpu for gpu in loaded if _link_is_low(gpu, bar)]
    unsure = effect.hurts or not effect.known
    if not bad and unsure and not any(_can_be_cleared(gpu, bar) for gpu in loaded):
        return no_data(Cause.PCIE_LINK, _link_line(loaded[0], "link"), line("link_no_best"))
    worst = min(loaded, key=lambda gpu: (value(gpu.pcie_gen) or 0, value(gpu.pcie_width) or 0))
    if not bad:
        return cleared(Cause.PCIE_LINK, [_link_line(worst, "link")], _not_seen(evidence))
    if not effect.hurts:
        return harmless(Cause.PCIE_LINK, effect, _link_line(worst, "link_harmless"))
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
        summary("pcie_link", gpus=names(gpu.index for gpu in bad), **fall(evidence, effect)),
        (fix("reseat", Cost.OPERATIONS_CHEAP), fix("replace_riser", Cost.HARDWARE_COSTLY)),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in bad),
        support=2.0 if noisy else 1.0,
    )


def _not_seen(evidence: Evidence) -> list[Line]:
    """The cards whose link is not read, or of which nobody knows whether they are under load: an idle one rests its link."""
    if evidence.told:
        return []
    return [
        *unread_gpus(evidence, "gpu.pcie_gen", lambda gpu: gpu.pcie_gen is not None),
        *unread_gpus(evidence, "gpu.pcie_width", lambda gpu: gpu.pcie_width is not None),
        *unread_gpus(evidence, "gpu.util_pct", lambda gpu: gpu.util is not None),
    ]


def _measured(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """What moves, or can't: no peer-to-peer, a measured bandwidth below usual, a link that is full, one rank that waits for its data."""
    if not effect.hurts:
        return None
    group, fabric = evidence.group, evidence.fabric
    signs: list[Sign] = []
    if fabric.peer_to_peer is False:
        signs.append(Sign(Strength.FAIR, line("no_p2p", "")))
    for gpu in evidence.gpus:
        carried = ratio(gpu.link_bandwidth)
        if bar.reached("pcie_link.bandwidth_ratio", carried) and not fabric.transport:
            of_pcie = gpu.pcie_gen is not None or gpu.pcie_width is not None  # else it may be any link's
            strength = Strength.STRONG if of_pcie else Strength.FAIR
            signs.append(Sign(strength, line("bandwidth", "", pct=100 * (carried or 0.0))))
        room = capacity_bytes_s(gpu)
        moved = value(gpu.link_bytes_s)
        if room and moved and bar.reached("pcie_link.full_share", moved / room):
            seen = line("link_full", "gpu.pcie_rx_bytes_s", gpu=gpu.index, gb_s=moved / 1e9, pct=100 * moved / room)
            signs.append(Sign(Strength.FAIR, seen))
    gap = max(group.util) - min(group.util) if len(group.util) > 1 else None
    if bar.reached("pcie_link.rank_gap_pct", gap) and _may_wait_for_link(evidence):
        seen = line("rank_gap", "gpu.util_pct", high=max(group.util), low=min(group.util))
        signs.append(Sign(Strength.FAIR, seen))
    if not signs:
        return None
    return confirmed(
        Cause.PCIE_LINK,
        strongest(signs),
        (*(sign.line for sign in signs), *(_known_link_line(gpu) for gpu in evidence.gpus), pair_line(evidence)),
        names_cause(Cause.PCIE_LINK, effect),
        (fix("better_slots", Cost.OPERATIONS_CHEAP), fix("reseat", Cost.OPERATIONS_CHEAP)),
        since_ns=evidence.output.since_ns,
    )


def _may_wait_for_link(evidence: Evidence) -> bool:
    """Ranks of one group whose busy shares differ wait for data, unless the links are known to be whole or requests are unevenly spread. A
    rank that does nothing at all is stuck, or has no work."""
    if not evidence.group.util or min(evidence.group.util) < 1:
        return False
    if evidence.group.running or evidence.group.share or evidence.group.mixed or evidence.group.uneven:
        return False
    whole = [
        gpu.pcie_gen is not None and gpu.pcie_gen_max is not None and gpu.pcie_gen.value >= gpu.pcie_gen_max
        for gpu in evidence.gpus
    ]
    return not (whole and all(whole))


LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""Of one PCIe lane by generation, after line coding (PCI-SIG base specifications)."""


def capacity_bytes_s(gpu: GpuEvidence) -> float | None:
    """What the link can carry one way as it is now; None while its generation or width is not known."""
    if gpu.pcie_gen is None or gpu.pcie_width is None:
        return None
    return LANE_BYTES_S.get(int(gpu.pcie_gen.value), 0.0) * gpu.pcie_width.value or None


def _link_is_low(gpu: GpuEvidence, bar: Bar) -> bool:
    """Below its own usual where that is known; else below its maximum, for the generation only: narrow slots exist by design.

    Where neither is known, only what no slot of an inference host should be.
    """
    gen, width = gpu.pcie_gen, gpu.pcie_width
    if _carries_little(gpu, bar):
        return False
    narrow = width is not None and (rise(width) or 0.0) < 0
    if gen is not None and gen.usual is not None:
        return narrow or gen.value < gen.usual
    if gen is not None and gpu.pcie_gen_max is not None:
        return narrow or gen.value < gpu.pcie_gen_max
    return narrow or bar.reached("pcie_link.gen", value(gen)) or bar.reached("pcie_link.width", value(width))


def _carries_little(gpu: GpuEvidence, bar: Bar) -> bool:
    room, moved = capacity_bytes_s(gpu), value(gpu.link_bytes_s)
    return bool(room and moved is not None and not bar.reached("pcie_link.used_share", moved / room))


def _can_be_cleared(gpu: GpuEvidence, bar: Bar) -> bool:
    """Whether a link that is not low is known to be whole: what is told of it can be compared with something, or it carries little."""
    compared = gpu.pcie_gen_max is not None or (gpu.pcie_gen is not None and gpu.pcie_gen.usual is not None)
    return compared or _carries_little(gpu, bar)


def _known_link_line(gpu: GpuEvidence) -> Line | None:
    return None if gpu.pcie_gen is None else _link_line(gpu, "link")


def _as_told(number: float | None) -> str:
    return "?" if number is None else f"{number:g}"


def _link_line(gpu: GpuEvidence, key: str) -> Line:
    if gpu.pcie_gen is None or gpu.pcie_width is None or gpu.pcie_gen_max is None:
        gen, width = value(gpu.pcie_gen), value(gpu.pcie_width)
        return line("link_told", "gpu.pcie_gen", gen=_as_told(gen), width=_as_told(width))
    return line(
        key,
        "gpu.pcie_gen",
        gpu=gpu.index,
        gen=int(value(gpu.pcie_gen) or 0),
        gen_max=int(gpu.pcie_gen_max or value(gpu.pcie_gen) or 0),
        width=int(value(gpu.pcie_width) or 0),
    )
