"""From samples to evidence: pure reading of one pair out of the window, each number beside what is usual for it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rules.evidence import (
    EngineEvidence,
    Evidence,
    GpuEvidence,
    HostEvidence,
    Observation,
    OutputEvidence,
    PeerEvidence,
    RoomEvidence,
    Seen,
)
from rules.pair import Pair
from rules.usual import PeerHabits, Usual
from rules.window import SECOND, Device, Window
from telemetry.pairs import THROTTLE_REASONS

NOW_S = 30.0
"""The span that counts as now: three spans of ten seconds, long enough for a duty cycle, short enough to name a fault in a minute."""

ROOM_S = 150.0
"""BMC, PSU and PDU are read every 30-60 s: look back over two readings."""

BACK_S = 300.0
"""How far back a beginning is looked for."""

FINISH_S = 60.0
"""Engines that count tokens when a request finishes need longer spans."""

COUNTERS = {
    "hw_thermal": "throttle_hw_thermal_s",
    "sw_thermal": "throttle_sw_thermal_s",
    "sw_power_cap": "throttle_sw_power_s",
    "hw_power_brake": "throttle_hw_power_brake_s",
}
BITS = {name: bit for bit, name in THROTTLE_REASONS}
JUDGED_BITS = ("hw_thermal", "sw_thermal", "sw_power_cap", "hw_power_brake", "hw_slowdown", "sync_boost")


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one pair's devices at one moment; `peers` are the usual values of pairs of the same kin."""

    usual: Usual
    peers: PeerHabits
    at_ns: int

    def start(self, look_s: float) -> int:
        return self.at_ns - int(look_s * SECOND)

    def gauge(self, device: Device, name: str, source: str = "", look_s: float = NOW_S) -> Seen:
        readings = device.values(name, self.start(look_s), self.at_ns)
        if not readings:
            return None
        return self.seen(device, name, source, statistics.median(readings), len(readings))

    def last(self, device: Device, name: str, source: str = "", look_s: float = NOW_S) -> Seen:
        """The newest reading: for states and slow fields."""
        readings = device.values(name, self.start(look_s), self.at_ns)
        if readings:
            return self.seen(device, name, source, readings[-1], len(readings))
        known = device.known(name, self.at_ns)
        return None if known is None else self.seen(device, name, source, known, 1)

    def plain(self, reading: float, lane: str, source: str = "", samples: int = 1) -> Observation:
        """A derived reading beside what is usual for it, without its beginning."""
        low, middle, high, learned_from = self.habit(lane, source)
        return Observation(reading, lane, source, middle, low, high, learned_from, samples=samples)

    def seen(self, device: Device, name: str, source: str, reading: float, samples: int) -> Observation:
        lane = f"{device.measurement}.{name}"
        low, middle, high, learned_from = self.habit(lane, source)
        since = None
        if middle is not None and _is_away(reading, middle):
            since = self.left(device.points(name, self.start(BACK_S), self.at_ns), reading, middle)
        return Observation(reading, lane, source, middle, low, high, learned_from, since, samples)

    def habit(self, lane: str, source: str) -> tuple[float | None, float | None, float | None, str]:
        own = self.usual.range(lane, source)
        if own is not None:
            return own[0], own[1], own[2], "history"
        theirs = self.peers.range(lane)
        if theirs is not None:
            return *theirs, "peers"
        return None, None, None, ""

    def left(self, points: Sequence[tuple[int, float]], reading: float, middle: float) -> int | None:
        """Since when the points are beyond the midpoint between usual and now, but for lapses below ten seconds."""
        midpoint = (reading + middle) / 2
        above = reading > middle
        since: int | None = None
        for time_ns, point in reversed(points):
            if (point > midpoint) == above:
                since = time_ns
            elif (since if since is not None else self.at_ns) - time_ns > 10 * SECOND:
                break
        return since

    def growth(self, device: Device, name: str, look_s: float) -> tuple[float, float] | None:
        """(growth, seconds) of a counter over the last `look_s`; a reset counts from zero. None with fewer than two readings."""
        points = device.points(name, self.start(look_s), self.at_ns)
        if len(points) < 2:
            return None
        counts = [count for _, count in points]
        if counts[-1] == max(counts) and counts[0] == min(counts):  # no reset: the common case, without a walk
            return counts[-1] - counts[0], (points[-1][0] - points[0][0]) / SECOND
        grown = 0.0
        for (_, before), (_, after) in itertools.pairwise(points):
            grown += after - before if after >= before else after
        return grown, (points[-1][0] - points[0][0]) / SECOND

    def rate(self, device: Device, name: str, lane: str, source: str = "", per_s: float = 1.0) -> Seen:
        grown = self.growth(device, name, NOW_S)
        if grown is None or grown[1] <= 0:
            return None
        return self.plain(grown[0] / grown[1] * per_s, lane, source)


