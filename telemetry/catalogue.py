"""The one list of every measurement and field: its kind, its type, its unit and its name in English and Chinese.

Writing a field that this list does not hold is an error in tests (`check`) and is dropped and counted on the wire.
The unit of a field is the suffix of its name; `unit_of` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from telemetry.sample import Sample


class Kind(StrEnum):
    """How a field behaves over time, which decides how it is downsampled."""

    GAUGE = "gauge"  # float; mean, min, max
    COUNTER = "counter"  # grows since the source's start and may reset; last, rate
    STATE = "state"  # small int; the largest in a bucket is shown
    MASK = "mask"  # bit mask; OR-ed over a bucket
    TEXT = "text"  # string; last


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: Kind
    type: type[float] | type[int] | type[str]
    title_en: str
    title_zh: str


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    tags: tuple[str, ...]  # beyond COMMON_TAGS
    fields: Mapping[str, Field]
    title_en: str
    title_zh: str


COMMON_TAGS = ("node", "rack", "circuit", "cluster", "origin")
"""Tags any sample may carry. `origin` is absent on real samples and says of all others why they are no measurement of their time."""

SIMULATED = "simulated"
REPLAYED = "replay"
NOT_LIVE = frozenset((SIMULATED, REPLAYED))
"""Values of `origin`: what the simulator makes, and what was measured at another time and is played again as if it were now."""

GPU_STATES = ("ok", "lost", "reset_required", "no_permission", "hung", "driver_mismatch", "absent")
ALERT_STATES = ("resolved", "pending", "firing")
REDUNDANCY_STATES = ("lost", "degraded", "full")

REACH = 1e15
"""No quantity of the catalogue comes near it (bytes and bytes/s included); a larger number is a source's defect, not a reading."""

UNITS: tuple[tuple[str, str], ...] = (
    # longest suffix first: `_bytes_s` before `_s`
    ("tokens_per_s", "tokens/s"),
    ("_bytes_s", "B/s"),
    ("_bytes", "B"),
    ("_total", ""),
    ("_pct", "%"),
    ("_mhz", "MHz"),
    ("_rpm", "rpm"),
    ("_ms", "ms"),
    ("_c", "°C"),
    ("_w", "W"),
    ("_j", "J"),
    ("_a", "A"),
    ("_v", "V"),
    ("_s", "s"),
)


def unit_of(field: str) -> str:
    """The unit that a field's name ends in, as printed on an axis; empty for pure numbers."""
    for suffix, unit in UNITS:
        if field.endswith(suffix):
            return unit
    return ""


def _fields(kind: Kind, type_: type[float] | type[int] | type[str], table: str) -> dict[str, Field]:
    """Rows of `name | English | Chinese`."""
    made: dict[str, Field] = {}
    for line in table.strip().splitlines():
        name, title_en, title_zh = (part.strip() for part in line.split("|"))
        made[name] = Field(name, kind, type_, title_en, title_zh)
    return made


def _gauges(table: str) -> dict[str, Field]:
    return _fields(Kind.GAUGE, float, table)


def _counters(table: str) -> dict[str, Field]:
    return _fields(Kind.COUNTER, int, table)


def _second_counters(table: str) -> dict[str, Field]:
    return _fields(Kind.COUNTER, float, table)


def _states(table: str) -> dict[str, Field]:
    return _fields(Kind.STATE, int, table)


def _masks(table: str) -> dict[str, Field]:
    return _fields(Kind.MASK, int, table)


def _texts(table: str) -> dict[str, Field]:
    return _fields(Kind.TEXT, str, table)


def _measurement(
    name: str, tags: tuple[str, ...], title_en: str, title_zh: str, *groups: dict[str, Field]
) -> Measurement:
    fields: dict[str, Field] = {}
    for group in groups:
        fields |= group
    return Measurement(name, tags, fields, title_en, title_zh)


