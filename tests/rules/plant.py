"""Hand-written scenes: samples of small fleets in which one thing goes wrong at a known second, or nothing does.

A scene is a list of nodes; each second of each node is a dict of readings that a fault may bend. Every reading differs from every
other, so that a swap shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from telemetry.catalogue import check
from telemetry.sample import Sample

T0 = 1_795_960_800_000_000_000
SECOND = 1_000_000_000


@dataclass
class Moment:
    """One second of one node, before it becomes samples. A fault changes it."""

    t: int
    running: float
    waiting: float = 0.0
    work: float = 1.0  # step time against healthy
    prompt_share: float = 3.0  # prompt tokens for each output token
    prompt_len: float = 610.0
    output_len: float = 203.0
    context: float = 711.0
    kv: float = -1.0  # percent; below zero: follows the batch
    preemptions: float = 0.0  # per second
    frozen: bool = False
    up: int = 1
    uptime: float = 90_000.0
    version: str = "0.31.0"
    temp: float = 66.0
    mem_temp: float = 78.0
    clock: float = 1755.0
    power: float = 604.0
    limit: float = 700.0
    mask: int = 0
    util: float = 97.0
    inlet: float = 24.0
    fan: float = 55.0
    cpu: float = 21.0
    psi_cpu: float = 0.6
    load1: float = 6.0
    pcie_gen: int = 5
    processes: int = 1
    gpu_state: int = 0
    silent: bool = False


Fault = Callable[[Moment], None]


@dataclass
class Node:
    name: str
    seed: int
    load: Callable[[int], float] = lambda t: 40.0
    fault: Fault | None = None
    at: int = 10**9  # the second in which the fault begins
    gpus: int = 2
    rack: str = "r1"
    cadence: int = 1
    cpu_only: bool = False
    engine: bool = True
    events: list[Sample] = field(default_factory=list)


def step_s(running: float, prompt_share: float, context: float) -> float:
    """Seconds a step takes in health: weights, batch, prefill that comes with each token, KV reads."""
    batch = max(running, 1.0)
    return 0.0085 + 0.00011 * batch + 0.000012 * batch * prompt_share + 3.0e-8 * batch * context


def scene(nodes: list[Node], seconds: int) -> list[Sample]:
    """Every sample of the nodes over the seconds, in order of time, each one checked against the catalogue."""
    samples = [sample for node in nodes for sample in node_samples(node, seconds)]
    return sorted(samples, key=lambda sample: sample.time_ns)


def node_samples(node: Node, seconds: int) -> Iterator[Sample]:
    rng = random.Random(node.seed)
    totals = {"generation": 5000.0, "prompt": 17000.0, "preempt": 3.0, "steps": 900.0}
    duty = {"sw_power": 0.0, "sw_thermal": 0.0, "hw_thermal": 0.0, "brake": 0.0}
    for event in node.events:
        yield check(event)
    for t in range(seconds):
        moment = Moment(t, node.load(t) * rng.gauss(1, 0.02))
        moment.prompt_share *= rng.lognormvariate(0, 0.15)
        if node.fault is not None and t >= node.at:
            node.fault(moment)
        rate = 0.0
        if moment.up and not moment.frozen and moment.running > 0:
            rate = moment.running / (step_s(moment.running, moment.prompt_share, moment.context) * moment.work)
            rate *= rng.gauss(1, 0.02)
        totals["generation"] += rate
        totals["prompt"] += rate * moment.prompt_share
        totals["preempt"] += moment.preemptions
        totals["steps"] += rate / max(moment.running, 1e-9) if rate else 0.0
        for name, bit in (("sw_power", 0x4), ("sw_thermal", 0x20), ("hw_thermal", 0x40), ("brake", 0x80)):
            duty[name] += 1.0 if moment.mask & bit else 0.0
        if t % node.cadence == 0 and not moment.silent:
            for sample in _samples(node, moment, rate, totals, duty, rng):
                yield check(sample)


def _samples(
    node: Node, m: Moment, rate: float, totals: dict[str, float], duty: dict[str, float], rng: random.Random
) -> Iterator[Sample]:
    at = T0 + m.t * SECOND
    tags = {"node": node.name, "rack": node.rack}
    host = {"cpu_pct": m.cpu + rng.uniform(-1, 1), "cpu_core_max_pct": 52.0, "load1": m.load1, "clock_offset_s": 0.002}
    host |= {"psi_cpu_pct": m.psi_cpu, "psi_io_pct": 0.4, "swap_in_bytes_s": 0.0, "swap_out_bytes_s": 0.0}
    yield Sample("host", tags, host, at)
    if node.engine:
        gpus = "" if node.cpu_only else "+".join(str(i) for i in range(node.gpus))
        engine = {"engine": "chat", "kind": "vllm", "model": "qwen2-7b", "gpus": gpus}
        fields: dict[str, float | int | str] = {"up": m.up}
        if m.up:
            kv = 12 + 0.9 * m.running if m.kv < 0 else m.kv
            fields |= {
                "generation_tokens_total": int(totals["generation"]),
                "prompt_tokens_total": int(totals["prompt"]),
                "preemptions_total": int(totals["preempt"]),
                "steps_total": int(totals["steps"]),
                "tokens_per_s": rate,
                "prompt_tokens_per_s": rate * m.prompt_share,
                "requests_running": float(round(m.running)) if m.running >= 3 else m.running,
                "requests_waiting": m.waiting,
                "kv_used_pct": min(kv, 100.0),
                "prompt_len_mean": m.prompt_len,
                "output_len_mean": m.output_len,
                "context_mean": m.context,
                "itl_mean_s": m.running / rate if rate else 0.5,
                "ttft_p95_s": 0.4 + 0.2 * m.waiting,
                "uptime_s": m.uptime,
                "version": m.version,
            }
        yield Sample("engine", {**tags, **engine}, fields, at)
    if node.cpu_only:
        return
    if m.t % 30 == 0:
        yield Sample("thermal", tags, {"inlet_c": m.inlet, "fan_pct": m.fan}, at)
    for index in range(node.gpus):
        yield Sample(
            "gpu",
            {**tags, "gpu": str(index), "uuid": f"GPU-{node.name}-{index}"},
            {
                "util_pct": min(m.util + rng.uniform(-1, 1), 100.0),
                "temp_c": m.temp + index,
                "mem_temp_c": m.mem_temp + index,
                "temp_limit_c": 87.0,
                "mem_temp_limit_c": 95.0,
                "power_w": m.power + rng.uniform(-6, 6),
                "power_limit_w": m.limit,
                "power_limit_default_w": 700.0,
                "sm_clock_mhz": m.clock + rng.choice((-15.0, 0.0, 15.0)),
                "sm_clock_max_mhz": 1980.0,
                "throttle_reasons": m.mask,
                "throttle_sw_power_s": duty["sw_power"],
                "throttle_sw_thermal_s": duty["sw_thermal"],
                "throttle_hw_thermal_s": duty["hw_thermal"],
                "throttle_hw_power_brake_s": duty["brake"],
                "pcie_gen": m.pcie_gen,
                "pcie_gen_max": 5,
                "pcie_width": 16,
                "pcie_width_max": 16,
                "pstate": 0,
                "processes": m.processes,
                "state": m.gpu_state,
                "xid_total": 0,
                "ecc_uncorrected_total": 0,
            },
            at,
        )


def event(node: str, kind: str, t: int, text: str, subject: str = "chat", code: int = 0) -> Sample:
    return Sample(
        "event", {"node": node, "kind": kind, "subject": subject}, {"text": text, "code": code}, T0 + t * SECOND
    )


def bend(**changes: float | int | bool | str) -> Fault:
    """A fault that sets these readings from its first second on."""

    def fault(moment: Moment) -> None:
        for name, to in changes.items():
            setattr(moment, name, type(getattr(moment, name))(to))

    return fault


def fleet(fault: Fault | None, at: int = 180, **options: object) -> list[Node]:
    """Three nodes of the same model; the fault, if any, is on n2."""
    nodes = [Node(f"n{i}", seed=11 * i + int(options.pop("seed", 0) if i == 1 else 0)) for i in (1, 2, 3)]
    for node in nodes:
        for name, to in options.items():
            setattr(node, name, to)
    nodes[1].fault, nodes[1].at = fault, at
    return nodes