def _is_away(reading: float, middle: float) -> bool:
    return abs(reading - middle) >= 0.05 * max(abs(middle), 1e-9)


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
    state, pstate = reader.last(gpu, "state", index), reader.last(gpu, "pstate", index)
    ecc = reader.growth(gpu, "ecc_uncorrected_total", BACK_S)
    used, total = reader.gauge(gpu, "mem_used_bytes", index), gpu.known("mem_total_bytes", reader.at_ns)
    free = None
    if used is not None and total is not None:
        free = Observation(total - used.value, "gpu.mem_used_bytes", f"{index}.free", samples=used.samples)
    return GpuEvidence(
        index=index,
        age_s=(reader.at_ns - gpu.last_ns) / SECOND if gpu.last_ns else math.inf,
        state=None if state is None else int(state.value),
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
        pstate=None if pstate is None else int(pstate.value),
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
        remap_failed=bool(gpu.known("remap_failed", reader.at_ns)),
    )


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
        return reader.seen(gpu, "temp_margin_c", index, min(margins), temp.samples if temp else 1)
    return reader.gauge(gpu, "temp_margin_c", index)


def _duties(reader: Reader, gpu: Device, index: str) -> dict[str, Observation]:
    """Share of the window under each reason: from the mask's samples, and from the duration counter, whichever says more."""
    points = gpu.points("throttle_reasons", reader.start(BACK_S), reader.at_ns)
    start = reader.start(NOW_S)
    masks = [(time_ns, int(mask)) for time_ns, mask in points]
    now = [mask for time_ns, mask in masks if time_ns > start]
    found: dict[str, Observation] = {}
    for name in JUDGED_BITS:
        share = sum(1 for mask in now if mask & BITS[name]) / len(now) if now else None
        lane, samples = "gpu.throttle_reasons", len(now)
        grown = reader.growth(gpu, COUNTERS[name], NOW_S) if name in COUNTERS else None
        if grown is not None and grown[1] > 0:
            counted = min(max(grown[0] / grown[1], 0.0), 1.0)
            if share is None or counted > share:
                share, lane = counted, f"gpu.{COUNTERS[name]}"
        if share is None:
            continue
        source = f"{index}.{name}"
        low, middle, high, learned_from = reader.habit("gpu.throttle_reasons", source)
        since = reader.left([(t, float(bool(m & BITS[name]))) for t, m in masks], share, 0.0) if share > 0.05 else None
        found[name] = Observation(share, lane, source, middle, low, high, learned_from, since, samples)
    return found


