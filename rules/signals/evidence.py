"""From keyed signals to the evidence that samples make: each signal becomes the observation that a rule would have read."""

from __future__ import annotations

from collections.abc import Mapping

from rules.evidence import (
    EngineEvidence,
    Evidence,
    FabricEvidence,
    GpuEvidence,
    GroupEvidence,
    HostEvidence,
    LoadEvidence,
    Observation,
    OutputEvidence,
    RoomEvidence,
    Seen,
    TellEvidence,
)
from rules.observation.gpus import JUDGED_BITS
from rules.shape import SHAPES
from rules.signals.reading import Signals
from rules.thresholds import Bar
from rules.verdict import UNNAMED
from rules.window import Event
from telemetry.catalogue import GPU_STATES

MIB, GB = 2**20, 1e9
SOMEWHERE = UNNAMED
"""Stands where samples would name the GPU or the engine."""

MINUTE_S = 60.0
"""Thermal-violation time is told without its span; a minute of it counts as all the time."""


def evidence_of(told: Signals) -> Evidence:
    """What is known of the incident; `Evidence.told` is true and no observation has a time."""
    engine = _engine(told)
    return Evidence(
        node=told.name,
        at_ns=0,
        gpus=(_gpu(told),) if _speaks_of_gpu(told) else (),
        engine=engine,
        host=_host(told),
        room=RoomEvidence(supply_w=told.numbers.get("psu_w"), limits_w=told.numbers.get("sum_limits_w")),
        output=_output(told),
        group=_group(told),
        fabric=FabricEvidence(
            peer_to_peer=told.flags.get("p2p"),
            transport=told.texts.get("nccl_transport", ""),
            errors_new=_seen(told, "nvlink_errors_delta", "gpu.nvlink_rx_bytes_s"),
        ),
        tells=_tells(told),
        persistence=told.flags.get("persistence"),
        impossible=told.impossible,
        events=_events(told),
    )


def _seen(told: Signals, key: str, lane: str, *, scale: float = 1.0, usual: float | None = None) -> Seen:
    number = told.numbers.get(key)
    return None if number is None else Observation(number * scale, lane, usual=usual, usual_from="told")


def _ratio(told: Signals, key: str, lane: str) -> Seen:
    number = told.numbers.get(key)
    return None if number is None else Observation(number, lane, usual=1.0, usual_from="told", relative=True)


GPU_KEYS = frozenset(
    (
        *[
            "util_pct",
            "util_swing_pct",
            "mem_util_pct",
            "gr_active",
            "mig",
            "temp_c",
            "mem_temp_c",
            "temp_slope_c_per_min",
            "peer_temp_delta_c",
            "fan_pct",
        ],
        *[
            "thermal_violation_s",
            "sm_ratio",
            "mem_clock_ratio",
            "power_ratio",
            "pstate",
            "clock_locked",
            "since_boot",
            "power_w",
        ],
        *[
            "power_to_limit",
            "limit_to_default",
            "power_limit_w",
            "ecc_uncorrectable",
            "remap_pending",
            "row_remap_failure",
        ],
        *[
            "gpu_lost",
            "remapped_rows_delta",
            "kernel_contained_error",
            "vram_free_mib",
            "gtt_gb",
            "mem_used_mib",
            "orphan_gpu_pid",
        ],
        *["gpu_pids", "pcie_gen_load", "pcie_width", "pcie_mbs", "bandwidth_ratio"],
    )
)


def _speaks_of_gpu(told: Signals) -> bool:
    keys = (*told.numbers, *told.flags, *told.texts)
    return told.reasons is not None or any(key in GPU_KEYS for key in keys)