GPU = _measurement(
    "gpu",
    ("gpu", "uuid"),
    "GPU",
    "GPU",
    _gauges("""
        util_pct | GPU-Util | GPU 利用率
        mem_util_pct | memory-controller util | 显存控制器利用率
        sm_active_pct | SM active | SM 活跃率
        dram_active_pct | DRAM active | DRAM 活跃率
        tensor_active_pct | tensor active | 张量核活跃率
        gr_active_pct | compute engine active | 计算引擎活跃率
        aicore_util_pct | AI Core utilisation | AI Core 利用率
        mem_used_bytes | GPU memory used | 显存已用
        mem_total_bytes | GPU memory total | 显存总量
        temp_c | GPU temperature | GPU 温度
        mem_temp_c | memory temperature | 显存温度
        temp_margin_c | margin to the temperature limit | 距温度上限余量
        temp_limit_c | temperature limit | 温度上限
        mem_temp_limit_c | memory temperature limit | 显存温度上限
        power_w | power | 功率
        power_limit_w | enforced power limit | 生效功率上限
        power_limit_default_w | default power limit | 默认功率上限
        power_limit_requested_w | requested power limit | 请求的功率上限
        sm_clock_mhz | SM clock | SM 时钟
        sm_clock_max_mhz | SM clock maximum | SM 最高时钟
        mem_clock_mhz | memory clock | 显存时钟
        mem_clock_max_mhz | memory clock maximum | 显存最高时钟
        fan_pct | fan | 风扇
        pcie_rx_bytes_s | PCIe receive | PCIe 接收
        pcie_tx_bytes_s | PCIe transmit | PCIe 发送
        nvlink_rx_bytes_s | NVLink receive | NVLink 接收
        nvlink_tx_bytes_s | NVLink transmit | NVLink 发送
    """),
    _states("""
        pstate | performance state | 性能状态
        pcie_gen | PCIe generation | PCIe 代
        pcie_gen_max | PCIe generation maximum | PCIe 最高代
        pcie_width | PCIe width | PCIe 宽度
        pcie_width_max | PCIe width maximum | PCIe 最大宽度
        processes | compute processes | 计算进程数
        state | state | 状态
        remap_pending | row remap pending | 行重映射待生效
        remap_failed | row remap failed | 行重映射失败
        recovery_action | recovery action that the driver asks for | 驱动要求的恢复动作
        healthy | healthy by its own word | 自述健康
        link_up | network port up | 网口已连接
    """),
    _masks("throttle_reasons | throttle reasons | 降频原因"),
    _second_counters("""
        energy_j | energy | 能耗
        throttle_sw_power_s | time under the power cap | 功率上限降频时长
        throttle_sw_thermal_s | time in software thermal slowdown | 软件过热降频时长
        throttle_hw_thermal_s | time in hardware thermal slowdown | 硬件过热降频时长
        throttle_hw_power_brake_s | time in power brake | 电源制动时长
        throttle_sync_boost_s | time held by sync boost | 同步升频限制时长
        throttle_thermal_s | time in thermal slowdown, software or hardware | 过热降频时长(软件或硬件)
    """),
    _counters("""
        pcie_replays_total | PCIe replays | PCIe 重传
        ecc_corrected_total | ECC corrected | ECC 已纠正
        ecc_uncorrected_total | ECC uncorrected | ECC 未纠正
        remapped_rows_total | remapped rows | 重映射行数
        xid_total | XID errors | XID 错误
    """),
    _texts("""
        name | product name | 产品名
        driver | driver version | 驱动版本
        memory_kind | kind of memory (device, unified) | 内存类型(device、unified)
        power_scope | what its power covers (gpu, module) | 功率所涵盖范围(gpu、module)
        source | where it is read (nvml, dcgm, amd, ascend) | 读取来源(nvml、dcgm、amd、ascend)
    """),
)

RECOVERY_ACTIONS = (
    *("none", "reset_gpu", "reboot_node", "drain_p2p", "drain_and_reset", "recover_imex", "reset_bus", "reboot_system"),
)

MIG = _measurement(
    "mig",
    ("gpu", "uuid", "mig"),
    "MIG instance",
    "MIG 实例",
    _gauges("""
        sm_active_pct | SM active | SM 活跃率
        dram_active_pct | DRAM active | DRAM 活跃率
        tensor_active_pct | tensor active | 张量核活跃率
        gr_active_pct | compute engine active | 计算引擎活跃率
        mem_used_bytes | memory used | 显存已用
        mem_total_bytes | memory total | 显存总量
    """),
    _states("processes | compute processes | 计算进程数"),
    _texts("profile | profile | 规格"),
)
"""`gpu` and `uuid` are the physical GPU's, `mig` the instance's own uuid, or "UUID/N" for instance N of an exporter that doesn't
tell it. Power, clocks and temperature exist only for the whole GPU."""

