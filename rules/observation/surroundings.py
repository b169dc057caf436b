"""What is seen of the host, and of the air and the power around the node."""

from __future__ import annotations

import math

from rules.evidence import HostEvidence, Observation, RoomEvidence
from rules.observation.reader import ROOM_S, Reader
from rules.pair import Pair
from rules.window import SECOND, Device, Window


def observe_host(reader: Reader, host: Device) -> HostEvidence:
    swaps = [reader.gauge(host, name) for name in ("swap_in_bytes_s", "swap_out_bytes_s")]
    known = [seen for seen in swaps if seen is not None]
    swap = None
    if known:
        swap = reader.plain(sum(seen.value for seen in known), "host.swap_in_bytes_s", "both")
    return HostEvidence(
        age_s=(reader.at_ns - host.last_ns) / SECOND if host.last_ns else math.inf,
        cpu=reader.gauge(host, "cpu_pct"),
        core_max=reader.gauge(host, "cpu_core_max_pct"),
        load=reader.gauge(host, "load1"),
        psi_cpu=reader.gauge(host, "psi_cpu_pct"),
        psi_io=reader.gauge(host, "psi_io_pct"),
        psi_memory=reader.gauge(host, "psi_memory_pct"),
        throttled=reader.gauge(host, "cgroup_throttled_pct"),
        iowait=reader.gauge(host, "iowait_pct"),
        disk_busy=reader.gauge(host, "disk_busy_pct"),
        mem_used=reader.gauge(host, "mem_used_pct"),
        swap=swap,
        clock_offset=reader.gauge(host, "clock_offset_s") or reader.gauge(host, "clock_offset_s", look_s=ROOM_S),
    )


def observe_room(reader: Reader, window: Window, pair: Pair, other_inlet: float | None) -> RoomEvidence:
    node, circuit = pair.node, window.circuits.get(pair.subject.get("circuit", ""))
    thermal, power = window.devices(node, "thermal"), window.devices(node, "power")
    inlet = reader.last(thermal[-1], "inlet_c", look_s=ROOM_S) if thermal else None
    psus = [reader.last(psu, "ok", psu.tags.get("psu", ""), ROOM_S) for psu in window.devices(node, "psu")]
    known = [seen.value for seen in psus if seen is not None]
    redundancy = reader.last(power[-1], "redundancy", look_s=ROOM_S) if power else None
    return RoomEvidence(
        inlet=inlet,
        peer_inlet=None
        if inlet is None or other_inlet is None
        else Observation(inlet.value, inlet.lane, "", other_inlet),
        fan=reader.last(thermal[-1], "fan_pct", look_s=ROOM_S) if thermal else None,
        node_power=reader.last(power[-1], "node_w", look_s=ROOM_S) if power else None,
        node_cap=reader.last(power[-1], "cap_w", look_s=ROOM_S) if power else None,
        headroom_redundant=reader.last(power[-1], "headroom_redundant_pct", look_s=ROOM_S) if power else None,
        circuit_load=None if circuit is None else reader.gauge(circuit, "load_pct", look_s=ROOM_S),
        redundancy=None if redundancy is None else int(redundancy.value),
        psu_failed=sum(1 for ok in known if not ok) if known else None,
        psu_count=len(known) if known else None,
    )
