"""What was seen of one pair at one moment: typed observations, each beside what is usual for it, each with the field it came from.

Steps read nothing else. `rules.observation` builds it from samples; a file of keyed signals can build the same object, since every
observation stands by itself and an absent one is None: unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from rules.shape import Shape
from rules.window import Event


@dataclass(frozen=True, slots=True)
class Observation:
    """One number now (median of the judged window, unless the field's comment says otherwise) in the unit of its field.

    `usual` is the healthy median of the pair's own history, or of its peers (`usual_from`), None while neither is known.
    `lane` is `measurement.field`; `source` names the device when a pair has several (the GPU's index).
    `since_ns` is when it left the usual side of the midpoint between usual and now, None if it has not or is not known. It is looked
    for when a rule asks, in the window of that moment: most that is away from its usual is nobody's evidence.
    """

    value: float
    lane: str
    source: str = ""
    usual: float | None = None
    usual_low: float | None = None  # 10th and 90th percentile of the healthy history
    usual_high: float | None = None
    usual_from: str = ""
    began: Callable[[], int | None] | None = field(default=None, repr=False, compare=False)
    relative: bool = False  # the value is itself a ratio against usual, which is 1: the unit of the field is not known

    @property
    def since_ns(self) -> int | None:
        return self.began() if self.began is not None else None

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
    draw_to_limit: float | None = None  # where it is told without watts
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
    remap_failed: bool | None = None
    xids: Seen = None  # since the driver was loaded; that they are counted says that somebody listens for them
    util_swing: float | None = None  # points between the 10th and 90th percentile of util over a minute
    active: Seen = None  # share of the time in which some multiprocessor works: a second sensor beside util
    partitioned: bool = False  # cut into instances (MIG): GPU-Util is not defined
    temp_slope: Seen = None  # degrees a minute
    remapped_new: Seen = None  # rows that were remapped over the window's horizon
    contained_error: bool = False
    clock_ceiling: bool = False  # a lock or a ceiling on the clock is set
    since_boot: bool = False
    mem_used_bytes: Seen = None
    spilled_bytes: Seen = None  # of the engine's data in host memory
    link_bytes_s: Seen = None  # received over PCIe
    link_bandwidth: Seen = None
    left_behind: bool = False  # a process of an engine that ended still holds memory
    healthy: bool | None = None  # by its own word
    link_up: bool | None = None  # its network port

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
    kv_newest: Seen = None  # over the newest span, for what fills up
    kv_per_token: Seen = None  # percent of the pool for each token of the running sequences
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
    stalled_s: float | None = None  # it says for so long that requests run and nothing comes out
    stalled: bool = False  # so it says, for how long is not known
    moving: bool = False  # tokens come, at what rate is not known
    versioned: bool = False  # it tells a version or a configuration, so a change of it would show
    kv_used_kind: str = ""  # what `kv_used` counts: live, live_plus_cached, reserved
    undelivered: bool = False  # tokens are made and none is delivered
    connections: float | None = None
    client_tokens_per_s: Seen = None  # usual: the server's own figure for the same traffic
    client_extra_s: Seen = None  # the client's latency minus the server's
    delta_share: Seen = None  # stream deltas over tokens
    tokens_per_step: Seen = None
    itl_max: Seen = None
    thread_max: Seen = None  # CPU of the busiest thread of its processes, 100 = one core
    tokenize_s: Seen = None
    running_cv: float | None = None  # of the requests running over a minute
    chance_cv: float | None = None  # what it is where requests overlap by chance; not known of an incident that is told
    arrivals_cv: float | None = None
    acceptance: Seen = None  # of drafted tokens, 0..1
    prefix_lost: bool = False  # hits fell, by how much is not known
    prefill_heavy: bool = False  # prompt tokens/s are high, how high is not known
    structured: bool = False
    no_reuse: bool = False  # the time to first token does not improve on repeats
    flat: bool = False  # the output is the same whatever is asked
    model_size: float | None = None  # parameters, billions
    load: LoadEvidence | None = None

    @property
    def live_kv_pct(self) -> float | None:
        """KV use as pressure, 0..100; None where it counts what is only reserved or cached and can be had back."""
        if self.kv_used is None or self.kv_used_kind in ("reserved", "live_plus_cached"):
            return None
        return self.kv_used.value


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One process of an engine whose model is split. Seconds of a step, mean; the wait holds the transfer as well."""

    rank: str
    gpu: str = ""  # the index of its GPU; empty when it is not known
    compute: Seen = None
    wait: Seen = None


@dataclass(frozen=True, slots=True)
class LoadEvidence:
    """A start of the engine: how long it took, seconds, and what it waited for."""

    failed: bool = False
    load_s: float | None = None
    total_s: float | None = None
    weights_s: float | None = None
    read_bound: bool = False
    repeated: float = 0.0  # model loads, one after the other
    memory_sawtooth: bool = False


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
    disk_busy: Seen = None
    mem_used: Seen = None
    swap: Seen = None  # in plus out
    clock_offset: Seen = None
    throttling: bool = False  # the quota throttles, how much is not known
    cores: float | None = None  # that the engine may use
    cores_asked: float | None = None  # that were reserved for it
    threads: float | None = None  # that the engine runs
    core_waits: bool = False  # the busiest core only waits for the GPU
    vanished: bool = False  # the host went away and came back


@dataclass(frozen=True, slots=True)
class RoomEvidence:
    """Air and power around the node: BMC, PSU, PDU."""

    inlet: Seen = None
    peer_inlet: Seen = None  # value: this node's inlet; usual: median of the other nodes now
    fan: Seen = None
    node_power: Seen = None
    node_cap: Seen = None
    headroom_redundant: Seen = None
    circuit_load: Seen = None  # percent of what the circuit may carry for long
    redundancy: int | None = None  # telemetry.catalogue.REDUNDANCY_STATES
    psu_failed: int | None = None
    psu_count: int | None = None
    supply_w: float | None = None  # what the supplies can give
    limits_w: float | None = None  # what cards and host may draw at their limits


@dataclass(frozen=True, slots=True)
class OutputEvidence:
    """The output side against what is expected; ratios are now over expected, 1 = as expected.

    `output_ratio` holds the mix at its usual and the batch at what is asked for: what the user sees. `work_ratio` takes the load
    as it is: whether each unit of work takes longer. Their difference is the change of mix, or sequences that wait for room.
    """

    baseline: str  # history, peers, warming, told
    tokens_per_s: float | None = None
    expected_tokens_per_s: float | None = None
    spread: float | None = None  # relative standard error of the expected value
    output_ratio: float | None = None
    work_ratio: float | None = None
    slow_share: float = 0.0  # share of the window's spans whose output is below the line
    work_slow_share: float = 0.0
    since_ns: int | None = None  # when the output left its usual level
    useful_ratio: float | None = None  # net of padding
    ttft_ratio: float | None = None
    told_work_ratio: float | None = None  # the worst of what is told of a unit of work, whatever its load


@dataclass(frozen=True, slots=True)
class PeerEvidence:
    """The same model on other nodes, now."""

    pairs: int = 0
    waiting: float | None = None  # median
    running: float | None = None
    tokens_per_s: float | None = None
    usual_running: float | None = None  # median of what is usual for each


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """The GPUs or replicas that work together, one number each, in their order."""

    size: int | None = None  # tensor-parallel
    util: tuple[float, ...] = ()
    power: tuple[float, ...] = ()
    running: tuple[float, ...] = ()
    share: tuple[float, ...] = ()
    uneven: bool = False
    mixed: bool = False  # different models of GPU
    affected: str = ""  # how many of the peers show it: one, some, all


@dataclass(frozen=True, slots=True)
class FabricEvidence:
    """The links between the GPUs of a group and between nodes."""

    peer_to_peer: bool | None = None
    transport: str = ""
    errors_new: Seen = None


@dataclass(frozen=True, slots=True)
class TellEvidence:
    """Figures that somebody tells of a model, an allocator or a transfer, and the line that the server was started with."""

    shape: Shape | None = None
    context_tokens: float | None = None  # of one sequence
    moved_bytes: float | None = None
    moved_s: float | None = None
    link_gbit_s: float | None = None
    peak_bytes: float | None = None  # at most, weights aside
    kv_bytes: float | None = None  # of one sequence
    kv_to_weights: float | None = None  # bytes read in a decode step
    flop_per_byte: float | None = None  # of a decode step
    mlp_bytes: float | None = None  # of one layer
    scores_flop: float | None = None  # of one layer and step
    out_of_memory: bool = False
    largest_free_bytes: float | None = None  # the largest free block
    unused_bytes: float | None = None  # reserved by the allocator and not allocated
    launch: str = ""


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
    group: GroupEvidence = GroupEvidence()
    ranks: tuple[RankEvidence, ...] = ()
    fabric: FabricEvidence = FabricEvidence()
    tells: TellEvidence | None = None
    persistence: bool | None = None
    impossible: tuple[str, ...] = ()  # readings that can't be true
    events: tuple[Event, ...] = ()  # of this node, oldest first, within the last hour
    silent_s: float = 0.0  # since the newest sample of the node
    clock_off_s: float | None = None  # its samples are stamped so far ahead of everybody's, below zero behind

    @property
    def told(self) -> bool:
        """Told by somebody as one incident, without times and without what is usual."""
        return self.output.baseline == "told"

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
        parts: list[GpuEvidence | RankEvidence | EngineEvidence | HostEvidence | RoomEvidence | None] = [
            *self.gpus,
            *self.ranks,
            self.engine,
            self.host,
            self.room,
        ]
        for part in parts:
            if part is None:
                continue
            for name in _OBSERVED[type(part)]:
                seen = getattr(part, name)
                if isinstance(seen, Observation):
                    yield seen
            if isinstance(part, GpuEvidence):
                yield from part.duty.values()


_OBSERVED = {
    part: tuple(entry.name for entry in fields(part) if entry.type == "Seen" and not entry.name.startswith("peer_"))
    for part in (GpuEvidence, RankEvidence, EngineEvidence, HostEvidence, RoomEvidence)
}
"""The fields of each part that hold an observation of its own."""
