"""The report as Markdown. Whatever came out of samples is escaped: it is shown as text and is neither markup, link nor HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence

from pairscope import __version__
from pairscope.report.content import Report, Told, commands_of
from pairscope.report.paired import Row
from pairscope.report.plots import Drawn
from pairscope.report.wording import NONE, clock, duration, moment, money, number, place, quantity, short_place
from rules.course import Incident
from rules.verdict import Status
from telemetry.lineprotocol import printable
from telemetry.messages import say

MOST_OTHERS = 20
_MARKUP = re.compile(r"([\\`*_\[\]|~$])")
_LINKS = re.compile(r"(?i)\b(https?|ftp|mailto|javascript|data|xmpp)(:)|(www)(\.)|(@)")
_AT_START = re.compile(r"^()(#|[-+=](?=[-+=\s]|$)|\d+(?=[.)](?:\s|$)))")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def plain(text: str) -> str:
    """`text` as Markdown that shows just it: no markup, no HTML, no link, not even one that viewers make of bare addresses."""
    text = " ".join(printable(text).split())
    text = re.sub(r"[&<>]", lambda found: _HTML[found[0]], text)
    text = _MARKUP.sub(r"\\\1", text)
    text = _LINKS.sub(lambda found: f"{found[1] or found[3] or ''}{_entity(found[2] or found[4] or found[5])}", text)
    return _AT_START.sub(lambda found: f"{found[1]}{_entity(found[2][0])}{found[2][1:]}", text)


def _entity(letter: str) -> str:
    return f"&#{ord(letter)};"


def markdown(report: Report, plots: Mapping[int, Sequence[Drawn]], language: str, *, inside: bool = False) -> str:
    """The whole text. Plots are named as files beside it, or stand in it as data URIs when `inside`."""
    lines = [f"# {plain(title_of(report, language))}", "", *_not_live(report, language)]
    if not report.incidents:
        nothing = say("report.text.nothing", language, start=moment(report.from_ns), end=moment(report.end_ns))
        lines += [plain(nothing), ""]
    if len(report.incidents) > 1:
        lines += _overview(report, language)
    for place_, told in enumerate(report.told):
        lines += _incident(report, told, place_, plots.get(place_, ()), language, inside)
    lines += _others(report, language)
    lines += _foot(report, language)
    return "\n".join(lines) + "\n"


def title_of(report: Report, language: str) -> str:
    if not report.incidents:
        return say("report.title.nothing", language)
    if len(report.incidents) > 1:
        return say("report.title.several", language, count=len(report.incidents))
    first = report.incidents[0]
    return say("report.title.incident", language, cause=_cause(first, language), place=_place(first, language))


def _cause(incident: Incident, language: str) -> str:
    return say(f"rules.cause.{incident.cause}", language)


def _place(incident: Incident, language: str) -> str:
    return place(incident.scope, incident.subject, language)


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of cells that are texts; a blank line after it."""
    titles = [plain(cell) for cell in head]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    lines += [f"| {' | '.join(plain(cell) for cell in row)} |" for row in rows]
    return [*lines, ""]


def _heads(names: str, language: str) -> list[str]:
    return [say(f"report.head.{name}", language) for name in names.split()]


def _not_live(report: Report, language: str) -> list[str]:
    if not report.origins:
        return []
    return [*(f"> **{plain(say(f'report.foot.{origin}', language))}**" for origin in sorted(report.origins)), ""]


def _overview(report: Report, language: str) -> list[str]:
    rows = []
    for number_, incident in enumerate(report.incidents, 1):
        until = say("report.head.still", language) if incident.until_ns is None else clock(incident.until_ns)
        rows.append(
            (
                str(number_),
                _cause(incident, language),
                _place(incident, language),
                f"{incident.verdict.confidence:.2f}",
                clock(incident.since_ns),
                until,
                number(incident.lost.tokens),
            )
        )
    lines = [f"## {plain(say('report.title.overview', language))}", ""]
    lines += table(_heads("number cause place confidence since until lost", language), rows)
    if len(report.incidents) > len(report.told):
        more = say("report.text.not_told", language, count=len(report.incidents) - len(report.told))
        lines += [plain(more), ""]
    return lines


