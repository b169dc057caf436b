"""Which plots a report has: the pair, what the hardware did, and what the engine did, each from some minutes before the incident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dashboard.palette import LIGHT
from pairscope.report.content import Report, Told, named_gpu
from pairscope.report.svg import Line, Mark, Panel, Plot, Points, Rows, draw
from telemetry import catalogue
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.pairs import THROTTLE_REASONS
from telemetry.sample import Sample

SECOND = 10**9
BEFORE_NS = 600 * SECOND
AFTER_NS = 300 * SECOND
MOST_MARKS = 6
MARKED = ("deploy", "config", "restart", "xid", "oom", "gpu_lost", "gpu_fault", "bmc")
HOLDS_NS = 15 * SECOND
"""A throttle bit is taken to be set until the next reading, at most for this long."""

NAMED_GPUS = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plot as a file: a name without folder, what it shows in words, and the SVG."""

    name: str
    title: str
    svg: str


def plots_of(report: Report, language: str) -> dict[int, list[Drawn]]:
    """Place in `report.told` -> its plots: three of the first, the pair of the two after it, none of others."""
    found: dict[int, list[Drawn]] = {}
    for place, told in enumerate(report.told[:3]):
        kinds = ("pair", "hardware", "engine") if place == 0 else ("pair",)
        plots = [(kind, _plot(kind, told, report, language)) for kind in kinds]
        number = "" if place == 0 else f"-{place + 1}"
        found[place] = [
            Drawn(f"{kind}{number}.svg", printable(plot.title), draw(plot)) for kind, plot in plots if plot.panels
        ]
    return found


def _plot(kind: str, told: Told, report: Report, language: str) -> Plot:
    incident = told.incident
    until_ns = incident.until_ns
    panels = {"pair": _pair_panels, "hardware": _hardware_panels, "engine": _engine_panels}[kind](told, language)
    subject = told.worst.course.last.subject
    place = " / ".join(subject[tag] for tag in ("node", "engine") if subject.get(tag))
    first_ns = told.worst.course.moments[0].time_ns
    return Plot(
        title=say(f"report.plot.{kind}", language, place=place),
        describes=say(f"report.plot.{kind}_about", language),
        start_ns=max(first_ns, incident.since_ns - BEFORE_NS),
        end_ns=report.end_ns if until_ns is None else min(report.end_ns, until_ns + AFTER_NS),
        panels=tuple(panel for panel in panels if panel is not None),
        onset_ns=incident.since_ns,
        until_ns=until_ns,
        marks=_marks(told, language),
        note=" ".join(say(f"rules.present.{origin}", language) for origin in sorted(report.origins)),
        language=language,
    )


def _marks(told: Told, language: str) -> tuple[Mark, ...]:
    found: list[Mark] = []
    for sample in told.source.by_measurement.get("event", ()):
        kind = sample.tags.get("kind", "")
        if kind in MARKED and told.incident.since_ns - BEFORE_NS <= sample.time_ns:
            mark = Mark(sample.time_ns, say(f"dashboard.event.{kind}", language))
            if not any(abs(other.time_ns - mark.time_ns) < 20 * SECOND and other.text == mark.text for other in found):
                found.append(mark)
    return tuple(found[:MOST_MARKS])


def _pair_panels(told: Told, language: str) -> list[Panel | Rows | None]:
    moments = told.worst.course.moments
    output = [(m.time_ns, min(m.output_pct, 150.0)) for m in moments if m.output_pct is not None]
    util = [(m.time_ns, m.util_pct) for m in moments if m.util_pct is not None]
    expected = [(m.time_ns, m.expected_tokens_per_s) for m in moments if m.expected_tokens_per_s is not None]
    actual = [(m.time_ns, m.tokens_per_s) for m in moments if m.tokens_per_s is not None]
    line = LIGHT.line
    return [
        Panel(
            say("report.plot.both_sides", language),
            "%",
            (
                Line(say("report.plot.output", language), line["tokens"], output, width=2.4),
                Line(say(f"report.plot.util_{told.worst.spell.evidence.effort}", language), line["util"], util, "7 3"),
            ),
            0,
            100,
        ),
        _panel(
            "engine",
            "tokens_per_s",
            language,
            [
                Line(say("report.plot.actual", language), line["tokens"], actual, width=2.0),
                Line(say("report.plot.expected", language), line["limit"], expected, "7 3"),
            ],
        ),
    ]


