"""Every key that a signals object may hold: what it should be, in which bounds it can be true, and the field that it speaks of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rules.shape import SHAPES

FLAG_NAMES = (
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal",
    "sw_thermal",
    "hw_power_brake",
    "temp_at_limit",
)
"""What `flags` may list: the reasons that NVML gives, and that a temperature sits on its limit."""


@dataclass(frozen=True, slots=True)
class Key:
    """`kind`: number, flag, event, text, numbers, names. `low` and `high` bound what the reading can be at all."""

    kind: str
    low: float = 0.0
    high: float = 1e12
    choices: tuple[str, ...] = ()


def _numbers(names: str, low: float, high: float) -> dict[str, Key]:
    return {name: Key("number", low, high) for name in names.split()}


FLAGS = (
    "tokens_zero delivered_tokens_zero health_ok canary_ok mig clock_locked since_boot remap_pending "
    "kernel_contained_error host_gap mixed_gpus rank_imbalance preempt vram_sawtooth orphan_gpu_pid plateau "
    "prompt_tps_high structured cgroup_throttled sync_wait p2p persistence startup start_failed read_bound "
    "prefix_hit_drop ttft_flat stalled oom gpu_lost"
)
EVENTS = "deploy_event config_changed driver_changed restart"
"""True and false, or the words of what changed."""

KEYS: Mapping[str, Key] = {
    **_numbers(
        "tps_ratio prefill_ratio itl_ratio ttft_ratio work_ratio useful_work_ratio bandwidth_ratio sm_ratio "
        "mem_clock_ratio power_ratio power_to_limit limit_to_default prompt_len_ratio output_len_ratio context_ratio "
        "kv_blocks_ratio",
        0,
        1e6,
    ),
    **_numbers("accept_ratio delta_fraction", 0, 1.001),
    **_numbers("tps client_tps server_tps", 0, 1e9),
    **_numbers("ttft_s itl_max_s stats_stale_s load_s total_s weights_s uptime_s thermal_violation_s", 0, 1e10),
    **_numbers("client_minus_server_s", -1e6, 1e6),
    **_numbers("open_connections iteration_tokens running waiting threads gpu_pids load_events", 0, 1e9),
    **_numbers("util_pct mem_util_pct gr_active fan_pct kv_pct prefix_hit_pct cpu_core_max_pct", 0, 110),
    **_numbers("temp_c mem_temp_c", -50, 160),
    **_numbers("temp_slope_c_per_min peer_temp_delta_c", -200, 200),
    **_numbers("power_limit_w power_w psu_w sum_limits_w", 0, 1e6),
    **_numbers("vram_free_mib mem_used_mib", 0, 1e8),
    **_numbers("gtt_gb", 0, 1e6),
    **_numbers("swap_mbs pcie_mbs", 0, 1e7),
    **_numbers("ecc_uncorrectable row_remap_failure remapped_rows_delta nvlink_errors_delta", 0, 1e9),
    **_numbers("cpu_quota cpu_request", 0, 1e5),
    **_numbers("pcie_gen_idle pcie_gen_load", 0, 16),
    **_numbers("pcie_width", 0, 64),
    **_numbers("util_swing_pct", 0, 110),
    **_numbers("running_cv arrivals_cv kv_to_weights flop_per_byte", 0, 1e6),
    **_numbers("tokenize_s moved_s context_tokens", 0, 1e9),
    **_numbers("link_gbit_s", 0, 1e6),
    **_numbers("moved_gb peak_gb kv_gb largest_free_gb unused_gb mlp_mb scores_gflop", 0, 1e9),
    **_numbers("psi_io_pct disk_busy_pct", 0, 110),
    **_numbers("thread_max_pct", 0, 1e5),
    **_numbers("tp", 0, 1e6),
    **_numbers("model_b", 0, 1e6),
    **_numbers("period_h", 0, 1e5),
    **{name: Key("flag") for name in FLAGS.split()},
    **{name: Key("event") for name in EVENTS.split()},
    "pstate": Key("text"),
    "nccl_transport": Key("text"),
    "kv_used_kind": Key("text", choices=("live", "live_plus_cached", "reserved")),
    "peers_affected": Key("text", choices=("none", "one", "some", "all")),
    "flags": Key("names"),
    "xid": Key("numbers", 0, 1000),
    "rank_util": Key("numbers", 0, 110),
    "rank_power": Key("numbers", 0, 1e5),
    "rank_running": Key("numbers", 0, 1e9),
    "replica_share": Key("numbers", 0, 1e9),
    "model": Key("text", choices=tuple(SHAPES)),
    "launch": Key("text"),
    "id": Key("text"),
}