def _incident(
    report: Report, told: Told, place_: int, plots: Sequence[Drawn], language: str, inside: bool
) -> list[str]:
    incident = told.incident
    lines = []
    if len(report.incidents) > 1:
        head = say(
            "report.title.one",
            language,
            number=place_ + 1,
            cause=_cause(incident, language),
            place=_place(incident, language),
        )
        lines += [f"## {plain(head)}", ""]
    lines += _section("happened", _happened(report, told, language), language)
    lines += _section("paired", _paired(told, language), language)
    for plot in plots:
        lines += [_image(plot, inside), ""]
    if len(incident.struck) > 1:
        lines += _section("pairs", _pairs(told, language), language)
    evidence = [f"- {plain(line.text(language))}" for line in incident.verdict.evidence]
    if told.straggler is not None:
        evidence.append(f"- {plain(told.straggler.text(language))}")
    if told.coupling is not None:
        evidence.append(f"- {plain(told.coupling.text(language))}")
    lines += _section("evidence", evidence, language)
    lines += _section("ruled_out", _steps(told, Status.RULED_OUT, "no_ruled_out", language), language)
    lines += _section("no_data", _steps(told, Status.NO_DATA, "all_data", language), language)
    lines += _section("competing", _competing(told, language), language)
    lines += _section("timeline", _timeline(told, language), language)
    lines += _section("cost", _cost(report, told, language), language)
    fixes = [
        f"{number_}. {plain(fix.text(language))} ({plain(say(f'rules.cost.{fix.cost}', language))})"
        for number_, fix in enumerate(told.fixes, 1)
    ]
    lines += _section("fixes", fixes, language)
    return lines + _section("check", _check(report, told, language), language)