ENGINE = _measurement(
    "engine",
    ("engine", "kind", "model", "gpus"),
    "Engine",
    "引擎",
    _counters("""
        generation_tokens_total | generated tokens | 生成 token 数
        delivered_tokens_total | delivered tokens | 送达 token 数
        prompt_tokens_total | prompt tokens | 提示 token 数
        preemptions_total | preemptions | 抢占次数
        requests_finished_total | requests finished | 完成请求
        requests_failed_total | requests failed | 失败请求
        requests_aborted_total | requests aborted | 中止请求
        deadline_missed_total | deadlines missed | 错过期限
        prompt_tokens_computed_total | prompt tokens computed, not cached | 实际计算的提示 token 数(不含缓存)
        oom_total | out-of-memory events | 内存不足次数
        steps_total | engine steps | 引擎步数
        spec_drafts_total | verified drafts | 已验证的草稿数
        spec_drafted_total | drafted tokens | 草拟 token 数
        spec_accepted_total | accepted draft tokens | 接受的草拟 token 数
        prefix_queries_total | prefix-cache queries | 前缀缓存查询
        prefix_hits_total | prefix-cache hits | 前缀缓存命中
        prefix_evictions_total | blocks evicted from the prefix cache | 前缀缓存逐出的块
        preemptions_recompute_total | preemptions whose cache is computed anew | 需重算的抢占次数
        preemptions_swap_total | preemptions swapped to host memory | 换出到主机内存的抢占次数
        swap_out_blocks_total | KV blocks swapped out | 换出的 KV 块
        swap_in_blocks_total | KV blocks swapped in | 换入的 KV 块
        blocked_on_blocks_total | steps in which requests waited for KV blocks | 因缺 KV 块而不能接纳请求的步数
        blocked_on_seqs_total | steps in which requests waited for a place among the running | 因运行序列已满而不能接纳请求的步数
        blocked_on_tokens_total | steps in which requests waited for token budget | 因 token 预算用尽而不能接纳请求的步数
        requests_migrated_out_total | requests that went on at another engine | 迁出到其他引擎的请求
        requests_migrated_in_total | requests that came from another engine | 从其他引擎迁入的请求
        migrations_failed_total | migrations that failed | 失败的迁移次数
        migrated_out_bytes_total | KV cache sent to other engines, bytes | 迁出的 KV 缓存字节数
        migrated_in_bytes_total | KV cache received from other engines, bytes | 迁入的 KV 缓存字节数
    """),
    _second_counters("""
        migrated_out_s | time for which requests stood still to migrate | 请求迁出期间的停顿时长
        migrated_in_s | time in which requests were taken in | 接收迁入请求的时长
    """),
    _second_counters("""
        stage_tokenise_s | time in tokenising | 分词用时
        stage_schedule_s | time in scheduling | 调度用时
        stage_embed_s | time in embedding | 嵌入用时
        stage_attention_s | time in attention | 注意力用时
        stage_mlp_s | time in the MLP | MLP 用时
        stage_sample_s | time in sampling, head included | 采样用时(含输出头)
        stage_detokenise_s | time in detokenising | 反分词用时
    """),
    _gauges("""
        tokens_per_s | output tokens/s | 输出 tokens/s
        prompt_tokens_per_s | prompt tokens/s | 提示 tokens/s
        requests_running | requests running | 运行中请求
        requests_waiting | requests waiting | 排队请求
        kv_used_pct | KV cache used | KV 缓存已用
        kv_fragmentation_pct | KV cache fragmented | KV 缓存碎片
        kv_blocks_count | KV blocks | KV 块总数
        kv_blocks_free | KV blocks free | KV 空闲块
        kv_blocks_free_run | longest run of free KV blocks | 最长连续空闲 KV 块
        kv_blocks_cached | free KV blocks that hold a known prefix | 保留前缀的空闲 KV 块
        kv_blocks_swapped | KV blocks swapped to host memory | 换出到主机内存的 KV 块
        kv_slots_unused | KV slots reserved but not written | 已预留未写入的 KV 槽
        ttft_mean_s | time to first token mean | 首 token 延迟均值
        ttft_p50_s | time to first token p50 | 首 token 延迟 p50
        ttft_p95_s | time to first token p95 | 首 token 延迟 p95
        ttft_p99_s | time to first token p99 | 首 token 延迟 p99
        itl_mean_s | inter-token latency mean | token 间隔均值
        itl_p50_s | inter-token latency p50 | token 间隔 p50
        itl_p99_s | inter-token latency p99 | token 间隔 p99
        tpot_mean_s | time per output token of a request, mean | 请求内每输出 token 时间均值
        e2e_mean_s | request latency mean | 请求延迟均值
        e2e_p99_s | request latency p99 | 请求延迟 p99
        queue_mean_s | queue time mean | 排队时间均值
        queue_p99_s | queue time p99 | 排队时间 p99
        step_mean_s | step time mean | 步时均值
        tokens_per_step | tokens per step | 每步 token 数
        prompt_len_mean | prompt length mean | 提示长度均值
        prompt_len_p50 | prompt length p50 | 提示长度 p50
        prompt_len_p95 | prompt length p95 | 提示长度 p95
        prompt_len_max | prompt length maximum | 提示长度最大值
        output_len_mean | output length mean | 输出长度均值
        output_len_p95 | output length p95 | 输出长度 p95
        context_mean | context length mean | 上下文长度均值
        spec_on | speculation (1 on, 0 switched off as it does not pay) | 推测解码(1 启用,0 因得不偿失而关闭)
        spec_speedup | tokens/s with drafts by tokens/s without, measured | 有草稿与无草稿的 tokens/s 之比(实测)
        spec_acceptance_pct | drafted tokens that were accepted | 草拟 token 接受率
        spec_tokens_per_draft | tokens that a verified draft brought | 每份草稿带来的 token 数
        mfu_pct | model FLOPs utilisation | 模型算力利用率
        mbu_pct | model bandwidth utilisation | 模型带宽利用率
        mfu_prefill_pct | model FLOPs utilisation in prefill | prefill 阶段模型算力利用率
        mbu_decode_pct | model bandwidth utilisation in decode | decode 阶段模型带宽利用率
        stats_age_s | age of the statistics | 统计数据年龄
        uptime_s | uptime | 运行时长
        probe_s | probe latency | 探测延迟
        reported_tokens_per_s | tokens/s as the engine reports it | 引擎自报 tokens/s
        gpus_confidence | confidence that these are its GPUs | GPU 归属置信度
        proc_cpu_pct | CPU of its processes (100 = one core) | 引擎进程 CPU(100 = 一个核)
        proc_cpu_max_pct | CPU of its busiest thread | 最忙线程 CPU
        proc_rss_bytes | memory of its processes | 引擎进程内存
    """),
    _states("""
        up | answers | 有应答
        starting | is starting | 正在启动
        probe_ok | probe succeeded | 探测成功
        stalled | requests run, and nothing comes out | 有请求运行但无输出
        partial | some of its ranks don't report | 部分 rank 未上报
        procs | processes | 进程数
    """),
    _texts("""
        version | version | 版本
        config_hash | configuration hash | 配置哈希
        counter_style | counter style | 计数方式
        kv_used_kind | what KV use counts (live, live_plus_cached, reserved) | KV 使用量口径(live、live_plus_cached、reserved)
        quantile_bounds | quantiles that are only a bound, each with its sign | 仅为上界或下界的分位数
        gpus_mapping | how its GPUs are known (manual, nvml, cgroup, env) | GPU 归属依据(manual、nvml、cgroup、env)
    """),
)