def _hardware_panels(told: Told, language: str) -> list[Panel | Rows | None]:
    source, line = told.source, LIGHT.line
    limit = _field(source.by_measurement.get("gpu", []), "temp_limit_c", first_device=True)
    cap = _field(source.by_measurement.get("gpu", []), "power_limit_w", first_device=True)
    return [
        _panel("gpu", "sm_clock_mhz", language, _gpu_lines(told, "sm_clock_mhz", line["clock"], language)),
        _throttle(told, language),
        _panel(
            "gpu",
            "temp_c",
            language,
            [
                *_gpu_lines(told, "temp_c", line["temp"], language),
                Line(say("report.plot.limit", language), line["limit"], limit, "2 3"),
                Line(
                    say("report.plot.inlet", language),
                    line["inlet"],
                    _field(source.by_measurement.get("thermal", []), "inlet_c"),
                    "7 3",
                ),
            ],
            least=None,
        ),
        _panel(
            "gpu",
            "power_w",
            language,
            [
                *_gpu_lines(told, "power_w", line["kv"], language),
                Line(say("report.plot.limit", language), line["limit"], cap, "2 3"),
            ],
        ),
        None if source.by_measurement.get("gpu") else _cpu_panel(told, language),
    ]


def _cpu_panel(told: Told, language: str) -> Panel | None:
    host = told.source.by_measurement.get("host", [])
    lines = [
        Line(catalogue.title("host", name, language), LIGHT.line[role], _field(host, name), dash)
        for name, role, dash in (("cpu_pct", "util", ""), ("cpu_core_max_pct", "clock", "7 3"))
    ]
    return _panel("host", "cpu_pct", language, lines, most=100)


def _engine_panels(told: Told, language: str) -> list[Panel | Rows | None]:
    engine, line = told.source.by_measurement.get("engine", []), LIGHT.line

    def one(name: str, role: str, dash: str = "") -> Line:
        return Line(catalogue.title("engine", name, language), line[role], _field(engine, name), dash)

    requests = [one("requests_running", "tokens"), one("requests_waiting", "temp", "7 3")]
    return [
        _panel("engine", "requests_running", language, requests, title=say("report.plot.requests", language)),
        _panel("engine", "kv_used_pct", language, [one("kv_used_pct", "kv")], most=100),
        _panel("engine", "itl_mean_s", language, [one("itl_mean_s", "clock")]),
        _panel("engine", "ttft_p95_s", language, [one("ttft_p95_s", "util")]),
    ]


def _panel(
    measurement: str,
    name: str,
    language: str,
    lines: list[Line],
    *,
    least: float | None = 0.0,
    most: float | None = None,
    title: str = "",
) -> Panel | None:
    """None where nothing of it was read."""
    shown = tuple(line for line in lines if line.points)
    if not shown:
        return None
    return Panel(title or catalogue.title(measurement, name, language), catalogue.unit_of(name), shown, least, most)


def _field(samples: list[Sample], name: str, *, first_device: bool = False) -> Points:
    found = []
    device: Mapping[str, str] | None = None
    for sample in samples:
        value = sample.fields.get(name)
        if not isinstance(value, int | float):
            continue
        device = device or sample.tags
        if not first_device or sample.tags == device:
            found.append((sample.time_ns, float(value)))
    return found


def _gpu_lines(told: Told, name: str, colour: str, language: str) -> list[Line]:
    """Each GPU of the pair; the one that the incident is about is drawn strong, the others thin, and all alike where it names none."""
    by_gpu: dict[str, list[tuple[int, float]]] = {}
    for sample in told.source.by_measurement.get("gpu", ()):
        value = sample.fields.get(name)
        if isinstance(value, int | float):
            by_gpu.setdefault(sample.tags.get("gpu", ""), []).append((sample.time_ns, float(value)))
    named = named_gpu(told)
    lines = []
    for index, points in sorted(by_gpu.items()):
        strong = named is None or index == named
        shown = strong or len(by_gpu) <= NAMED_GPUS
        label = say("report.plot.gpu", language, index=index[:12]) if shown and (strong or named) else ""
        lines.append(Line(label, colour, points, "" if strong else "3 2", 2.0 if strong else 1.1))
    if named is None and len(lines) > NAMED_GPUS:
        first = lines[0]
        rest = [Line("", line.colour, line.points, line.dash, 1.1) for line in lines[1:]]
        return [Line(say("report.plot.each_gpu", language, count=len(lines)), colour, first.points, "", 1.1), *rest]
    return lines


def _throttle(told: Told, language: str) -> Rows | None:
    """When each throttle reason was set on any GPU of the pair; reasons that never were have no row."""
    rows = []
    for (bit, name), colour in zip(THROTTLE_REASONS[:5], LIGHT.reasons, strict=False):
        spans = _spans(told.source.by_measurement.get("gpu", []), bit)
        if spans:
            rows.append((say(f"dashboard.reason.{name}", language), colour, tuple(spans)))
    return Rows(say("report.plot.throttle", language), tuple(rows)) if rows else None


def _spans(samples: list[Sample], bit: int) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    last_of: dict[str, tuple[int, bool]] = {}
    for sample in samples:
        mask = sample.fields.get("throttle_reasons")
        if not isinstance(mask, int | float):
            continue
        device = sample.tags.get("gpu", "")
        before = last_of.get(device)
        if before is not None and before[1]:
            spans.append((before[0], min(sample.time_ns, before[0] + HOLDS_NS)))
        last_of[device] = (sample.time_ns, bool(int(mask) & bit))
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