def observe_engine(reader: Reader, engine: Device) -> EngineEvidence:
    up = reader.gauge(engine, "up")
    probe = reader.last(engine, "probe_ok")
    uptime = reader.last(engine, "uptime_s")
    blocks = reader.last(engine, "kv_blocks_count")
    oom = reader.growth(engine, "oom_total", BACK_S)
    hit = prefix_hit(engine, reader.start(2 * NOW_S), reader.at_ns)
    return EngineEvidence(
        name=engine.tags.get("engine", ""),
        age_s=(reader.at_ns - engine.last_ns) / SECOND if engine.last_ns else math.inf,
        up=up,
        down_s=_down_s(reader, engine),
        away=_does_not_answer(reader, engine),
        starting=_is_starting(reader, engine),
        blind=_is_blind(reader, engine),
        tokens_per_s=reader.gauge(engine, "tokens_per_s"),
        prompt_tokens_per_s=reader.gauge(engine, "prompt_tokens_per_s"),
        running=reader.gauge(engine, "requests_running"),
        waiting=reader.gauge(engine, "requests_waiting"),
        kv_used=reader.gauge(engine, "kv_used_pct"),
        kv_fragmentation=reader.gauge(engine, "kv_fragmentation_pct"),
        kv_blocks=blocks,
        preemptions_per_s=reader.rate(engine, "preemptions_total", "engine.preemptions_total"),
        oom_new=None if oom is None else Observation(oom[0], "engine.oom_total", "", 0.0),
        ttft=reader.gauge(engine, "ttft_p95_s") or reader.gauge(engine, "ttft_p50_s"),
        itl=reader.gauge(engine, "itl_mean_s"),
        prompt_len=reader.gauge(engine, "prompt_len_mean"),
        output_len=reader.gauge(engine, "output_len_mean"),
        context=reader.gauge(engine, "context_mean"),
        prompt_share=_prompt_share(reader, engine),
        prefix_hit=None if hit is None else reader.plain(hit, "engine.prefix_hits_total"),
        stats_age=reader.last(engine, "stats_age_s"),
        uptime_s=None if uptime is None else uptime.value,
        frozen_s=_frozen_s(reader, engine),
        probe_ok=None if probe is None else bool(probe.value),
    )


def prefix_hit(engine: Device, start_ns: int, end_ns: int) -> float | None:
    """Share of queried prompt tokens found in the prefix cache, 0..1; None without counters or queries."""
    queries, hits = (
        [count for _, count in engine.points(name, start_ns, end_ns)]
        for name in ("prefix_queries_total", "prefix_hits_total")
    )
    if len(queries) < 2 or len(hits) < 2 or queries[-1] <= queries[0] or hits[-1] < hits[0]:
        return None
    return min((hits[-1] - hits[0]) / (queries[-1] - queries[0]), 1.0)


def _prompt_share(reader: Reader, engine: Device) -> Seen:
    """Computed prompt tokens for each output token; of means, since prompts come in bursts and a median of bursts is zero."""
    out = engine.values("tokens_per_s", reader.start(NOW_S), reader.at_ns)
    into = engine.values("prompt_tokens_per_s", reader.start(NOW_S), reader.at_ns)
    if not into or sum(out) <= 0:
        return None
    computed = 1 - (prefix_hit(engine, reader.start(NOW_S), reader.at_ns) or 0.0)
    share = computed * (sum(into) / len(into)) / (sum(out) / len(out))
    return reader.plain(share, "engine.prompt_tokens_per_s", "share", len(into))


def _is_blind(reader: Reader, engine: Device) -> bool:
    """It answers, for most of the window, and shows none of the numbers that its output is read from."""
    start = reader.start(NOW_S)
    answers = engine.points("up", start, reader.at_ns)
    if not answers or not all(up for _, up in answers) or answers[-1][0] - answers[0][0] < 0.6 * NOW_S * SECOND:
        return False
    return not any(
        engine.values(name, start, reader.at_ns)
        for name in ("generation_tokens_total", "tokens_per_s", "requests_running")
    )


def _down_s(reader: Reader, engine: Device) -> float:
    points = engine.points("up", reader.start(BACK_S), reader.at_ns)
    since: int | None = None
    for time_ns, up in reversed(points):
        if up:
            break
        since = time_ns
    return (points[-1][0] - since) / SECOND if since is not None else 0.0


def _does_not_answer(reader: Reader, engine: Device) -> bool:
    points = engine.points("up", reader.start(NOW_S), reader.at_ns)
    return bool(points and not points[-1][1])


def _is_starting(reader: Reader, engine: Device) -> bool:
    starting = engine.points("starting", reader.start(NOW_S), reader.at_ns)
    up = engine.points("up", reader.start(NOW_S), reader.at_ns)
    # `starting` is told only while it does not answer, so an older one says nothing once it does
    return bool(starting and up and starting[-1][1] and not up[-1][1])


