"""How verdicts are kept in the store: the numbers every half minute, the text only when it says something new.

Each text of evidence differs from the one before in some figure, and a distinct text is dear: a series of its own in one store, a few
kilobytes of bulk in the others. So a verdict's sample carries `confidence` and `loss_pct` each time, and `summary` and `evidence` when
the judgement has changed, when its figures have moved materially, or when the last text is old: two minutes while a cause stands, for
then somebody reads it, and a quarter of an hour while nothing is wrong. Whoever reads a verdict takes the newest text of its series:
`text_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rules.verdict import Diagnosis, to_sample
from rules.window import SECOND
from telemetry.sample import Sample
from telemetry.store import Store

NUMBERS_EVERY_S = 30.0
TEXT_AT_LEAST_EVERY_S = 900.0
TEXT_OF_A_CAUSE_EVERY_S = 120.0
TEXT_AT_MOST_EVERY_S = 60.0
"""Between texts that tell the same causes; another cause is told at once."""
MATERIAL_POINTS = 10.0
"""Confidence (0..100), loss and output, in percentage points: by so much a figure must have moved to be worth a text."""
MATERIAL_LOSS_POINTS = 5.0
"""The loss under a cause stands in the headline beside a number that is newer."""
LATE_S = 60.0
"""The text of a verdict may be so much older than its quarter of an hour: a store was away for a while."""

TEXTS = ("summary", "evidence")


@dataclass(frozen=True, slots=True)
class _Told:
    """What was last written of a pair. `text_ns` is the time of the last sample with a text, `figures` what stood in it."""

    at_ns: int
    text_ns: int
    causes: object
    shape: object
    figures: tuple[float | None, ...]


class VerdictRecord:
    """What was written of each pair; `samples` says what is to be written now."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def samples(self, diagnoses: Iterable[Diagnosis]) -> Iterator[Sample]:
        for diagnosis in diagnoses:
            key = "\x1f".join(f"{name}={value}" for name, value in sorted(diagnosis.subject.items()))
            before = self._told.get(key)
            if before is None or _is_news(before, diagnosis):
                causes, shape, figures = _causes(diagnosis), _shape(diagnosis), _figures(diagnosis)
                self._told[key] = _Told(diagnosis.at_ns, diagnosis.at_ns, causes, shape, figures)
                yield to_sample(diagnosis)
            elif diagnosis.at_ns - before.at_ns >= NUMBERS_EVERY_S * SECOND:
                self._told[key] = _Told(diagnosis.at_ns, before.text_ns, before.causes, before.shape, before.figures)
                yield without_text(to_sample(diagnosis))


def without_text(sample: Sample) -> Sample:
    fields = {name: value for name, value in sample.fields.items() if name not in TEXTS}
    return Sample(sample.measurement, sample.tags, fields, sample.time_ns)


def text_of(store: Store, verdict: Sample) -> Sample | None:
    """The newest sample of a verdict's series, up to itself, that carries its evidence; None when there is none.

    StoreError as the store raises it.
    """
    if "evidence" in verdict.fields:
        return verdict
    back_ns = int((TEXT_AT_LEAST_EVERY_S + LATE_S) * SECOND)
    told = store.samples(
        "verdict", start_ns=verdict.time_ns - back_ns, end_ns=verdict.time_ns + 1, where=dict(verdict.tags)
    )
    return next((s for s in reversed(told) if "evidence" in s.fields and dict(s.tags) == dict(verdict.tags)), None)


def _is_news(before: _Told, diagnosis: Diagnosis) -> bool:
    age_s = (diagnosis.at_ns - before.text_ns) / SECOND
    most_s = TEXT_OF_A_CAUSE_EVERY_S if diagnosis.verdicts else TEXT_AT_LEAST_EVERY_S
    if age_s >= most_s or age_s < 0 or before.causes != _causes(diagnosis):
        return True
    if age_s < TEXT_AT_MOST_EVERY_S:
        return False
    return before.shape != _shape(diagnosis) or _have_moved(before.figures, _figures(diagnosis))


def _causes(diagnosis: Diagnosis) -> object:
    """What a person must be told of at once: the causes, where they are, and the kind of headline."""
    found = tuple((v.cause, v.scope, tuple(sorted(v.subject.items()))) for v in diagnosis.verdicts)
    return found, diagnosis.headline.key


def _shape(diagnosis: Diagnosis) -> object:
    return tuple(report.status for report in diagnosis.steps)


def _figures(diagnosis: Diagnosis) -> tuple[float | None, ...]:
    """In material steps: a figure that moved by one is worth a text."""
    plain = (diagnosis.output_pct, diagnosis.util_pct, *(100 * v.confidence for v in diagnosis.verdicts))
    losses = tuple(v.loss_pct for v in diagnosis.verdicts)
    return (
        *(None if points is None else points / MATERIAL_POINTS for points in plain),
        *(None if points is None else points / MATERIAL_LOSS_POINTS for points in losses),
    )


def _have_moved(before: tuple[float | None, ...], now: tuple[float | None, ...]) -> bool:
    return len(before) != len(now) or any(
        (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) >= 1)
        for a, b in zip(before, now, strict=False)
    )
