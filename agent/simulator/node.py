"""One simulated node: its boards, engines, air, supplies and host, and the samples an agent on it would write."""

from __future__ import annotations

from random import Random

from agent.simulator import supply
from agent.simulator.conditions import Conditions, healthy
from agent.simulator.cooling import Cooling
from agent.simulator.engine import Engine
from agent.simulator.gpu import Gpu
from agent.simulator.roofline import Served
from agent.simulator.sku import Sku
from agent.simulator.supply import Supply
from agent.simulator.trace import Trace
from telemetry.catalogue import SIMULATED
from telemetry.sample import Sample, Value

SLICE_S = 0.2
HOST_W = 1_500.0  # processors, memory, network cards, drives
REAR_RISE_C = 4.0  # the second row breathes air that the first has warmed


class Node:
    def __init__(
        self,
        name: str,
        rack: str,
        circuit: str,
        gpus: int,
        group: int,
        sku: Sku,
        served: Served,
        load: float,
        seed: str,
        trace: Trace | None = None,
        slice_s: float = SLICE_S,
    ) -> None:
        self.slice_s = slice_s
        self.name = name
        self.rack = rack
        self.circuit = circuit
        self.sku = sku
        self.tags = {"node": name, "rack": rack, "circuit": circuit, "cluster": SIMULATED, "origin": SIMULATED}
        self.random = Random(f"{seed}/{name}")
        front = max(1, (gpus + 1) // 2)
        self.gpus = [
            Gpu(i, f"GPU-{name}-{i}", sku, 0.0 if i < front else REAR_RISE_C, Random(f"{seed}/{name}/gpu{i}"))
            for i in range(gpus)
        ]
        start_s = 0.0 if trace is None else Random(f"{seed}/trace").random() * trace.span_s
        self.engines = [
            Engine(
                f"{name}-e{i}",
                self.gpus[first : first + group],
                served,
                load,
                Random(f"{seed}/{name}/engine{i}"),
                trace,
                start_s,
            )
            for i, first in enumerate(range(0, gpus, group))
        ]
        self.group = group
        self.cooling = Cooling()
        self.supply = Supply(gpus * sku.power_limit_w + HOST_W + 800, Random(f"{seed}/{name}/supply"))
        self.healthy = healthy(gpus, len(self.engines))
        self.wrong: Conditions = self.healthy
        self.load1 = 6.0
        self.agent_cpu_s = 0.0
        self._gpu_tags = [{**self.tags, "gpu": str(g.index), "uuid": g.uuid} for g in self.gpus]
        self._engine_tags = [
            {
                **self.tags,
                "engine": engine.name,
                "kind": SIMULATED,
                "model": served.name,
                "gpus": "+".join(str(g.index) for g in engine.gpus),
            }
            for engine in self.engines
        ]
        self._rank_tags = [
            [{**tags, "rank": str(i)} for i in range(len(engine.gpus))]
            for engine, tags in zip(self.engines, self._engine_tags, strict=True)
        ]
        self._psu_tags = [{**self.tags, "psu": str(i)} for i in range(supply.COUNT)]

    def advance(self, elapsed_s: float, seconds: float, intake_c: float) -> None:
        """Move on by `seconds`, breathing air of `intake_c`."""
        wrong, cooling = self.wrong, self.cooling
        share = 1.0 if wrong.power_limit_share is None else wrong.power_limit_share
        for gpu, board in zip(self.gpus, wrong.gpus, strict=True):
            gpu.limit_w = float(round(self.sku.power_limit_w * share * board.limit_share))
        slices = max(1, round(seconds / self.slice_s))
        step = seconds / slices
        for i in range(slices):
            now = elapsed_s + i * step
            hottest = max(gpu.die_c for gpu in self.gpus)
            node_w = self.supply.load_w or HOST_W
            cooling.advance(step, intake_c + wrong.inlet_rise_c, hottest, node_w, wrong.airflow, wrong.fans_lost)
            resistance = cooling.resistance(self.sku.sink_to_air_k_w)
            for e, engine in enumerate(self.engines):
                first = e * self.group
                engine.advance(now, step, wrong.engines[e], wrong.gpus[first : first + self.group])
            brake = self.supply.braking
            watts = 0.0
            for gpu, board in zip(self.gpus, wrong.gpus, strict=True):
                gpu.advance(step, cooling.inlet_c, resistance * board.airflow, brake, board)
                watts += gpu.power_w
            self.supply.carry(watts + HOST_W + cooling.fan_w, wrong.psus_lost)
        self.load1 += (4.0 + 0.45 * wrong.cpu_pct + 1.5 * len(self.engines) - self.load1) * min(1.0, seconds / 60)
        self.agent_cpu_s += 0.011 * seconds

    # --- samples ---------------------------------------------------------------------------------------------------------

    def fast(self, now_s: float, time_ns: int) -> list[Sample]:
        """What is read every second, in one tick: the boards, the engines, the host."""
        wrong = self.wrong
        found: list[Sample] = []
        for gpu, tags, board in zip(self.gpus, self._gpu_tags, wrong.gpus, strict=True):
            engine = self.engines[gpu.index // self.group]
            processes = int(engine.up or engine.starting) + wrong.foreign_processes
            requested_w = round(self.sku.power_limit_w * board.limit_share)
            found.append(Sample("gpu", tags, gpu.fields(requested_w, processes, board), time_ns))
        for engine, tags, state in zip(self.engines, self._engine_tags, wrong.engines, strict=True):
            found.append(Sample("engine", tags, engine.fields(now_s, state), time_ns))
        for engine, ranks, state in zip(self.engines, self._rank_tags, wrong.engines, strict=True):
            if len(ranks) > 1 and engine.up and not state.silent:  # of a whole model nobody tells of ranks
                told = zip(engine.ranks, ranks, strict=True)
                found += [Sample("rank", tags, rank.fields(), time_ns) for rank, tags in told]
        found.append(Sample("host", self.tags, self._host(), time_ns))
        return found

    def slow(self, time_ns: int) -> list[Sample]:
        """What the management controller says, every few seconds: supplies, air; and the agent on itself."""
        found = [Sample("psu", tags, self.supply.psu_fields(i), time_ns) for i, tags in enumerate(self._psu_tags)]
        capped = self.wrong.power_limit_share is not None
        cap = sum(gpu.limit_w for gpu in self.gpus) + HOST_W if capped else None
        found.append(Sample("power", self.tags, self.supply.power_fields(cap), time_ns))
        found.append(Sample("thermal", self.tags, self.cooling.fields(), time_ns))
        jitter = self.random.random
        found.append(
            Sample(
                "agent",
                self.tags,
                {
                    "tick_ms": round(4 + 3 * jitter(), 2),
                    "lag_s": round(0.2 + 0.3 * jitter(), 2),
                    "spool_bytes": float(round(40_000 + 20_000 * jitter())),
                    "rss_bytes": float(round(68e6 + 1e6 * jitter())),
                    "cpu_s": round(self.agent_cpu_s, 2),
                    "dropped_total": 0,
                    "errors_gpu_total": 0,
                    "errors_engine_total": 0,
                    "errors_host_total": 0,
                    "errors_delivery_total": 0,
                },
                time_ns,
            )
        )
        return found

    def event(self, kind: str, subject: str, text: str, detail: str, code: int, time_ns: int) -> Sample:
        fields: dict[str, Value] = {"text": text, "detail": detail, "code": code}
        return Sample("event", {**self.tags, "kind": kind, "subject": subject}, fields, time_ns)

    def _host(self) -> dict[str, Value]:
        wrong = self.wrong
        jitter = self.random.random
        up = sum(engine.up for engine in self.engines)
        cpu = min(100.0, 3 + 2.2 * up + wrong.cpu_pct + 1.5 * jitter())
        return {
            "cpu_pct": round(cpu, 1),
            "cpu_core_max_pct": 100.0 if wrong.core_busy else round(min(100.0, 52 + wrong.cpu_pct + 14 * jitter()), 1),
            "load1": round(self.load1, 2),
            "mem_used_pct": round(min(100.0, 31 + wrong.mem_pct + jitter()), 1),
            "swap_in_bytes_s": float(wrong.swap_bytes_s),
            "swap_out_bytes_s": float(wrong.swap_bytes_s),
            "iowait_pct": round(0.2 * jitter() + 0.4 * wrong.io_pct, 2),
            "psi_cpu_pct": round(0.4 * jitter() + max(0.0, wrong.cpu_pct - 30) * 0.6, 2),
            "psi_io_pct": round(0.2 * jitter() + 0.6 * wrong.io_pct, 2),
            "psi_memory_pct": round(0.1 * jitter() + min(40.0, wrong.swap_bytes_s / 2e6), 2),
            "cgroup_throttled_pct": float(wrong.cgroup_throttled_pct),
            "disk_busy_pct": round(min(100.0, 1 + 2 * jitter() + wrong.io_pct), 1),
            "net_rx_bytes_s": float(round(up * 260e3 * (0.9 + 0.2 * jitter()))),
            "net_tx_bytes_s": float(round(up * 420e3 * (0.9 + 0.2 * jitter()))),
            "clock_offset_s": round(wrong.clock_offset_s + 0.0004 * (jitter() - 0.5), 6),
            "cpu_power_w": round(240 + 4 * cpu + 10 * jitter(), 1),
        }