def _section(name: str, lines: Sequence[str], language: str) -> list[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    return [f"### {plain(say(f'report.title.{name}', language))}", "", *lines, ""] if lines else []


def _happened(report: Report, told: Told, language: str) -> list[str]:
    incident, verdict = told.incident, told.incident.verdict
    until_ns = report.end_ns if incident.until_ns is None else incident.until_ns
    lasted = duration((until_ns - incident.since_ns) / 1e9, language)
    times = {"since": moment(incident.since_ns), "lasted": lasted, "end": moment(report.end_ns)}
    key = "report.text.since" if incident.until_ns is None else "report.text.over"
    if incident.until_ns is not None:
        times["until"] = moment(until_ns)
    said = say(
        "report.text.verdict",
        language,
        cause=_cause(incident, language),
        step=int(verdict.step),
        step_name=say(f"rules.step.{verdict.step}", language),
        confidence=verdict.confidence,
        scope=_place(incident, language),
    )
    return [
        f"**{plain(verdict.summary.text(language))}**",
        "",
        plain(said),
        "",
        plain(say(key, language, **times)),
    ]


def _paired(told: Told, language: str) -> list[str]:
    rows = []
    for row in told.rows:
        limit = ""
        if row.expected is not None:
            key = "report.row.limit" if row.is_limit else "report.row.expected"
            limit = say(key, language, value=number(row.expected))
        rows.append(
            (
                say(f"report.side.{row.side}", language),
                quantity(row, told.worst.gpus, language),
                row.unit,
                number(row.before),
                number(row.during),
                _change(row),
                limit,
            )
        )
    if not rows:
        return []
    lines = table(_heads("side quantity unit before during change expected", language), rows)
    return [*lines, plain(f"{short_place(told.worst.course.last.subject)}. {say('report.text.medians', language)}")]


def _change(row: Row) -> str:
    change = row.change_pct
    if change is None:
        return NONE
    return f"{change:+.0f} %" if change < 300 else f"× {1 + change / 100:.0f}"


def _image(plot: Drawn, inside: bool) -> str:
    if not inside:
        return f"![{plain(plot.title)}]({plot.name})"
    packed = base64.b64encode(plot.svg.encode("utf-8")).decode("ascii")
    # as HTML: viewers of Markdown take data URIs of SVG in an image tag only
    title = re.sub(r'[&<>"`]', lambda found: _entity(found[0]), plot.title)
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{packed}">'


def _pairs(told: Told, language: str) -> list[str]:
    rows = []
    for struck in told.incident.struck:
        seen = struck.spell.diagnosis
        lost = struck.spell.verdict.loss_tokens_per_s
        rows.append(
            (
                short_place(struck.course.last.subject),
                number(seen.output_pct),
                number(seen.tokens_per_s),
                number(seen.expected_tokens_per_s),
                number(lost),
                number(struck.lost.tokens),
            )
        )
    return table(_heads("pair output tokens expected lost_rate lost", language), rows[:MOST_OTHERS])


def _steps(told: Told, status: Status, none: str, language: str) -> list[str]:
    lines = []
    for report in told.steps:
        if report.status is status or report.told_as(status):
            lines.append(f"- **{int(report.step)} {plain(say(f'rules.step.{report.step}', language))}**")
            lines += [f"    - {plain(line.text(language))}" for line in report.told_as(status)]
    return lines or [plain(say(f"report.text.{none}", language))]


def _competing(told: Told, language: str) -> list[str]:
    lines = []
    for verdict in told.competing:
        said = say(
            "report.text.competes",
            language,
            cause=say(f"rules.cause.{verdict.cause}", language),
            confidence=verdict.confidence,
            summary=verdict.summary.text(language),
        )
        lines.append(f"- {plain(said)}")
    for step in told.steps:
        if step.status is Status.SYMPTOM:
            why = "; ".join(line.text(language) for line in step.evidence)
            said = say("report.text.follows", language, step=say(f"rules.step.{step.step}", language), why=why)
            lines.append(f"- {plain(said)}")
    return lines or [plain(say("report.text.no_competing", language))]


def _timeline(told: Told, language: str) -> list[str]:
    lines = table(
        _heads("time what", language), ((clock(entry.time_ns), entry.what.text(language)) for entry in told.timeline)
    )
    if told.left_out:
        lines.append(plain(say("report.text.left_out", language, count=told.left_out)))
    return lines


def _cost(report: Report, told: Told, language: str) -> list[str]:
    cost, settings = told.cost, report.settings
    if cost.tokens is None and cost.tokens_per_s is None:
        return [plain(say("report.cost.not_known", language))]
    rows = [("rate", number(cost.tokens_per_s, "tokens/s")), ("share", number(cost.loss_pct, "%"))]
    rows.append(("tokens", number(cost.tokens, "tokens")))
    if cost.gpu_hours is not None:
        rows.append(("hours", say("report.cost.gpu_hours", language, hours=number(cost.gpu_hours))))
    if settings.price_per_gpu_hour is not None:
        rows += [("money_rate", money(cost.money_per_hour, settings)), ("money", money(cost.money, settings))]
        change = {"before": cost.per_million_before, "during": cost.per_million_during}
        told_change = {name: money(amount, settings) for name, amount in change.items()}
        rows.append(("per_million", say("report.cost.change", language, **told_change)))
    lines = table(_heads("what value", language), ((say(f"report.cost.{k}", language), v) for k, v in rows))
    lines += [plain(say("report.cost.how", language, known=duration(cost.known_s, language))), ""]
    if cost.unknown_s >= 1:
        unknown = say("report.cost.unknown_time", language, unknown=duration(cost.unknown_s, language))
        lines += [plain(unknown), ""]
    key = "no_price" if settings.price_per_gpu_hour is None else "priced"
    return [*lines, plain(say(f"report.cost.{key}", language, price=money(settings.price_per_gpu_hour, settings)))]


def checks_of(told: Told, language: str) -> list[str]:
    """What must hold once the fix has worked, as sentences."""
    expected = told.diagnosis.expected_tokens_per_s
    key = "output" if expected is not None else "output_unknown"
    return [
        say(f"report.check.{told.incident.cause}", language),
        say(f"report.check.{key}", language, expected=number(expected)),
        say("report.check.verdict", language),
    ]


def _check(report: Report, told: Told, language: str) -> list[str]:
    lines = [f"- {_with_code(sentence)}" for sentence in checks_of(told, language)]
    commands = commands_of(told, report.file, report.store)
    return [*lines, "", plain(say("report.check.look", language)), "", "```sh", *commands, "```"]


def _with_code(sentence: str) -> str:
    """Our own sentence, its `code` kept as such."""
    told = []
    for number_, part in enumerate(sentence.split("`")):
        before, after = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
        told.append(f"`{part}`" if number_ % 2 else f"{before}{plain(part)}{after}" if part.strip() else part)
    return "".join(told)


def _others(report: Report, language: str) -> list[str]:
    if not report.others:
        return []
    many = len(report.others) > MOST_OTHERS
    key = "others_some" if many else "others"
    lines = [f"## {plain(say('report.title.others', language))}", ""]
    told = say(f"report.text.{key}", language, count=len(report.others), shown=min(MOST_OTHERS, len(report.others)))
    lines += [plain(told), ""]
    rows = [
        (
            short_place(course.last.subject),
            number(course.last.output_pct),
            number(course.last.tokens_per_s),
            number(course.last.expected_tokens_per_s),
            course.last.headline.text(language),
        )
        for course in report.others[:MOST_OTHERS]
    ]
    return lines + table(_heads("pair output tokens expected state", language), rows)


def _foot(report: Report, language: str) -> list[str]:
    made = say(
        "report.foot.made",
        language,
        version=__version__,
        source=report.source,
        start=moment(report.from_ns),
        end=moment(report.end_ns),
    )
    lines = ["---", "", plain(made)]
    if report.bad_lines:
        lines += ["", plain(say("report.text.bad_lines", language, count=report.bad_lines))]
    for origin in sorted(report.origins):
        lines += ["", f"**{plain(say(f'report.foot.{origin}', language))}**"]
    return lines
