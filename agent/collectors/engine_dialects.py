"""Engine dialects: under which names each kind of engine exports what the `engine` measurement holds. One table a kind.

To add a kind of engine: one Dialect here, one entry in DIALECTS. Names are matched, never HELP or TYPE: those change freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent.exposition import Exposition, Labels
from telemetry.catalogue import ENGINE, Kind

Join = Literal["sum", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Family:
    """Where one value is found: a family, the label values its series must have (any of), how its series (ranks, models) are
    joined, and the factor to our unit. `is_ratio`: 0..1 that becomes percent; engines that send 0..100 are tolerated.
    """

    name: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    join: Join = "sum"
    is_ratio: bool = False

    def series(self, exposition: Exposition) -> dict[Labels, float]:
        found = exposition.series.get(self.name, {})
        if not self.where:
            return found
        return {labels: value for labels, value in found.items() if self._fits(labels)}

    def value(self, exposition: Exposition) -> float | None:
        """The joined value in our unit; None where the family is absent."""
        values = list(self.series(exposition).values())
        if not values:
            return None
        joined = max(values) if self.join == "max" else sum(values)
        if self.join == "mean":
            joined /= len(values)
        return joined * 100 if self.is_ratio and joined <= RATIO_CEILING else joined

    def _fits(self, labels: Labels) -> bool:
        own = dict(labels)
        return all(own.get(name) in values for name, values in self.where.items())


RATIO_CEILING = 1.5
"""A ratio above this is taken for a percentage: some engines have sent 0..100 under a name that others use for 0..1."""

Alternatives = tuple[Family, ...]
"""The first family that is present is the one; they are never added, since an engine may export old and new names at once."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of engine speaks.

    `counters` and `gauges` go by our field names, `histograms` by role (ttft, itl, e2e, queue, step, prompt_len, output_len).
    `counter_style` is "step" where token counters grow with each step and "finish" where only a finished request adds to them.
    """

    kind: str
    prefix: str
    counter_style: Literal["step", "finish"]
    counters: Mapping[str, Alternatives]
    gauges: Mapping[str, Alternatives]
    histograms: Mapping[str, tuple[str, ...]]
    step_tokens: tuple[str, ...] = ()  # a histogram with one observation a step: its count is steps, its sum tokens
    info: str = ""  # a family whose labels tell the configuration
    info_ignored: frozenset[str] = frozenset()  # labels that differ from start to start of one configuration
    version_label: str = ""
    config_label: str = ""
    version_path: str = ""
    kv_blocks_label: str = ""
    kv_block_tokens_label: str = ""
    model_label: str = "model_name"
    age: str = ""  # a family that tells how many seconds ago the engine's own loop made its numbers

    def speaks(self, exposition: Exposition) -> bool:
        return any(name.startswith(self.prefix) for name in exposition.series)

    def model(self, exposition: Exposition) -> str | None:
        """The served model's name; the first by name where there are several."""
        known = [family for families in (*self.gauges.values(), *self.counters.values()) for family in families]
        names = {dict(labels).get(self.model_label) for f in known for labels in exposition.series.get(f.name, {})}
        return min((name for name in names if name), default=None)

    def info_labels(self, exposition: Exposition) -> dict[str, str]:
        return dict(next(iter(exposition.series.get(self.info, {})), ()))


def first(alternatives: Alternatives, exposition: Exposition) -> Family | None:
    return next((family for family in alternatives if family.series(exposition)), None)