def _gpu(told: Signals) -> GpuEvidence:
    number, flag = told.numbers.get, told.flags.get
    power, limit, default = _power(told)
    temp = _seen(told, "temp_c", "gpu.temp_c")
    warmer = number("peer_temp_delta_c")
    hot = temp.value if temp is not None else warmer
    gen, idle_gen = number("pcie_gen_load"), number("pcie_gen_idle")
    pstate = told.texts.get("pstate", "").upper().lstrip("P")
    at_limit = told.reasons is not None and "temp_at_limit" in told.reasons
    return GpuEvidence(
        index=SOMEWHERE,
        age_s=0.0,
        state=GPU_STATES.index("lost") if flag("gpu_lost") else None,
        util=_seen(told, "util_pct", "gpu.util_pct"),
        temp=temp,
        temp_margin=Observation(0.0, "gpu.temp_margin_c") if at_limit else None,
        mem_temp=_seen(told, "mem_temp_c", "gpu.mem_temp_c"),
        peer_temp=None if warmer is None or hot is None else Observation(hot, "gpu.temp_c", usual=hot - warmer),
        temp_slope=_seen(told, "temp_slope_c_per_min", "gpu.temp_c"),
        power=power,
        power_limit=limit,
        power_limit_default=default,
        draw_to_limit=number("power_to_limit"),
        sm_clock=_ratio(told, "sm_ratio", "gpu.sm_clock_mhz"),
        mem_clock=_ratio(told, "mem_clock_ratio", "gpu.mem_clock_mhz"),
        fan=_seen(told, "fan_pct", "gpu.fan_pct"),
        pstate=int(pstate) if pstate.isdigit() and len(pstate) < 3 else None,
        duty=_duty(told),
        pcie_gen=_seen(told, "pcie_gen_load", "gpu.pcie_gen"),
        pcie_gen_max=idle_gen if idle_gen is not None and gen is not None and idle_gen > gen else None,
        pcie_width=_seen(told, "pcie_width", "gpu.pcie_width"),
        mem_free_bytes=_seen(told, "vram_free_mib", "gpu.mem_used_bytes", scale=MIB),
        mem_util=_seen(told, "mem_util_pct", "gpu.mem_util_pct"),
        processes=_seen(told, "gpu_pids", "gpu.processes", usual=1.0),
        ecc_uncorrected_new=_seen(told, "ecc_uncorrectable", "gpu.ecc_uncorrected_total", usual=0.0),
        remap_pending=bool(flag("remap_pending")),
        remap_failed=bool(number("row_remap_failure")),
        util_swing=number("util_swing_pct"),
        active=_seen(told, "gr_active", "gpu.sm_active_pct"),
        partitioned=bool(flag("mig")),
        remapped_new=_seen(told, "remapped_rows_delta", "gpu.remapped_rows_total", usual=0.0),
        contained_error=bool(flag("kernel_contained_error")),
        clock_ceiling=bool(flag("clock_locked")),
        since_boot=bool(flag("since_boot")),
        mem_used_bytes=_seen(told, "mem_used_mib", "gpu.mem_used_bytes", scale=MIB),
        spilled_bytes=_seen(told, "gtt_gb", "host.mem_used_pct", scale=GB),
        link_bytes_s=_seen(told, "pcie_mbs", "gpu.pcie_rx_bytes_s", scale=1e6),
        link_bandwidth=_ratio(told, "bandwidth_ratio", "gpu.pcie_rx_bytes_s"),
        left_behind=bool(flag("orphan_gpu_pid")),
    )


def _power(told: Signals) -> tuple[Seen, Seen, float | None]:
    """(draw, enforced limit, default limit), in watts where they are told, else each as a share: of usual, and of the default."""
    number = told.numbers.get
    lowered, limit_w, watts, share = (
        number("limit_to_default"),
        number("power_limit_w"),
        number("power_w"),
        number("power_ratio"),
    )
    power = _ratio(told, "power_ratio", "gpu.power_w")
    if watts is not None:
        power = Observation(watts, "gpu.power_w", usual=watts / share if share else None)
    if limit_w is not None:
        return power, Observation(limit_w, "gpu.power_limit_w"), limit_w / lowered if lowered else None
    limit: Seen = None
    if lowered is not None:
        limit = Observation(lowered, "gpu.power_limit_w", usual=1.0, usual_from="told", relative=True)
    return power, limit, 1.0 if lowered is not None else None


def _duty(told: Signals) -> Mapping[str, Observation]:
    """Active or not is all that is told of a reason; the time under thermal violation counts up to a minute."""
    duty: dict[str, Observation] = {}
    if told.reasons is not None:
        duty = {
            name: Observation(float(name in told.reasons), "gpu.throttle_reasons", f"{SOMEWHERE}.{name}")
            for name in JUDGED_BITS
            if name != "sync_boost"
        }
    violated = told.numbers.get("thermal_violation_s")
    if violated is not None and not (duty and duty["sw_thermal"].value):
        share = min(violated / MINUTE_S, 1.0)
        duty["sw_thermal"] = Observation(share, "gpu.throttle_sw_thermal_s", f"{SOMEWHERE}.sw_thermal")
    return duty


