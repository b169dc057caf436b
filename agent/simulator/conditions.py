"""What is wrong with a node at one moment: everything a fault may change. A healthy node has the defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GpuConditions:
    lost: bool = False  # fell off the bus
    hung: bool = False  # the driver doesn't come back with an answer about it
    limit_share: float = 1.0  # of its own power limit, set on the host
    contact: float = 1.0  # thermal resistance die to sink, times the normal
    airflow: float = 1.0  # resistance sink to air of this board alone, times the node's
    memory_rise_c: float = 0.0  # memory runs this much hotter: pads, local airflow
    clock_limit_mhz: float | None = None  # held by something that sets no throttle bit
    pcie_width: int | None = None
    pcie_gen: int | None = None
    replays_s: float = 0.0  # packets sent again on its link, per second
    rank_slow: float = (
        1.0  # its rank takes this many times as long over its own work, and no reading of the card says why
    )
    memory_slow: float = 1.0  # the memory's clock is lower, and its traffic takes this many times as long
    uncorrected: int = 0  # memory errors that were not corrected, so far
    corrected_s: float = 0.0  # memory errors that are corrected, per second
    remap_pending: bool = False


@dataclass(slots=True)
class EngineConditions:
    hung: bool = False  # the scheduler makes no step; the endpoint still answers
    down: bool = False  # the process is not there
    joining: bool = False  # it starts, and its ranks spin in their first collective before any weight is read
    step_scale: float = 1.0  # kernels take this many times as long, with the same arithmetic in them
    host_s: float = 0.0  # more time between the kernels of a step
    arrivals: float = 1.0
    prompt: float = 1.0  # prompt length, times the normal
    output: float = 1.0
    prefix_hit: float = 1.0  # times the normal hit share
    leaked_share: float = 0.0  # of the KV pool, held by nobody's requests
    waste_tokens: float | None = None  # lost in a sequence's last block; None: half a block
    stolen: float = 0.0  # share of the GPUs' time that another process takes
    max_running: int | None = None  # configured lower than it was
    silent: bool = False  # the endpoint answers, but gives no statistics
    version: str | None = None
    config: str | None = None


@dataclass(slots=True)
class Conditions:
    """One node. `gpus` and `engines` have one entry for each of the node's."""

    gpus: list[GpuConditions]
    engines: list[EngineConditions]
    inlet_rise_c: float = 0.0
    airflow: float = 1.0  # resistance sink to air, times the normal (blocked inlet, dust)
    fans_lost: float = 0.0  # share of the fans that stand still
    psus_lost: int = 0
    power_limit_share: float | None = None  # a cap set from outside (BMC), as a share of the boards' own limit
    cpu_pct: float = 0.0  # added host load
    core_busy: bool = False  # one core at 100 %
    cgroup_throttled_pct: float = 0.0
    swap_bytes_s: float = 0.0
    mem_pct: float = 0.0  # added host memory in use
    io_pct: float = 0.0
    foreign_processes: int = 0
    silent: bool = False  # its agent sends nothing
    clock_offset_s: float = 0.0


def healthy(gpus: int, engines: int) -> Conditions:
    return Conditions([GpuConditions() for _ in range(gpus)], [EngineConditions() for _ in range(engines)])
