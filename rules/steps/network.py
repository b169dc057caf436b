"""The network: between the client and the server, and between the GPUs of a group that spans links or nodes."""

from __future__ import annotations

from rules.evidence import Evidence, ratio, value
from rules.finding import (
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
    ruled_out,
    strongest,
    unread_gpus,
)
from rules.priors import Strength
from rules.steps.memory import is_stalled
from rules.thresholds import Bar
from rules.verdict import Cause, Cost

SLOW_TRANSPORTS = frozenset(("socket", "sockets", "tcp", "net/socket"))
"""What a collective library names when it found no direct path; RDMA and shared memory are its fast ones (NCCL's documentation)."""


def network(evidence: Evidence, bar: Bar) -> Finding:
    """Time that is lost outside the server, collectives over sockets, link errors, a group that never came together."""
    effect, engine, fabric = effect_of(evidence, bar), evidence.engine, evidence.fabric
    signs: list[Sign] = []
    outside = value(engine.client_extra_s) if engine else None
    if bar.reached("network.client_extra_s", outside):
        signs.append(Sign(Strength.STRONG, line("client_extra", "", extra_s=outside or 0.0)))
    late, dense = evidence.output.ttft_ratio, ratio(engine.itl) if engine else None
    if evidence.told and bar.reached("network.bunch_first_ratio", late) and bar.reached("network.bunch_ratio", dense):
        signs.append(Sign(Strength.FAIR, line("bunched", "engine.ttft_p95_s", ttft=late or 0.0, itl=dense or 0.0)))
    slow_path = fabric.transport.lower() in SLOW_TRANSPORTS
    if slow_path and effect.hurts:
        signs.append(Sign(Strength.FAIR, line("slow_transport", "", transport=fabric.transport)))
    errors = value(fabric.errors_new)
    if errors and effect.hurts:
        signs.append(Sign(Strength.STRONG, line("link_errors", "", errors=errors)))
    down = [gpu.index for gpu in evidence.gpus if gpu.link_up is False]
    if down and effect.hurts:
        signs.append(Sign(Strength.STRONG, line("port_down", "gpu.link_up", gpus=names(down))))
    for gpu in evidence.gpus:
        carried = ratio(gpu.link_bandwidth)
        if fabric.transport and effect.hurts and bar.reached("pcie_link.bandwidth_ratio", carried):
            signs.append(Sign(Strength.FAIR, line("bandwidth", "", pct=100 * (carried or 0.0))))
    if never_joined(evidence, bar):
        used = sum(value(gpu.mem_used_bytes) or 0.0 for gpu in evidence.gpus)
        signs.append(Sign(Strength.PROOF, line("never_joined", "gpu.mem_used_bytes", gib=used / 2**30)))
    if signs:
        return confirmed(
            Cause.NETWORK,
            strongest(signs),
            (*(sign.line for sign in signs), pair_line(evidence)),
            names_cause(Cause.NETWORK, effect),
            (fix("check_path", Cost.OPERATIONS_CHEAP), fix("fast_transport", Cost.SOFTWARE_CHEAP)),
            alone=True,
        )
    if any(gpu.link_up is not None for gpu in evidence.gpus):
        seen = line("port_harmless", "gpu.link_up", gpus=names(down)) if down else line("ports_up", "gpu.link_up")
        missing = unread_gpus(evidence, "gpu.link_up", lambda gpu: gpu.link_up is not None)
        if down:
            return harmless(Cause.NETWORK, effect, seen)
        return cleared(Cause.NETWORK, [seen], missing)
    if outside is not None:
        return ruled_out(Cause.NETWORK, line("client_extra", "", extra_s=outside))
    if fabric.transport:
        return ruled_out(Cause.NETWORK, line("transport", "", transport=fabric.transport))
    return no_data(Cause.NETWORK, line("no_network"))


def never_joined(evidence: Evidence, bar: Bar) -> bool:
    """Nothing comes out, or a start spins, and the GPUs hold hardly more than a context: the group waits for its first collective."""
    engine = evidence.engine
    if engine is None:
        return False
    starts = engine.load is not None or (engine.starting and bar.reached("network.spin_s", engine.down_s))
    spins = starts and bar.reached("gpu_fault.stuck_util_pct", evidence.util_pct)
    if not is_stalled(engine, bar) and not spins:
        return False
    used = [gpu.mem_used_bytes.value for gpu in evidence.gpus if gpu.mem_used_bytes is not None]
    return bool(used) and bar.reached("network.context_bytes", max(used))