DERIVED = frozenset(
    (
        *("tokens_per_s", "prompt_tokens_per_s", "step_mean_s", "stats_age_s", "probe_s"),
        *("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "itl_mean_s", "itl_p50_s", "itl_p99_s", "e2e_p99_s", "queue_p99_s"),
        *("prompt_len_mean", "prompt_len_p50", "prompt_len_p95", "output_len_mean", "output_len_p95"),
    )
)
"""What the agent works out itself for every kind of engine, so that it means the same everywhere; never taken from an engine."""


def _own(kind: Kind) -> Iterator[tuple[str, Alternatives]]:
    """Our own engine says every field by its own name."""
    for name, entry in ENGINE.fields.items():
        if entry.kind is kind and name not in DERIVED:
            mean = kind is Kind.GAUGE and not name.startswith(("requests_", "kv_blocks_"))
            yield name, (Family(f"pairscope_{name}", join="mean" if mean else "sum"),)


PAIRSCOPE = Dialect(
    kind="pairscope",
    prefix="pairscope_",
    counter_style="step",
    counters=dict(_own(Kind.COUNTER)),
    gauges=dict(_own(Kind.GAUGE)),
    histograms={
        "ttft": ("pairscope_time_to_first_token_seconds",),
        "itl": ("pairscope_inter_token_latency_seconds",),
        "e2e": ("pairscope_request_latency_seconds",),
        "queue": ("pairscope_queue_time_seconds",),
        "step": ("pairscope_step_time_seconds",),
        "prompt_len": ("pairscope_prompt_length_tokens",),
        "output_len": ("pairscope_output_length_tokens",),
    },
    info="pairscope_engine_info",
    version_label="version",
    config_label="config_hash",
    age="pairscope_stats_age_s",
)


VLLM = Dialect(
    kind="vllm",
    prefix="vllm:",
    counter_style="step",
    counters={
        "generation_tokens_total": (Family("vllm:generation_tokens_total"),),
        "prompt_tokens_total": (Family("vllm:prompt_tokens_total"),),
        "preemptions_total": (Family("vllm:num_preemptions_total"),),
        "requests_finished_total": (
            Family("vllm:request_success_total", where={"finished_reason": ("stop", "length", "repetition")}),
        ),
        "requests_failed_total": (Family("vllm:request_success_total", where={"finished_reason": ("error",)}),),
        "requests_aborted_total": (Family("vllm:request_success_total", where={"finished_reason": ("abort",)}),),
        "spec_drafted_total": (Family("vllm:spec_decode_num_draft_tokens_total"),),
        "spec_accepted_total": (Family("vllm:spec_decode_num_accepted_tokens_total"),),
        # both sets coexist in 0.9.2 to 0.10.2
        "prefix_queries_total": (
            Family("vllm:prefix_cache_queries_total"),
            Family("vllm:gpu_prefix_cache_queries_total"),
        ),
        "prefix_hits_total": (Family("vllm:prefix_cache_hits_total"), Family("vllm:gpu_prefix_cache_hits_total")),
    },
    gauges={
        "requests_running": (Family("vllm:num_requests_running"),),
        "requests_waiting": (Family("vllm:num_requests_waiting"),),
        "kv_used_pct": (
            Family("vllm:kv_cache_usage_perc", join="mean", is_ratio=True),
            Family("vllm:gpu_cache_usage_perc", join="mean", is_ratio=True),  # to 0.10.2
        ),
    },
    histograms={
        "ttft": ("vllm:time_to_first_token_seconds",),
        # the older name was the gap between steps as well, in V1
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "queue": ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
        "prompt_len": ("vllm:request_prompt_tokens",),
        "output_len": ("vllm:request_generation_tokens",),
    },
    step_tokens=("vllm:iteration_tokens_total",),
    info="vllm:cache_config_info",
    info_ignored=frozenset(
        # profiled at each start, or the rank
        {"engine", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_memory_bytes"}
    ),
    version_path="/version",
    kv_blocks_label="num_gpu_blocks",
    kv_block_tokens_label="block_size",
)

DIALECTS: tuple[Dialect, ...] = (PAIRSCOPE, VLLM)
"""In the order in which they are tried on an unknown endpoint."""

START_FAMILIES = ("process_start_time_seconds",)
UPTIME_FAMILY = "pairscope_uptime_s"


def detect(exposition: Exposition, kind: str = "auto") -> Dialect | None:
    """The dialect that the exposition is in; with a given kind, that one or none."""
    return next((d for d in DIALECTS if kind in ("auto", d.kind) and d.speaks(exposition)), None)