RANK = _measurement(
    "rank",
    ("engine", "kind", "model", "gpus", "rank"),
    "Rank",
    "Rank",
    _counters("steps_total | steps | 步数"),
    _second_counters("""
        compute_s | time in which it computed | 自身计算时长
        wait_s | time in collectives: waiting for the others, and the transfer | 集合通信时长(等待其他 rank 与传输)
    """),
    _gauges("""
        step_compute_mean_s | time of a step in which it computed, mean | 每步自身计算时间均值
        step_wait_mean_s | time of a step in collectives, mean | 每步集合通信时间均值
    """),
)
"""One process of a model that is split over several. The slowest computes longest and waits least; the others wait for it in every
step, so that their whole step times are all alike."""

HOST = _measurement(
    "host",
    (),
    "Host",
    "主机",
    _gauges("""
        cpu_pct | CPU use | CPU 使用率
        cpu_core_max_pct | busiest core | 最忙核心
        load1 | load average 1 min | 1 分钟负载
        mem_used_pct | memory used | 内存已用
        swap_in_bytes_s | swap in | 换入
        swap_out_bytes_s | swap out | 换出
        iowait_pct | I/O wait | I/O 等待
        psi_cpu_pct | CPU pressure | CPU 压力
        psi_io_pct | I/O pressure | I/O 压力
        psi_memory_pct | memory pressure | 内存压力
        cgroup_throttled_pct | cgroup CPU throttled | cgroup CPU 限流
        disk_busy_pct | disk busy | 磁盘忙
        net_rx_bytes_s | network receive | 网络接收
        net_tx_bytes_s | network transmit | 网络发送
        clock_offset_s | clock offset | 时钟偏差
        cpu_power_w | CPU power | CPU 功率
    """),
    _states("""
        gpus_expected | GPUs expected | 应有 GPU 数
        gpus_seen | GPUs that answer | 有应答 GPU 数
    """),
)