def _engine(told: Signals) -> EngineEvidence:
    number, flag = told.numbers.get, told.flags.get
    hit = number("prefix_hit_pct")
    server = number("server_tps")
    health = flag("health_ok")
    preempt = flag("preempt")
    running = _seen(told, "running", "engine.requests_running")
    asked = (running is None or running.value > 0) and not flag("startup")  # a start makes no tokens by nature
    somebody = (number("running") or 0) + (number("waiting") or 0) >= 1
    still = asked and bool(flag("tokens_zero") or flag("stalled") or (number("tps") == 0 and somebody))
    return EngineEvidence(
        name=SOMEWHERE,
        age_s=0.0,
        up=None if health is None else Observation(float(health), "engine.up"),
        tokens_per_s=_seen(told, "tps", "engine.tokens_per_s") or _seen(told, "server_tps", "engine.tokens_per_s"),
        running=running,
        waiting=_seen(told, "waiting", "engine.requests_waiting"),
        kv_used=_seen(told, "kv_pct", "engine.kv_used_pct"),
        kv_used_kind=told.texts.get("kv_used_kind", ""),
        kv_blocks=_ratio(told, "kv_blocks_ratio", "engine.kv_blocks_count"),
        preemptions_per_s=None if preempt is None else Observation(float(preempt), "engine.preemptions_total"),
        ttft=_ratio(told, "ttft_ratio", "engine.ttft_p95_s") or _seen(told, "ttft_s", "engine.ttft_p95_s"),
        itl=_ratio(told, "itl_ratio", "engine.itl_mean_s"),
        prompt_len=_ratio(told, "prompt_len_ratio", "engine.prompt_len_mean"),
        output_len=_ratio(told, "output_len_ratio", "engine.output_len_mean"),
        context=_ratio(told, "context_ratio", "engine.context_mean"),
        prefix_hit=None if hit is None else Observation(hit / 100, "engine.prefix_hits_total"),
        stats_age=_seen(told, "stats_stale_s", "engine.stats_age_s"),
        uptime_s=number("uptime_s"),
        probe_ok=flag("canary_ok"),
        stalled=still,
        moving=flag("tokens_zero") is False or flag("stalled") is False,
        undelivered=bool(flag("delivered_tokens_zero")) and not still,
        connections=number("open_connections"),
        client_tokens_per_s=_seen(told, "client_tps", "engine.delivered_tokens_total", usual=server),
        client_extra_s=_seen(told, "client_minus_server_s", "engine.probe_s"),
        delta_share=_seen(told, "delta_fraction", "engine.delivered_tokens_total"),
        tokens_per_step=_seen(told, "iteration_tokens", "engine.tokens_per_step"),
        itl_max=_seen(told, "itl_max_s", "engine.itl_p99_s"),
        thread_max=_seen(told, "thread_max_pct", "engine.proc_cpu_max_pct"),
        tokenize_s=_seen(told, "tokenize_s", "engine.ttft_p95_s"),
        running_cv=number("running_cv"),
        arrivals_cv=number("arrivals_cv"),
        acceptance=_seen(told, "accept_ratio", "engine.spec_accepted_total"),
        prefix_lost=bool(flag("prefix_hit_drop")),
        prefill_heavy=bool(flag("prompt_tps_high")),
        structured=bool(flag("structured")),
        no_reuse=bool(flag("ttft_flat")),
        flat=bool(flag("plateau")),
        model_size=number("model_b"),
        load=_load(told),
    )


def _load(told: Signals) -> LoadEvidence | None:
    number, flag = told.numbers.get, told.flags.get
    of_start = ("load_s", "total_s", "weights_s", "load_events")
    flags = ("startup", "start_failed", "read_bound", "vram_sawtooth")
    if not any(key in told.numbers for key in of_start) and not any(flag(key) for key in flags):
        return None
    return LoadEvidence(
        failed=bool(flag("start_failed")),
        load_s=number("load_s"),
        total_s=number("total_s"),
        weights_s=number("weights_s"),
        read_bound=bool(flag("read_bound")),
        repeated=number("load_events") or 0.0,
        memory_sawtooth=bool(flag("vram_sawtooth")),
    )


