"""What a judgement is: the walk over the ordered steps, the verdicts it earns, and their form in JSON and in the store.

Everything here is data. A sentence is kept as its key and values, so that one verdict reads in every language.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rules.evidence import Evidence
from telemetry.catalogue import title
from telemetry.messages import say
from telemetry.sample import Sample


class Status(StrEnum):
    """What a step can say. No data is not ruled out, and not looking is neither."""

    CONFIRMED = "confirmed"
    SYMPTOM = "symptom"  # abnormal, but follows the cause and does not lead it
    RULED_OUT = "ruled_out"
    NO_DATA = "no_data"


class Cause(StrEnum):
    TELEMETRY = "telemetry"
    DEMAND = "demand"
    THERMAL = "thermal"
    POWER = "power"
    GPU_FAULT = "gpu_fault"
    PCIE_LINK = "pcie_link"
    MEMORY_KV = "memory_kv"
    REQUEST_MIX = "request_mix"
    SCHEDULING = "scheduling"
    HOST_CPU = "host_cpu"
    CONTENTION = "contention"
    NETWORK = "network"
    SOFTWARE = "software"
    COLD_START = "cold_start"
    STORAGE = "storage"
    NONE = "none"


class Step(StrEnum):
    """The fixed order, hardware to software. The values are the JSON `step` numbers."""

    VALIDITY = "0"
    PHYSICAL = "1"
    MEMORY = "2"
    REQUESTS = "3"
    SCHEDULING = "4"
    SOFTWARE = "5"


class Cost(StrEnum):
    """Cost class of a fix, cheapest first."""

    SOFTWARE_CHEAP = "software_cheap"
    OPERATIONS_CHEAP = "operations_cheap"
    HARDWARE_COSTLY = "hardware_costly"


Number = float | int | str


UNNAMED = "?"
"""Stands for the name of a GPU or an engine that is not told."""


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence of evidence: a message key, the numbers that fill it, and the field the numbers came from.

    `lane` names the field (`gpu.temp_c`) whose lane a reader can look at; empty when there is none.
    """

    key: str
    values: Mapping[str, Number] = field(default_factory=dict)
    lane: str = ""

    def text(self, language: str = "en") -> str:
        """The sentence, with a cause among its values in the words of the language, and a GPU that nobody named as one of them."""
        cause = self.values.get("cause")
        named = {"cause": say(f"rules.cause.{cause}", language)} if cause in list(Cause) else {}
        if "what" in self.values:
            named["what"] = _title_of(str(self.values["what"]), language)
        told = say(self.key, language, **{**self.values, **named})
        if UNNAMED in (self.values.get(name) for name in ("gpu", "gpus", "subject")):
            return told.replace(f"GPU {UNNAMED}", say("rules.present.some_gpu", language))
        return told


def _title_of(lane: str, language: str) -> str:
    measurement, _, name = lane.partition(".")
    try:
        return title(measurement, name, language)
    except KeyError:
        return lane


@dataclass(frozen=True, slots=True)
class Fix:
    key: str
    cost: Cost
    values: Mapping[str, Number] = field(default_factory=dict)

    def text(self, language: str = "en") -> str:
        return say(self.key, language, **self.values)


NOT_KNOWN = "rules.evidence.not_known"
"""The line that begins what a step says of a cause without data beside those that it rules out."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step of the walk found, with the paired numbers that say so."""

    step: Step
    status: Status
    evidence: tuple[Line, ...] = ()
    prior: float = 0.0  # 0..1, the configured weight of this step
    posterior: float = 0.0  # 0..1, after the evidence

    def told_as(self, status: Status) -> tuple[Line, ...]:
        """The lines that say this of it: a step that rules out some causes may have had no data of others, and says so below."""
        if self.status is not Status.RULED_OUT:
            return self.evidence if self.status is status else ()
        at = next((place for place, entry in enumerate(self.evidence) if entry.key == NOT_KNOWN), len(self.evidence))
        return {Status.RULED_OUT: self.evidence[:at], Status.NO_DATA: self.evidence[at:]}.get(status, ())


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause, earned by evidence."""

    cause: Cause
    step: Step
    confidence: float  # 0..1
    loss_pct: float | None  # of expected output lost, 0..100; None when nothing could be compared
    scope: str  # gpu, engine, node, rack, circuit, cluster
    subject: Mapping[str, str]  # the tags that name it: node, engine, gpu, rack ...
    since_ns: int | None
    evidence: tuple[Line, ...]
    fixes: tuple[Fix, ...]  # cheapest first
    summary: Line
    loss_tokens_per_s: float | None = None  # expected minus actual, >= 0; None when either is not known
    gpus: tuple[str, ...] = ()  # of the pair, by index, where it is about some of them


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The whole judgement of one pair (an engine with its GPUs, or a node) at one moment.

    `verdicts` is most likely first, and empty when nothing is wrong; `steps` always holds all six, in order.
    """

    subject: Mapping[str, str]
    at_ns: int
    steps: tuple[StepReport, ...]
    verdicts: tuple[Verdict, ...]
    headline: Line  # one sentence for the top of the page, also when nothing is wrong
    output_pct: float | None = None
    util_pct: float | None = None
    expected_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    simulated: bool = False
    unknown: frozenset[Cause] = field(default=frozenset(), compare=False)
    """Causes that had no data at this moment; of this moment only, so it is not written."""
    seen: Evidence | None = field(default=None, compare=False, repr=False)
    """What it was judged by, likewise."""


