"""Latest: the newest sample of each series, and its form as Prometheus text."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from telemetry.catalogue import MEASUREMENTS, Field, Kind
from telemetry.sample import Sample

SERIES_LIMIT = 20_000
STALE_AFTER_INTERVALS = 3
_NOT_SERIES = ("event", "verdict", "alert", "pair")

Key = tuple[str, tuple[tuple[str, str], ...]]


class LatestSamples:
    """Keeps samples for three intervals, by the monotonic clock; older ones are gone, not repeated."""

    def __init__(self, interval_s: float) -> None:
        self._keep_s = STALE_AFTER_INTERVALS * interval_s
        self._lock = threading.Lock()
        self._newest: dict[Key, tuple[float, Sample]] = {}

    def publish(self, samples: Iterable[Sample], monotonic_s: float) -> None:
        with self._lock:
            for sample in samples:
                if sample.measurement not in _NOT_SERIES:
                    key = (sample.measurement, tuple(sorted(sample.tags.items())))
                    if key in self._newest or len(self._newest) < SERIES_LIMIT:
                        self._newest[key] = (monotonic_s, sample)
            for key in [key for key, (then_s, _) in self._newest.items() if monotonic_s - then_s > self._keep_s]:
                del self._newest[key]

    def fresh(self, monotonic_s: float) -> list[Sample]:
        """The samples that are not stale at this moment, in a steady order."""
        with self._lock:
            entries = sorted(self._newest.items(), key=lambda item: item[0])
        return [sample for _, (then_s, sample) in entries if monotonic_s - then_s <= self._keep_s]


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