PSU = _measurement(
    "psu",
    ("psu",),
    "Power supply",
    "电源模块",
    _gauges("""
        input_w | input power | 输入功率
        output_w | output power | 输出功率
        capacity_w | capacity | 额定容量
        voltage_v | line voltage | 线电压
    """),
    _states("ok | healthy | 正常"),
)

POWER = _measurement(
    "power",
    (),
    "Node power",
    "节点供电",
    _gauges("""
        node_w | node power | 节点功率
        capacity_w | PSU capacity | PSU 总容量
        headroom_pct | PSU headroom | PSU 余量
        headroom_redundant_pct | PSU headroom with one lost | 失一电源时余量
        cap_w | node power cap | 节点功率上限
    """),
    _states("redundancy | redundancy | 冗余状态"),
)

THERMAL = _measurement(
    "thermal",
    (),
    "Node cooling",
    "节点散热",
    _gauges("""
        inlet_c | inlet air | 进风温度
        exhaust_c | exhaust air | 出风温度
        fan_min_rpm | slowest fan | 最慢风扇
        fan_pct | fans | 风扇
        coolant_c | coolant | 冷却液温度
    """),
    _states("leak | leak detected | 检测到泄漏"),
)

CIRCUIT = _measurement(
    "circuit",
    (),
    "Circuit",
    "回路",
    _gauges("""
        current_a | current | 电流
        voltage_v | voltage | 电压
        rating_a | breaker rating | 断路器额定
        load_pct | load | 负载
    """),
)

EVENT = _measurement(
    "event",
    ("kind", "subject"),
    "Event",
    "事件",
    _texts("""
        text | text | 说明
        detail | detail | 详情
    """),
    _states("code | code | 代码"),
)

EVENT_KINDS = (
    "xid",
    "deploy",
    "config",
    "restart",
    "oom",
    "clock_step",
    "bmc",
    "gpu_lost",
    "gpu_fault",
    "pause",
    "spool",
)

PAIR = _measurement(
    "pair",
    ("engine", "model", "gpus"),
    "Pair",
    "配对",
    _gauges("""
        output_pct | output, % of expected | 输出(占预期 %)
        util_pct | utilisation | 利用率
        tokens_per_s | output tokens/s | 输出 tokens/s
        expected_tokens_per_s | expected tokens/s | 预期 tokens/s
        expected_spread_pct | uncertainty of the expected value | 预期值不确定度
    """),
    _texts("""
        effort | what utilisation is measured on | 利用率来源
        baseline | where the expected value comes from | 预期值来源
    """),
)
"""Written by triage: the two sides of the pair at one time. `effort` is `gpu` or `cpu`; `baseline` is `history`, `peers` or `warming`."""

VERDICT = _measurement(
    "verdict",
    ("scope", "cause", "engine"),
    "Verdict",
    "判定",
    _gauges("""
        confidence | confidence | 置信度
        loss_pct | loss | 损失
        loss_tokens_per_s | lost tokens/s | 损失 tokens/s
    """),
    _texts("""
        summary | summary | 摘要
        evidence | evidence | 证据
    """),
)