def _host(told: Signals) -> HostEvidence | None:
    number, flag = told.numbers.get, told.flags.get
    numbers = ("psi_io_pct", "disk_busy_pct", "cpu_core_max_pct", "cpu_quota", "cpu_request", "threads", "swap_mbs")
    flags = ("cgroup_throttled", "sync_wait", "host_gap")
    if not any(key in told.numbers for key in numbers) and not any(key in told.flags for key in flags):
        return None
    return HostEvidence(
        age_s=0.0,
        core_max=_seen(told, "cpu_core_max_pct", "host.cpu_core_max_pct"),
        psi_io=_seen(told, "psi_io_pct", "host.psi_io_pct"),
        disk_busy=_seen(told, "disk_busy_pct", "host.disk_busy_pct"),
        swap=_seen(told, "swap_mbs", "host.swap_in_bytes_s", scale=1e6),
        throttling=bool(flag("cgroup_throttled")),
        cores=number("cpu_quota"),
        cores_asked=number("cpu_request"),
        threads=number("threads"),
        core_waits=bool(flag("sync_wait")),
        vanished=bool(flag("host_gap")),
    )


def _output(told: Signals) -> OutputEvidence:
    """The output against what is expected. Below the line counts as slow; across a restart, and for a swing that comes daily, 10 %."""
    number, flag = told.numbers.get, told.flags.get
    bar = Bar()
    output = number("tps_ratio")
    work = number("work_ratio")
    if output is None:
        output = work
    loose = bool(flag("restart")) or (told.texts.get("peers_affected") == "all" and number("period_h") is not None)
    line = bar.enter("loss.restart_ratio" if loose else "loss.told_ratio")
    itl, prefill, ttft = number("itl_ratio"), number("prefill_ratio"), number("ttft_ratio")
    per_work = [share for share in (work, prefill, 1 / itl if itl else None) if share is not None]
    slow = output is not None and output <= line
    late = bar.reached("loss.latency_ratio", ttft)
    slow_work = min(per_work) <= line if per_work else slow
    return OutputEvidence(
        baseline="told",
        output_ratio=output,
        work_ratio=work if number("tps_ratio") is not None else None,
        slow_share=float(slow),
        work_slow_share=float(slow_work or late),
        useful_ratio=number("useful_work_ratio"),
        told_work_ratio=min(per_work) if per_work else None,
        ttft_ratio=ttft,
    )


def _group(told: Signals) -> GroupEvidence:
    size = told.numbers.get("tp")
    return GroupEvidence(
        size=None if size is None else int(size),
        util=told.lists.get("rank_util", ()),
        power=told.lists.get("rank_power", ()),
        running=told.lists.get("rank_running", ()),
        share=told.lists.get("replica_share", ()),
        uneven=bool(told.flags.get("rank_imbalance")),
        mixed=bool(told.flags.get("mixed_gpus")),
        affected=told.texts.get("peers_affected", ""),
    )


def _tells(told: Signals) -> TellEvidence:
    number = told.numbers.get

    def scaled(key: str, scale: float) -> float | None:
        return None if (told_number := number(key)) is None else told_number * scale

    return TellEvidence(
        shape=SHAPES.get(told.texts.get("model", "")),
        context_tokens=number("context_tokens"),
        moved_bytes=scaled("moved_gb", GB),
        moved_s=number("moved_s"),
        link_gbit_s=number("link_gbit_s"),
        peak_bytes=scaled("peak_gb", GB),
        kv_bytes=scaled("kv_gb", GB),
        kv_to_weights=number("kv_to_weights"),
        flop_per_byte=number("flop_per_byte"),
        mlp_bytes=scaled("mlp_mb", 1e6),
        scores_flop=scaled("scores_gflop", 1e9),
        out_of_memory=bool(told.flags.get("oom")),
        largest_free_bytes=scaled("largest_free_gb", GB),
        unused_bytes=scaled("unused_gb", GB),
        launch=told.texts.get("launch", ""),
    )


def _events(told: Signals) -> tuple[Event, ...]:
    kinds = (
        ("deploy_event", "deploy"),
        ("driver_changed", "driver"),
        ("config_changed", "config"),
        ("restart", "restart"),
    )
    events = [Event(kind, "", "", told.texts.get(key, ""), None, 0) for key, kind in kinds if told.flags.get(key)]
    events += [Event("xid", "", SOMEWHERE, "", int(code), 0) for code in told.lists.get("xid", ())]
    return tuple(events)
