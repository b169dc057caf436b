"""What is seen of the GPUs of a pair."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from rules.evidence import GpuEvidence, Observation, Seen
from rules.observation.reader import BACK_S, NOW_S, Reader
from rules.window import SECOND, Device
from telemetry.catalogue import GPU_STATES
from telemetry.pairs import THROTTLE_REASONS

COUNTERS: Mapping[str, str] = {
    "hw_thermal": "throttle_hw_thermal_s",
    "sw_thermal": "throttle_sw_thermal_s throttle_thermal_s",
    "sw_power_cap": "throttle_sw_power_s",
    "hw_power_brake": "throttle_hw_power_brake_s",
}
"""Seconds under each reason, by counter; one that does not tell software from hardware stands for the software's."""

HUNG = GPU_STATES.index("hung")
HUNG_S = 5.0
BITS = {name: bit for bit, name in THROTTLE_REASONS}
JUDGED_BITS = ("hw_thermal", "sw_thermal", "sw_power_cap", "hw_power_brake", "hw_slowdown", "sync_boost")


def observe_gpus(
    reader: Reader, gpus: Sequence[Device], neighbour_temps: Mapping[str, float]
) -> tuple[GpuEvidence, ...]:
    """`neighbour_temps`: the temperature of every GPU of the node now, by index."""
    found = []
    for gpu in gpus:
        others = [temp for index, temp in neighbour_temps.items() if index != gpu.tags.get("gpu", "")]
        found.append(_observe_gpu(reader, gpu, statistics.median(others) if others else None))
    return tuple(found)


def _observe_gpu(reader: Reader, gpu: Device, others: float | None) -> GpuEvidence:
    index = gpu.tags.get("gpu", "")
    temp = reader.gauge(gpu, "temp_c", index)
    temp_limit, mem_limit = gpu.known("temp_limit_c", reader.at_ns), gpu.known("mem_temp_limit_c", reader.at_ns)
    mem_temp = reader.gauge(gpu, "mem_temp_c", index)
    healthy, link_up = reader.state(gpu, "healthy"), reader.state(gpu, "link_up")
    ecc = reader.growth(gpu, "ecc_uncorrected_total", BACK_S)
    remapped = reader.growth(gpu, "remapped_rows_total", BACK_S)
    remap_failed = gpu.known("remap_failed", reader.at_ns)
    used, total = reader.gauge(gpu, "mem_used_bytes", index), gpu.known("mem_total_bytes", reader.at_ns)
    free = None
    if used is not None and total is not None:
        free = Observation(total - used.value, "gpu.mem_used_bytes", f"{index}.free")
    return GpuEvidence(
        index=index,
        age_s=(reader.at_ns - gpu.last_ns) / SECOND if gpu.last_ns else math.inf,
        state=_settled(reader, gpu),
        util=reader.gauge(gpu, "util_pct", index),
        temp=temp,
        temp_limit=temp_limit,
        temp_margin=_margin(reader, gpu, index, temp, temp_limit, mem_temp, mem_limit),
        mem_temp=mem_temp,
        mem_temp_limit=mem_limit,
        peer_temp=None if temp is None or others is None else Observation(temp.value, temp.lane, index, others),
        power=reader.gauge(gpu, "power_w", index),
        power_limit=reader.last(gpu, "power_limit_w", index),
        power_limit_default=gpu.known("power_limit_default_w", reader.at_ns),
        power_limit_requested=gpu.known("power_limit_requested_w", reader.at_ns),
        sm_clock=reader.gauge(gpu, "sm_clock_mhz", index),
        sm_clock_max=gpu.known("sm_clock_max_mhz", reader.at_ns),
        mem_clock=reader.gauge(gpu, "mem_clock_mhz", index),
        fan=reader.gauge(gpu, "fan_pct", index),
        pstate=reader.state(gpu, "pstate"),
        duty=_duties(reader, gpu, index),
        pcie_gen=reader.last(gpu, "pcie_gen", index),
        pcie_gen_max=gpu.known("pcie_gen_max", reader.at_ns),
        pcie_width=reader.last(gpu, "pcie_width", index),
        pcie_width_max=gpu.known("pcie_width_max", reader.at_ns),
        replays_per_min=reader.rate(gpu, "pcie_replays_total", "gpu.pcie_replays_total", index, 60.0),
        mem_free_bytes=free,
        mem_util=reader.gauge(gpu, "mem_util_pct", index),
        processes=reader.last(gpu, "processes", index),
        ecc_uncorrected_new=None if ecc is None else Observation(ecc[0], "gpu.ecc_uncorrected_total", index, 0.0),
        remap_pending=bool(gpu.known("remap_pending", reader.at_ns)),
        remap_failed=None if remap_failed is None else bool(remap_failed),
        xids=reader.last(gpu, "xid_total", index, BACK_S),
        util_swing=_swing(reader, gpu),
        active=reader.gauge(gpu, "sm_active_pct", index),
        remapped_new=None if remapped is None else Observation(remapped[0], "gpu.remapped_rows_total", index, 0.0),
        mem_used_bytes=used,
        healthy=None if healthy is None else bool(healthy),
        link_up=None if link_up is None else bool(link_up),
        link_bytes_s=reader.gauge(gpu, "pcie_rx_bytes_s", index),
    )