ALERT = _measurement(
    "alert",
    ("alert", "severity", "engine"),
    "Alert",
    "告警",
    _states("state | state | 状态"),
    _texts("""
        summary | summary | 摘要
        fingerprint | fingerprint | 指纹
    """),
)

AGENT = _measurement(
    "agent",
    (),
    "Agent",
    "代理",
    _gauges("""
        tick_ms | tick duration | 采样耗时
        lag_s | delivery lag | 投递滞后
        spool_bytes | spool size | 缓存大小
        rss_bytes | resident memory | 常驻内存
    """),
    _counters("""
        dropped_total | samples dropped | 丢弃样本
        errors_gpu_total | GPU collector errors | GPU 采集错误
        errors_engine_total | engine collector errors | 引擎采集错误
        errors_host_total | host collector errors | 主机采集错误
        errors_rapl_total | CPU power collector errors | CPU 功率采集错误
        errors_clock_total | clock offset collector errors | 时钟偏差采集错误
        errors_dcgm_total | DCGM collector errors | DCGM 采集错误
        errors_amd_total | AMD collector errors | AMD 采集错误
        errors_ascend_total | Ascend collector errors | 昇腾采集错误
        errors_bmc_total | BMC collector errors | BMC 采集错误
        errors_pdu_total | PDU collector errors | PDU 采集错误
        errors_delivery_total | delivery errors | 投递错误
    """),
    _second_counters("cpu_s | CPU time | CPU 时间"),
)

MEASUREMENTS: Mapping[str, Measurement] = {
    m.name: m for m in (GPU, MIG, ENGINE, RANK, HOST, PSU, POWER, THERMAL, CIRCUIT, EVENT, PAIR, VERDICT, ALERT, AGENT)
}


def field(measurement: str, name: str) -> Field:
    """The catalogue's entry; KeyError with the full name when there is none."""
    try:
        return MEASUREMENTS[measurement].fields[name]
    except KeyError:
        raise KeyError(f"{measurement}.{name} is not in the catalogue") from None


def title(measurement: str, name: str, language: str) -> str:
    """What a person reads for a field, without its unit."""
    entry = field(measurement, name)
    return entry.title_zh if language == "zh" else entry.title_en


def problems(sample: Sample) -> list[str]:
    """What is wrong with a sample by this catalogue, one phrase each; empty when nothing is.

    Checks names, tags, types, finite gauges and the signed 64-bit range of ints.
    """
    known = MEASUREMENTS.get(sample.measurement)
    if known is None:
        return [f"unknown measurement {sample.measurement!r}"]
    if _fits(sample, known):
        return []
    found = [f"unknown tag {tag!r}" for tag in sample.tags if tag not in COMMON_TAGS and tag not in known.tags]
    if "node" not in sample.tags:
        found.append("tag 'node' is missing")
    if not sample.fields:
        found.append("no fields")
    for name, value in sample.fields.items():
        entry = known.fields.get(name)
        if entry is None:
            found.append(f"unknown field {name!r}")
        elif isinstance(value, bool) or not isinstance(value, entry.type):
            found.append(f"field {name!r} is {type(value).__name__}, not {entry.type.__name__}")
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"field {name!r} is not finite")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            found.append(f"field {name!r} is beyond 64 bits")
    return found


def _fits(sample: Sample, known: Measurement) -> bool:
    """Whether there is certainly nothing wrong: the usual case, at every tick of every agent, without a phrase or a list made."""
    tags = known.tags
    for tag in sample.tags:
        if tag not in COMMON_TAGS and tag not in tags:
            return False
    fields = known.fields
    for name, value in sample.fields.items():
        entry = fields.get(name)
        if entry is None or type(value) is not entry.type:
            return False
        if entry.type is not str and not -_INT_REACH <= value < _INT_REACH:  # type: ignore[operator]  # a number, by its type
            return False  # NaN and infinities too
    return bool(sample.fields) and "node" in sample.tags


_INT_REACH = 2**63


def check(sample: Sample) -> Sample:
    """The sample itself, or ValueError that lists its problems."""
    found = problems(sample)
    if found:
        raise ValueError(f"{sample.measurement}: {'; '.join(found)}")
    return sample
