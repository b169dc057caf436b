"""Latest: the newest sample of each series, and its form as Prometheus text."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace

from telemetry.catalogue import MEASUREMENTS, Field, Kind
from telemetry.sample import Sample, Value

SERIES_LIMIT = 20_000
STALE_AFTER_INTERVALS = 3
_NOT_SERIES = ("event", "verdict", "alert", "pair")

Key = tuple[str, tuple[tuple[str, str], ...]]


class LatestSamples:
    """Keeps samples for three intervals, by the monotonic clock; older ones are gone, not repeated.

    `slow` names the fields, by measurement, that are not in every sample of a series, and for how many seconds the last value of
    each stands: it is shown with the newest sample, unless a `state` since then says that the device is out. `slow_measurements`
    names those that come as a whole less often than once a tick, and for how many seconds a sample of theirs stands; `slow_sources`
    does so for the sources (a sample's field `source`) that speak of a measurement which others read at every tick, and `slow_kinds`
    for engines (a sample's tag `kind`) that are asked for their metrics less often: what they told stands until then, beside its age
    in `stats_age_s`, unless `up` since then says that they don't answer.
    """

    def __init__(
        self,
        interval_s: float,
        slow: Mapping[str, Mapping[str, float]] | None = None,
        slow_measurements: Mapping[str, float] | None = None,
        slow_sources: Mapping[str, float] | None = None,
        slow_kinds: Mapping[str, float] | None = None,
    ) -> None:
        self._keep_s = STALE_AFTER_INTERVALS * interval_s
        self._slow = slow or {}
        self._slow_measurements = slow_measurements or {}
        self._slow_sources = slow_sources or {}
        self._slow_kinds = slow_kinds or {}
        self._held: dict[Key, dict[str, tuple[float, Value]]] = {}  # until when each stands
        self._lock = threading.Lock()
        self._newest: dict[Key, tuple[float, Sample]] = {}

    def keep(
        self, interval_s: float, slow: Mapping[str, Mapping[str, float]], slow_measurements: Mapping[str, float]
    ) -> None:
        """Go on with another interval, other slow fields and other slow measurements."""
        with self._lock:
            self._keep_s = STALE_AFTER_INTERVALS * interval_s
            self._slow = slow
            self._slow_measurements = slow_measurements

    def publish(self, samples: Iterable[Sample], monotonic_s: float) -> None:
        with self._lock:
            for sample in samples:
                if sample.measurement not in _NOT_SERIES:
                    key = (sample.measurement, tuple(sorted(sample.tags.items())))
                    if key in self._newest or len(self._newest) < SERIES_LIMIT:
                        self._newest[key] = (monotonic_s, sample)
                        self._hold(key, sample, monotonic_s)
            for key in [key for key, entry in self._newest.items() if self._is_stale(*entry, monotonic_s)]:
                del self._newest[key]
                self._held.pop(key, None)

    def fresh(self, monotonic_s: float) -> list[Sample]:
        """The samples that are not stale at this moment, in a steady order."""
        with self._lock:
            entries = sorted(self._newest.items(), key=lambda item: item[0])
            return [
                self._with_held(key, sample, monotonic_s)
                for key, (then_s, sample) in entries
                if not self._is_stale(then_s, sample, monotonic_s)
            ]

    def _is_stale(self, then_s: float, sample: Sample, now_s: float) -> bool:
        by_measurement_s = self._slow_measurements.get(sample.measurement, 0.0)
        by_source_s = self._slow_sources.get(str(sample.fields.get("source", "")), 0.0)
        return now_s - then_s > max(self._keep_s, by_measurement_s, by_source_s)

    def _hold(self, key: Key, sample: Sample, monotonic_s: float) -> None:
        if sample.fields.get("state", 0) != 0:
            self._held.pop(key, None)
        if sample.fields.get("up", 1) == 0 and key in self._held:
            # its processes are looked at whether it answers or not
            self._held[key] = {name: held for name, held in self._held[key].items() if name.startswith("proc_")}
        if sample.fields.get("probe_ok") == 0:
            self._held.get(key, {}).pop("probe_s", None)  # how long the last good one took
        slow = self._slow.get(sample.measurement, {})
        of_kind_s = self._slow_kinds.get(sample.tags.get("kind", ""), 0.0) if sample.measurement == "engine" else 0.0
        for name, value in sample.fields.items():
            stands_s = slow.get(name, of_kind_s)
            if stands_s:
                self._held.setdefault(key, {})[name] = (monotonic_s + stands_s, value)

    def _with_held(self, key: Key, sample: Sample, monotonic_s: float) -> Sample:
        held = self._held.get(key)
        if not held:
            return sample
        standing = {name: value for name, (until_s, value) in held.items() if monotonic_s <= until_s}
        return replace(sample, fields={**standing, **sample.fields})


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Text format 0.0.4: `pairscope_<measurement>_<field>` with the sample's tags as labels, HELP from the catalogue and TYPE.

    Text fields become labels of one `pairscope_<measurement>_info` series that is 1.
    """
    lines: dict[str, list[str]] = {}
    heads: dict[str, str] = {}
    for sample in samples:
        texts = {name: value for name, value in sample.fields.items() if isinstance(value, str)}
        if texts:
            metric = f"pairscope_{sample.measurement}_info"
            heads.setdefault(metric, _head(metric, f"{sample.measurement}: what it says of itself", "gauge"))
            lines.setdefault(metric, []).append(f"{metric}{_labels({**sample.tags, **texts})} 1")
        for name, value in sample.fields.items():
            if isinstance(value, str):
                continue
            metric = f"pairscope_{sample.measurement}_{name}"
            field = MEASUREMENTS[sample.measurement].fields[name]
            heads.setdefault(metric, _head(metric, f"{sample.measurement}: {field.title_en}", _type(field)))
            lines.setdefault(metric, []).append(f"{metric}{_labels(sample.tags)} {value!r}")
    return "".join(f"{heads[metric]}{chr(10).join(series)}\n" for metric, series in lines.items())


def _type(field: Field) -> str:
    return "counter" if field.kind is Kind.COUNTER else "gauge"


def _head(metric: str, text: str, type_: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {metric} {escaped}\n# TYPE {metric} {type_}\n"


def _labels(tags: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(tags.items()))
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
