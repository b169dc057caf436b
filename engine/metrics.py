"""The engine's numbers in Prometheus' text form, made when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.stages import Stage
from engine.stats import Counters, EngineStats, Histogram, RankTimes, prompt_len_max, recent
from telemetry.catalogue import ENGINE

HISTOGRAMS = {
    "time_to_first_token_seconds": "from arrival to the first token, in the engine",
    "time_per_output_token_seconds": "from the first token to the last, by the tokens after the first, of finished requests",
    "inter_token_latency_seconds": "between one token and the next of a request, in the engine",
    "request_latency_seconds": "from arrival to the last token of finished requests",
    "queue_time_seconds": "from arrival to the first step that computes the request",
    "step_time_seconds": "one step of the engine",
    "prompt_length_tokens": "tokens of each prompt",
    "output_length_tokens": "tokens of each finished output",
}
_BEYOND_CATALOGUE = {
    "recomputed_tokens_total": "tokens computed again after preemption",
    "flops_total": "floating-point operations of all steps, counted",
    "bytes_total": "bytes of weights and KV cache moved by all steps, counted",
}
RANKS: Mapping[str, tuple[str, Callable[[RankTimes], float]]] = {
    "steps": ("steps of a rank", lambda times: times.steps),
    "compute_seconds": ("seconds that a rank computed", lambda times: times.compute_s),
    "wait_seconds": ("seconds that a rank spent in sums over all ranks", lambda times: times.wait_s),
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics:
    """`/metrics` of one engine process. Before the model is loaded it knows its name and age, and nothing else."""

    def __init__(self, model_name: str, version: str, config_hash: str, started_s: float) -> None:
        self._labels = ("model_name",)
        self._values = (model_name,)
        self._info = {"version": version, "config_hash": config_hash, "model_name": model_name}
        self._started_s = started_s
        self._stats: EngineStats | None = None
        self._now_s = started_s
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def watch(self, stats: EngineStats) -> None:
        """From now on, report these."""
        self._stats = stats

    def text(self, now_s: float) -> bytes:
        """The exposition at monotonic time `now_s`."""
        self._now_s = now_s
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("pairscope_engine_info", "which engine this is", labels=list(self._info))
        info.add_metric(list(self._info.values()), 1)
        yield info
        yield self._gauge("uptime_s", self._now_s - self._started_s)
        if self._stats is None:
            return
        stats = self._stats.snapshot()
        for families in (self._gauges, self._counters, self._ranks, self._stages, self._histograms):
            yield from families(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        occupancy = stats.occupancy
        last = recent(stats, self._now_s)
        values: dict[str, float | None] = {
            "up": 1,
            "requests_running": occupancy.running,
            "requests_waiting": occupancy.waiting,
            "kv_used_pct": occupancy.kv_used_pct,
            "kv_fragmentation_pct": occupancy.kv_fragmentation_pct,
            "kv_blocks_count": occupancy.blocks,
            "kv_blocks_free": occupancy.blocks - occupancy.blocks_taken,
            "kv_blocks_free_run": occupancy.free_run,
            "kv_blocks_cached": occupancy.blocks_cached,
            "kv_blocks_swapped": occupancy.blocks_swapped,
            "kv_slots_unused": occupancy.slots_unused,
            "context_mean": occupancy.context_mean,
            "step_mean_s": last.step_mean_s if last else None,
            "tokens_per_step": last.tokens_per_step if last else None,
            "mfu_pct": last.mfu_pct if last else None,
            "mbu_pct": last.mbu_pct if last else None,
            "mfu_prefill_pct": last.mfu_prefill_pct if last else None,
            "mbu_decode_pct": last.mbu_decode_pct if last else None,
            "prompt_len_max": prompt_len_max(stats, self._now_s),
            **self._speculation(stats),
            "stats_age_s": max(0.0, self._now_s - stats.beat_s),
        }
        for name, value in values.items():
            if value is not None:
                yield self._gauge(name, value)
        yield self._gauge("peak_flops_per_s", stats.peaks.flops_per_s, "FLOP/s reached in the probe at start")
        yield self._gauge("peak_bytes_per_s", stats.peaks.bytes_per_s, "memory bytes/s reached in the probe at start")

    def _speculation(self, stats: EngineStats) -> dict[str, float | None]:
        speculation = stats.speculation
        if speculation is None:
            return {}
        acceptance, draft_tokens = speculation.acceptance(self._now_s) or (None, None)
        return {
            "spec_on": int(speculation.on),
            "spec_speedup": speculation.speedup,
            "spec_acceptance_pct": acceptance,
            "spec_tokens_per_draft": draft_tokens,
        }

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        values = {field.name: getattr(stats.counters, field.name) for field in fields(Counters)}
        if stats.speculation is not None:
            values["spec_drafts_total"] = stats.speculation.drafts_total
            values["spec_drafted_total"] = stats.speculation.drafted_total
            values["spec_accepted_total"] = stats.speculation.accepted_total
        for name, value in values.items():
            title = _BEYOND_CATALOGUE.get(name) or ENGINE.fields[name].title_en
            family = CounterMetricFamily(f"pairscope_{name}", title, labels=self._labels)
            family.add_metric(self._values, value)
            yield family

    def _stages(self, stats: EngineStats) -> Iterator[Metric]:
        if stats.stage_seconds is None:
            return
        title = "time in each stage; tokenise runs beside the steps"
        family = CounterMetricFamily("pairscope_stage_seconds", title, labels=(*self._labels, "stage"))
        for stage in Stage:
            family.add_metric((*self._values, stage.label), stats.stage_seconds[stage])
        yield family

    def _ranks(self, stats: EngineStats) -> Iterator[Metric]:
        """One series a rank, of a model over several processes."""
        for name, (title, value) in RANKS.items():
            family = CounterMetricFamily(f"pairscope_rank_{name}", title, labels=(*self._labels, "rank"))
            for rank, times in enumerate(stats.ranks):
                family.add_metric((*self._values, str(rank)), value(times))
            if stats.ranks:
                yield family

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        for name, title in HISTOGRAMS.items():
            histogram: Histogram = getattr(stats, name.removesuffix("_seconds").removesuffix("_tokens"))
            bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            family = HistogramMetricFamily(f"pairscope_{name}", title, labels=self._labels)
            family.add_metric(self._values, buckets, histogram.sum)
            yield family

    def _gauge(self, name: str, value: float, title: str | None = None) -> Metric:
        family = GaugeMetricFamily(f"pairscope_{name}", title or ENGINE.fields[name].title_en, labels=self._labels)
        family.add_metric(self._values, value)
        return family