def _swing(reader: Reader, gpu: Device) -> float | None:
    """Points between the 10th and the 90th percentile of util over a minute; None with too few readings to see a swing."""
    readings = sorted(gpu.values("util_pct", reader.start(MINUTE_S), reader.at_ns))
    if len(readings) < LEAST_SWINGING:
        return None
    tenth = len(readings) // 10
    return readings[-1 - tenth] - readings[tenth]


MINUTE_S, LEAST_SWINGING = 60.0, 20


def _settled(reader: Reader, gpu: Device) -> int | None:
    """The state as last told; one call of the driver that overran its deadline is not yet a GPU that hangs."""
    state = reader.state(gpu, "state")
    if state != HUNG:
        return state
    before = [told for told in gpu.values("state", reader.start(HUNG_S), reader.at_ns) if int(told) != HUNG]
    return int(before[-1]) if before else HUNG


def _margin(
    reader: Reader,
    gpu: Device,
    index: str,
    temp: Seen,
    temp_limit: float | None,
    mem_temp: Seen,
    mem_limit: float | None,
) -> Seen:
    """Degrees to the nearest limit. The driver's own margin counts where absolute limits are unknown: it is relative by design."""
    margins = [
        limit - seen.value
        for seen, limit in ((temp, temp_limit), (mem_temp, mem_limit))
        if seen is not None and limit is not None
    ]
    if margins:
        return reader.seen(gpu, "temp_margin_c", index, min(margins))
    return reader.gauge(gpu, "temp_margin_c", index)


def _duties(reader: Reader, gpu: Device, index: str) -> dict[str, Observation]:
    """Share of the window under each reason: from the mask's samples, and from the duration counter, whichever says more."""
    now = [int(mask) for mask in gpu.values("throttle_reasons", reader.start(NOW_S), reader.at_ns)]
    flown = 0  # every reason that was given at all
    for mask in now:
        flown |= mask
    found: dict[str, Observation] = {}
    for name in JUDGED_BITS:
        bit = BITS[name]
        share = (sum(1 for mask in now if mask & bit) / len(now) if flown & bit else 0.0) if now else None
        lane = "gpu.throttle_reasons"
        for counter in COUNTERS.get(name, "").split():
            grown = reader.growth(gpu, counter, NOW_S)
            if grown is not None and grown[1] > 0:
                counted = min(max(grown[0] / grown[1], 0.0), 1.0)
                if share is None or counted > share:
                    share, lane = counted, f"gpu.{counter}"
        if share is None:
            continue
        source = f"{index}.{name}"
        low, middle, high, learned_from = reader.habit("gpu.throttle_reasons", source)
        since = partial(_masked_since, reader, gpu, bit, share) if share > 0.05 else None
        found[name] = Observation(share, lane, source, middle, low, high, learned_from, since)
    return found


def _masked_since(reader: Reader, gpu: Device, bit: int, share: float) -> int | None:
    masks = gpu.backwards("throttle_reasons", reader.start(BACK_S), reader.at_ns)
    return reader.left(((time_ns, float(bool(int(mask) & bit))) for time_ns, mask in masks), share, 0.0)
