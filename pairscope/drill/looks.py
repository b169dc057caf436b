"""What one can look at in a round: ten views of the same samples, each with then, now and a trend. None says what is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dashboard.units import NONE, number
from pairscope.drill.rounds import Round
from rules.verdict import Step
from telemetry import catalogue
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.pairs import THROTTLE_REASONS
from telemetry.sample import Sample

SECOND = 10**9
SPAN_NS = 600 * SECOND
BUCKETS = 30
NOW_NS, THEN_NS = 60 * SECOND, 120 * SECOND
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
NEAR = 0.03  # GPUs within this of each other are one number

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a view: then and now in words, and the values of the last ten minutes by bucket, None where nothing was read."""

    place: str
    what: str
    then: str
    now: str
    trend: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """`fields` are measurement.field; `rates` are counters told as their growth a minute. `step` of the walk looks at the same."""

    step: Step
    fields: tuple[str, ...]
    rates: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


LOOKS: dict[str, Look] = {
    "telemetry": Look(Step.VALIDITY, ("engine.up", "engine.stats_age_s", "engine.tokens_per_s", "host.clock_offset_s")),
    "temperature": Look(
        Step.PHYSICAL,
        (
            *("thermal.inlet_c", "thermal.exhaust_c", "thermal.fan_pct", "thermal.fan_min_rpm"),
            *("gpu.temp_c", "gpu.temp_limit_c", "gpu.mem_temp_c", "gpu.mem_temp_limit_c"),
        ),
        reasons=("hw_thermal", "sw_thermal"),
    ),
    "power": Look(
        Step.PHYSICAL,
        (
            *("power.node_w", "power.capacity_w", "power.headroom_redundant_pct", "power.redundancy", "power.cap_w"),
            *("gpu.power_w", "gpu.power_limit_w", "gpu.power_limit_default_w"),
        ),
        reasons=("sw_power_cap", "hw_power_brake"),
    ),
    "gpu": Look(
        Step.PHYSICAL,
        (
            *("gpu.util_pct", "gpu.sm_active_pct", "gpu.sm_clock_mhz", "gpu.sm_clock_max_mhz", "gpu.mem_clock_mhz"),
            *("gpu.state", "gpu.pcie_gen", "gpu.pcie_width", "gpu.processes"),
        ),
        ("gpu.pcie_replays_total", "gpu.ecc_uncorrected_total", "gpu.xid_total"),
        ("hw_slowdown",),
    ),
    "memory": Look(
        Step.MEMORY,
        ("engine.kv_used_pct", "engine.kv_fragmentation_pct", "engine.kv_blocks_count", "gpu.mem_used_bytes"),
        ("engine.preemptions_total", "engine.oom_total"),
    ),
    "requests": Look(
        Step.REQUESTS,
        ("engine.prompt_len_mean", "engine.output_len_mean", "engine.context_mean", "engine.prompt_tokens_per_s"),
        ("engine.requests_finished_total", "engine.prefix_queries_total", "engine.prefix_hits_total"),
    ),
    "engine": Look(
        Step.SCHEDULING,
        (
            *("engine.requests_running", "engine.requests_waiting", "engine.ttft_p95_s", "engine.itl_mean_s"),
            *("engine.step_mean_s", "engine.uptime_s"),
        ),
        ("engine.steps_total", "engine.requests_failed_total"),
    ),
    "host": Look(
        Step.SCHEDULING,
        (
            *("host.cpu_pct", "host.cpu_core_max_pct", "host.load1", "host.psi_cpu_pct", "host.cgroup_throttled_pct"),
            *("host.swap_in_bytes_s", "gpu.processes"),
        ),
    ),
    "disk": Look(Step.SOFTWARE, ("host.iowait_pct", "host.psi_io_pct", "host.disk_busy_pct")),
    "events": Look(Step.SOFTWARE, ("engine.uptime_s",)),
}
MASK = {name: bit for bit, name in THROTTLE_REASONS}