def _frozen_s(reader: Reader, engine: Device) -> float | None:
    """Seconds without a token, a prompt token or a step while requests ran the whole time. None without counters or readings.

    An engine that counts tokens at a request's end stands still between ends by design: None.
    """
    if engine.texts.get("counter_style") == "finish":
        return None
    running = engine.points("requests_running", reader.start(BACK_S), reader.at_ns)
    if not running or running[-1][0] < reader.start(NOW_S):
        return None
    progress: int | None = None
    known = False
    for name in ("generation_tokens_total", "prompt_tokens_total", "steps_total"):
        points = engine.points(name, reader.start(BACK_S), reader.at_ns)
        known = known or (len(points) > 1 and name == "generation_tokens_total")
        for (_, before), (time_ns, after) in zip(reversed(points[:-1]), reversed(points[1:]), strict=True):
            if after != before:
                progress = max(progress or 0, time_ns)
                break
    if not known:
        return None
    since = running[-1][0]
    for time_ns, count in reversed(running):
        if count < 1 or (progress is not None and time_ns <= progress):
            break
        since = time_ns
    return (running[-1][0] - since) / SECOND


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
        mem_used=reader.gauge(host, "mem_used_pct"),
        swap=swap,
        clock_offset=reader.gauge(host, "clock_offset_s", look_s=ROOM_S),
    )


def observe_room(reader: Reader, window: Window, node: str, other_inlets: Sequence[float]) -> RoomEvidence:
    thermal, power = window.devices(node, "thermal"), window.devices(node, "power")
    inlet = reader.last(thermal[-1], "inlet_c", look_s=ROOM_S) if thermal else None
    psus = [reader.last(psu, "ok", psu.tags.get("psu", ""), ROOM_S) for psu in window.devices(node, "psu")]
    known = [seen.value for seen in psus if seen is not None]
    redundancy = reader.last(power[-1], "redundancy", look_s=ROOM_S) if power else None
    return RoomEvidence(
        inlet=inlet,
        peer_inlet=None
        if inlet is None or not other_inlets
        else Observation(inlet.value, inlet.lane, "", statistics.median(other_inlets)),
        fan=reader.last(thermal[-1], "fan_pct", look_s=ROOM_S) if thermal else None,
        node_power=reader.last(power[-1], "node_w", look_s=ROOM_S) if power else None,
        node_cap=reader.last(power[-1], "cap_w", look_s=ROOM_S) if power else None,
        headroom_redundant=reader.last(power[-1], "headroom_redundant_pct", look_s=ROOM_S) if power else None,
        redundancy=None if redundancy is None else int(redundancy.value),
        psu_failed=sum(1 for ok in known if not ok) if known else None,
        psu_count=len(known) if known else None,
    )


def observe(
    window: Window,
    pair: Pair,
    reader: Reader,
    output: OutputEvidence,
    peers: PeerEvidence,
    other_inlets: Sequence[float],
    neighbour_temps: Mapping[str, float],
) -> Evidence:
    """Everything that is known of the pair at the reader's moment."""
    hosts = window.devices(pair.node, "host")
    last = max(
        (
            device.last_ns
            for measurement in ("gpu", "engine", "host")
            for device in window.devices(pair.node, measurement)
            if device.last_ns <= reader.at_ns
        ),
        default=0,
    )
    return Evidence(
        node=pair.node,
        at_ns=reader.at_ns,
        gpus=observe_gpus(reader, pair.gpus, neighbour_temps),
        engine=observe_engine(reader, pair.engine) if pair.engine is not None else None,
        host=observe_host(reader, hosts[-1]) if hosts else None,
        room=observe_room(reader, window, pair.node, other_inlets),
        output=output,
        peers=peers,
        events=tuple(window.events_of(pair.node, reader.start(3600), reader.at_ns)),
        silent_s=(reader.at_ns - last) / SECOND if last else math.inf,
    )
