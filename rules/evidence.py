"""What was seen of one pair at one moment: typed observations, each beside what is usual for it, each with the field it came from.

Steps read nothing else. `rules.observation` builds it from samples; a file of keyed signals can build the same object, since every
observation stands by itself and an absent one is None: unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from rules.window import Event


@dataclass(frozen=True, slots=True)
class Observation:
    """One number now (median of the judged window, unless the field's comment says otherwise) in the unit of its field.

    `usual` is the healthy median of the pair's own history, or of its peers (`usual_from`), None while neither is known.
    `lane` is `measurement.field`; `source` names the device when a pair has several (the GPU's index).
    `since_ns` is when it left the usual side of the midpoint between usual and now, None if it has not or is not known.
    """

    value: float
    lane: str
    source: str = ""
    usual: float | None = None
    usual_low: float | None = None  # 10th and 90th percentile of the healthy history
    usual_high: float | None = None
    usual_from: str = ""
    since_ns: int | None = None
    samples: int = 1

    @property
    def ratio(self) -> float | None:
        """Now over usual; None when usual is unknown or zero."""
        return self.value / self.usual if self.usual else None

    @property
    def rise(self) -> float | None:
        """Now minus usual."""
        return None if self.usual is None else self.value - self.usual


Seen = Observation | None


def ratio(seen: Seen) -> float | None:
    return None if seen is None else seen.ratio


def rise(seen: Seen) -> float | None:
    return None if seen is None else seen.rise


def value(seen: Seen) -> float | None:
    return None if seen is None else seen.value


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    index: str
    age_s: float  # of the newest sample; infinite when never heard
    state: int | None = None  # telemetry.catalogue.GPU_STATES
    util: Seen = None
    temp: Seen = None
    temp_limit: float | None = None
    temp_margin: Seen = None  # degrees to the limit, of core or memory, whichever is nearer
    mem_temp: Seen = None
    mem_temp_limit: float | None = None
    peer_temp: Seen = None  # value: this GPU's temperature; usual: median of its neighbours now
    power: Seen = None
    power_limit: Seen = None
    power_limit_default: float | None = None
    power_limit_requested: float | None = None
    sm_clock: Seen = None
    sm_clock_max: float | None = None
    mem_clock: Seen = None
    fan: Seen = None
    pstate: int | None = None
    duty: Mapping[str, Observation] = field(default_factory=dict)  # reason -> share of the window, 0..1
    pcie_gen: Seen = None
    pcie_gen_max: float | None = None
    pcie_width: Seen = None
    pcie_width_max: float | None = None
    replays_per_min: Seen = None
    mem_free_bytes: Seen = None
    mem_util: Seen = None
    processes: Seen = None
    ecc_uncorrected_new: Seen = None  # growth over the window's horizon
    remap_pending: bool = False
    remap_failed: bool = False

    @property
    def loaded(self) -> bool:
        return self.util is not None and self.util.value >= 50


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    name: str
    age_s: float
    up: Seen = None  # share of the window in which it answered
    down_s: float = 0.0  # how long it has not answered, counted to the newest sample
    away: bool = False  # its newest sample says that it does not answer
    starting: bool = False  # it does not answer because it loads, as its newest sample says
    blind: bool = False  # it answers, and none of its metrics were seen in the window
    tokens_per_s: Seen = None
    prompt_tokens_per_s: Seen = None
    running: Seen = None
    waiting: Seen = None
    kv_used: Seen = None
    kv_fragmentation: Seen = None
    kv_blocks: Seen = None
    preemptions_per_s: Seen = None
    oom_new: Seen = None
    ttft: Seen = None  # p95, or p50 where there is no other
    itl: Seen = None
    prompt_len: Seen = None
    output_len: Seen = None
    context: Seen = None
    prompt_share: Seen = None  # computed prompt tokens for each output token
    prefix_hit: Seen = None  # share of queried tokens, 0..1
    stats_age: Seen = None
    uptime_s: float | None = None
    frozen_s: float | None = None  # no token and no step for so long while requests ran; None: not known
    probe_ok: bool | None = None


@dataclass(frozen=True, slots=True)
class HostEvidence:
    age_s: float
    cpu: Seen = None
    core_max: Seen = None
    load: Seen = None
    psi_cpu: Seen = None
    psi_io: Seen = None
    psi_memory: Seen = None
    throttled: Seen = None
    iowait: Seen = None
    mem_used: Seen = None
    swap: Seen = None  # in plus out
    clock_offset: Seen = None


@dataclass(frozen=True, slots=True)
class RoomEvidence:
    """Air and power around the node: BMC, PSU, PDU."""

    inlet: Seen = None
    peer_inlet: Seen = None  # value: this node's inlet; usual: median of the other nodes now
    fan: Seen = None
    node_power: Seen = None
    node_cap: Seen = None
    headroom_redundant: Seen = None
    redundancy: int | None = None  # telemetry.catalogue.REDUNDANCY_STATES
    psu_failed: int | None = None
    psu_count: int | None = None


@dataclass(frozen=True, slots=True)
class OutputEvidence:
    """The output side against what is expected; ratios are now over expected, 1 = as expected.

    `output_ratio` holds the mix at its usual and the batch at what is asked for: what the user sees. `work_ratio` takes the load
    as it is: whether each unit of work takes longer. Their difference is the change of mix, or sequences that wait for room.
    """

    baseline: str  # history, peers, warming
    tokens_per_s: float | None = None
    expected_tokens_per_s: float | None = None
    spread: float | None = None  # relative standard error of the expected value
    output_ratio: float | None = None
    work_ratio: float | None = None
    slow_share: float = 0.0  # share of the window's spans whose output is below the line
    work_slow_share: float = 0.0
    since_ns: int | None = None  # when the output left its usual level


@dataclass(frozen=True, slots=True)
class PeerEvidence:
    """The same model on other nodes, now."""

    pairs: int = 0
    waiting: float | None = None  # median
    running: float | None = None
    tokens_per_s: float | None = None
    usual_running: float | None = None  # median of what is usual for each


@dataclass(frozen=True, slots=True)
class Evidence:
    node: str
    at_ns: int
    gpus: tuple[GpuEvidence, ...] = ()
    engine: EngineEvidence | None = None
    host: HostEvidence | None = None
    room: RoomEvidence = RoomEvidence()
    output: OutputEvidence = OutputEvidence("warming")
    peers: PeerEvidence = PeerEvidence()
    events: tuple[Event, ...] = ()  # of this node, oldest first, within the last hour
    silent_s: float = 0.0  # since the newest sample of the node

    @property
    def effort(self) -> str:
        """What utilisation is measured on: gpu, or cpu on a host without one."""
        return "gpu" if any(gpu.util is not None for gpu in self.gpus) else "cpu"

    @property
    def util_pct(self) -> float | None:
        """The effort side of the pair: mean GPU-Util of the pair's GPUs, or the host's CPU use."""
        utils = [gpu.util.value for gpu in self.gpus if gpu.util is not None]
        if utils:
            return sum(utils) / len(utils)
        return value(self.host.cpu) if self.host else None

    def observations(self) -> Iterator[Observation]:
        """Every observation that has a usual value to learn."""
        parts: list[object] = [*self.gpus, self.engine, self.host, self.room]
        for part in parts:
            if part is None:
                continue
            for entry in fields(part):  # type: ignore[arg-type]
                seen = getattr(part, entry.name)
                if isinstance(seen, Observation) and not entry.name.startswith("peer_"):
                    yield seen
            if isinstance(part, GpuEvidence):
                yield from part.duty.values()