def wall(played: Round, language: str) -> list[Row]:
    """Both sides of every pair, as the wall of the page shows them."""
    rows: list[Row] = []
    for (node, engine), course in played.courses.items():
        place = printable(f"{node} / {engine}" if engine else node)
        output = [(m.time_ns, m.output_pct) for m in course.moments if m.output_pct is not None]
        util = [(m.time_ns, m.util_pct) for m in course.moments if m.util_pct is not None]
        tokens = [(m.time_ns, m.tokens_per_s) for m in course.moments if m.tokens_per_s is not None]
        expected = [(m.time_ns, m.expected_tokens_per_s) for m in course.moments if m.expected_tokens_per_s is not None]
        for lane, points, unit in (
            ("pair.output_pct", output, "%"),
            ("pair.util_pct", util, "%"),
            ("pair.tokens_per_s", tokens, "tokens/s"),
            ("pair.expected_tokens_per_s", expected, "tokens/s"),
        ):
            rows.append(_row(played, place, _title(lane, language), points, unit))
    return rows


def look(name: str, played: Round, language: str) -> list[Row]:
    """The rows of a view over all nodes. KeyError for one that there isn't."""
    chosen = LOOKS[name]
    rows: list[Row] = []
    for node in played.nodes:
        for lane in chosen.fields:
            rows += _field_rows(played, node, lane, language)
        for lane in chosen.rates:
            rows += _rate_rows(played, node, lane, language)
        for reason in chosen.reasons:
            rows += _reason_rows(played, node, reason, language)
    return rows


def events(played: Round) -> list[tuple[int, str]]:
    """Time and words of every event, oldest first, and of what an engine says of its version and settings."""
    found = []
    for sample in played.samples:
        if sample.measurement == "event":
            tags, fields = sample.tags, sample.fields
            about = " / ".join(dict.fromkeys(tag for tag in (tags.get("node", ""), tags.get("subject", "")) if tag))
            words = " ".join(str(fields.get(name, "")) for name in ("text", "detail")).strip()
            found.append((sample.time_ns, printable(f"{about}: {tags.get('kind', '')}: {words}")))
    return found


def sparkline(trend: Sequence[float | None], *, plain: bool = False) -> str:
    """The trend in as many letters as it has values; a blank where nothing was read. Flat lines lie in the middle."""
    bars = PLAIN_BARS if plain else BARS
    known = [value for value in trend if value is not None]
    if not known:
        return " " * len(trend)
    low, high = min(known), max(known)
    least = 0.04 * max(abs(low), abs(high))  # noise of a steady value is not drawn as mountains
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least, middle + least
    span = (high - low) or 1.0
    return "".join(
        " " if value is None else bars[min(int((value - low) / span * len(bars)), len(bars) - 1)] for value in trend
    )


def _title(lane: str, language: str) -> str:
    measurement, _, name = lane.partition(".")
    return catalogue.title(measurement, name, language)


def _row(played: Round, place: str, what: str, points: Points, unit: str) -> Row:
    first_ns = max(played.start_ns, played.end_ns - SPAN_NS)
    then = [value for at, value in points if first_ns <= at <= first_ns + THEN_NS]
    now = [value for at, value in points if at >= played.end_ns - NOW_NS]
    return Row(place, what, _told(then, unit), _told(now, unit), _trend(points, first_ns, played.end_ns))


def _told(values: Sequence[float], unit: str) -> str:
    return number(statistics.median(values), unit) if values else NONE