def verdict_json(diagnosis: Diagnosis, language: str = "en") -> list[dict[str, object]]:
    """The documented JSON list, most likely first; empty when nothing is wrong."""
    ruled_out, no_data = (
        [
            {"step": int(report.step), "because": [line.text(language) for line in report.told_as(status)]}
            for report in diagnosis.steps
            if report.status is status or report.told_as(status)
        ]
        for status in (Status.RULED_OUT, Status.NO_DATA)
    )
    return [
        {
            "cause": str(verdict.cause),
            "step": int(verdict.step),
            "confidence": round(verdict.confidence, 3),
            "loss_pct": None if verdict.loss_pct is None else round(verdict.loss_pct, 1),
            "loss_tokens_per_s": None if verdict.loss_tokens_per_s is None else round(verdict.loss_tokens_per_s, 1),
            "scope": verdict.scope,
            "subject": dict(verdict.subject),
            "gpus": list(verdict.gpus),
            "since_ns": verdict.since_ns,
            "summary": verdict.summary.text(language),
            "evidence": [{"text": line.text(language), "lane": line.lane, **line.values} for line in verdict.evidence],
            "ruled_out": ruled_out,
            "no_data": no_data,
            "fix": [{"cost": str(fix.cost), "text": fix.text(language)} for fix in verdict.fixes],
            "simulated": diagnosis.simulated,
        }
        for verdict in diagnosis.verdicts
    ]


def to_sample(diagnosis: Diagnosis) -> Sample:
    """The `verdict` sample that carries the whole diagnosis; `from_sample` is its inverse."""
    top = diagnosis.verdicts[0] if diagnosis.verdicts else None
    tags = dict(diagnosis.subject)
    tags["scope"] = top.scope if top else ("engine" if "engine" in tags else "node")
    tags["cause"] = str(top.cause if top else Cause.NONE)
    fields: dict[str, float | int | str] = {
        "confidence": float(top.confidence) if top else 0.0,
        "summary": diagnosis.headline.text("en"),
        "evidence": json.dumps(_plain(diagnosis), ensure_ascii=False, separators=(",", ":")),
    }
    if top is not None and top.loss_pct is not None:
        fields["loss_pct"] = float(top.loss_pct)
    if top is not None and top.loss_tokens_per_s is not None:
        fields["loss_tokens_per_s"] = float(top.loss_tokens_per_s)
    return Sample("verdict", tags, fields, diagnosis.at_ns)


def from_sample(sample: Sample) -> Diagnosis:
    """The diagnosis a `verdict` sample carries. ValueError if the sample holds none or was made by another version."""
    try:
        plain = json.loads(str(sample.fields["evidence"]))
        return _diagnosis(plain)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"verdict sample of {dict(sample.tags)} can't be read: {error}") from error


def _line(line: Line) -> list[object]:
    return [line.key, dict(line.values), line.lane]


def _plain(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "subject": dict(diagnosis.subject),
        "at_ns": diagnosis.at_ns,
        "headline": _line(diagnosis.headline),
        "numbers": [
            diagnosis.output_pct,
            diagnosis.util_pct,
            diagnosis.expected_tokens_per_s,
            diagnosis.tokens_per_s,
        ],
        "simulated": diagnosis.simulated,
        "steps": [
            [str(s.step), str(s.status), [_line(line) for line in s.evidence], s.prior, s.posterior]
            for s in diagnosis.steps
        ],
        "verdicts": [
            {
                "cause": str(v.cause),
                "step": str(v.step),
                "confidence": v.confidence,
                "loss_pct": v.loss_pct,
                "scope": v.scope,
                "subject": dict(v.subject),
                "since_ns": v.since_ns,
                "evidence": [_line(line) for line in v.evidence],
                "fixes": [[fix.key, str(fix.cost), dict(fix.values)] for fix in v.fixes],
                "summary": _line(v.summary),
                "loss_tokens_per_s": v.loss_tokens_per_s,
                "gpus": list(v.gpus),
            }
            for v in diagnosis.verdicts
        ],
    }


def _lines(plain: Sequence[Sequence[object]]) -> tuple[Line, ...]:
    return tuple(_to_line(entry) for entry in plain)


def _to_line(plain: Sequence[object]) -> Line:
    key, values, lane = plain
    if not isinstance(values, dict):
        raise ValueError("a line's values are not an object")
    return Line(str(key), values, str(lane))


def _diagnosis(plain: Mapping[str, object]) -> Diagnosis:
    # the shapes are ours; a wrong one surfaces as KeyError, TypeError or ValueError and is named by from_sample
    data: dict[str, object] = dict(plain)
    numbers: list[float | None] = list(data["numbers"])  # type: ignore[call-overload]
    steps = tuple(
        StepReport(Step(step), Status(status), _lines(evidence), float(prior), float(posterior))
        for step, status, evidence, prior, posterior in data["steps"]  # type: ignore[attr-defined]
    )
    verdicts = tuple(
        Verdict(
            Cause(v["cause"]),
            Step(v["step"]),
            float(v["confidence"]),
            v["loss_pct"],
            v["scope"],
            v["subject"],
            v["since_ns"],
            _lines(v["evidence"]),
            tuple(Fix(key, Cost(cost), values) for key, cost, values in v["fixes"]),
            _to_line(v["summary"]),
            v.get("loss_tokens_per_s"),  # one that was written before there was this number has none
            tuple(str(index) for index in v.get("gpus", ())),
        )
        for v in data["verdicts"]  # type: ignore[attr-defined]
    )
    return Diagnosis(
        subject=dict(data["subject"]),  # type: ignore[call-overload]
        at_ns=int(data["at_ns"]),  # type: ignore[call-overload]
        steps=steps,
        verdicts=verdicts,
        headline=_to_line(data["headline"]),  # type: ignore[arg-type]
        output_pct=numbers[0],
        util_pct=numbers[1],
        expected_tokens_per_s=numbers[2],
        tokens_per_s=numbers[3],
        simulated=bool(data["simulated"]),
    )