def _trend(points: Points, first_ns: int, end_ns: int) -> tuple[float | None, ...]:
    width = max(1, (end_ns - first_ns) // BUCKETS)
    buckets: list[list[float]] = [[] for _ in range(BUCKETS)]
    for at, value in points:
        if at >= first_ns:
            buckets[min((at - first_ns) // width, BUCKETS - 1)].append(value)
    return tuple(statistics.fmean(bucket) if bucket else None for bucket in buckets)


def _devices(played: Round, node: str, measurement: str) -> dict[str, list[Sample]]:
    """Engine or GPU (or nothing, for what there is once on a node) -> its samples."""
    found: dict[str, list[Sample]] = {}
    for sample in played.samples:
        if sample.measurement == measurement and sample.tags.get("node") == node:
            found.setdefault(sample.tags.get("engine") or sample.tags.get("gpu") or "", []).append(sample)
    return found


def _points(samples: Sequence[Sample], name: str) -> Points:
    return [
        (sample.time_ns, float(value))
        for sample in samples
        if isinstance(value := sample.fields.get(name), int | float)
    ]


def _field_rows(played: Round, node: str, lane: str, language: str) -> list[Row]:
    measurement, _, name = lane.partition(".")
    by_device = {device: _points(samples, name) for device, samples in _devices(played, node, measurement).items()}
    by_device = {device: points for device, points in by_device.items() if points}
    unit, title = catalogue.unit_of(name), _title(lane, language)
    if measurement != "gpu" or len(by_device) < 2:
        return [
            _row(played, printable(" / ".join(part for part in (node, device) if part)), title, points, unit)
            for device, points in by_device.items()
        ]
    return _of_gpus(played, node, title, by_device, unit, language)


def _of_gpus(played: Round, node: str, title: str, by_gpu: dict[str, Points], unit: str, language: str) -> list[Row]:
    """One row where all GPUs of a node read about the same, else one each for the lowest and the highest now."""
    now = {
        gpu: statistics.median([value for at, value in points if at >= played.end_ns - NOW_NS] or [points[-1][1]])
        for gpu, points in by_gpu.items()
    }
    low, high = min(now, key=lambda gpu: now[gpu]), max(now, key=lambda gpu: now[gpu])
    if now[high] - now[low] <= NEAR * max(abs(now[high]), abs(now[low])):
        together = [point for points in by_gpu.values() for point in points]
        place = say("drill.gpus", language, node=node, count=len(by_gpu))
        return [_row(played, printable(place), title, sorted(together), unit)]
    return [
        _row(played, printable(say(f"drill.{key}", language, node=node, gpu=gpu)), title, by_gpu[gpu], unit)
        for key, gpu in (("lowest", low), ("highest", high))
    ]


def _rate_rows(played: Round, node: str, lane: str, language: str) -> list[Row]:
    measurement, _, name = lane.partition(".")
    by_device: dict[str, Points] = {}
    for device, samples in _devices(played, node, measurement).items():
        counts = _points(samples, name)
        grown = [
            (after[0], (after[1] - before[1]) / ((after[0] - before[0]) / (60 * SECOND)))
            for before, after in zip(counts, counts[6:], strict=False)  # over half a minute
            if after[0] > before[0] and after[1] >= before[1]
        ]
        if grown:
            by_device[device] = grown
    title = say("drill.per_minute", language, what=_title(lane, language))
    if measurement == "gpu":
        return _of_gpus(played, node, title, by_device, "", language) if by_device else []
    return [
        _row(played, printable(" / ".join(part for part in (node, device) if part)), title, points, "")
        for device, points in by_device.items()
    ]


def _reason_rows(played: Round, node: str, reason: str, language: str) -> list[Row]:
    """Share of the node's GPUs that have the throttle reason set, in %."""
    masks: dict[int, list[float]] = {}
    for samples in _devices(played, node, "gpu").values():
        for at, mask in _points(samples, "throttle_reasons"):
            masks.setdefault(at, []).append(100.0 * bool(int(mask) & MASK[reason]))
    points = [(at, statistics.fmean(shares)) for at, shares in sorted(masks.items())]
    if not points:
        return []
    what = say("drill.throttled", language, reason=say(f"dashboard.reason.{reason}", language))
    return [_row(played, printable(node), what, points, "%")]
