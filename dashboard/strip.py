"""The strip on top of the page: the verdict in words, what fell and what stayed, since when and how sure; or why there is none."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dash import html

from dashboard.figures import Figures, figures, of_when
from dashboard.fleet import PairNow
from dashboard.marks import say_cause
from dashboard.selection import SECOND_NS
from dashboard.units import duration, moment_near, number
from dashboard.view import View
from rules.verdict import Diagnosis, Fix, Line
from telemetry.messages import say
from telemetry.sample import Sample

VERDICT_STALE_S = 90.0
"""Triage repeats a standing verdict every 30 s; one that is three times as old may no longer hold."""
ENDING_S = 10
"""An engine may be seen to answer for so long after the event of its end, by clocks and buckets."""
RETURNED_S = 300
"""For so long after an engine's end the strip still says how it ended, though it answers again."""
AWAY = frozenset(("rules.summary.engine_away", "rules.summary.starting"))
"""Headlines of an engine that does not answer: out of date as soon as a sample says that it does."""
LOW_OUTPUT_PCT = 90.0
"""Below this a reading of output stands in red; whether it is a fault, triage says."""
HEADLINES: Mapping[str, tuple[str, str]] = {
    # triage's headline without a verdict: tone, badge; any other is good news
    "rules.summary.unexplained": ("warning", "below"),
    "rules.summary.slow": ("unknown", "below"),
    "rules.summary.engine_away": ("problem", "down"),
    "rules.summary.starting": ("unknown", "starting"),
    "rules.summary.warming": ("unknown", "learning"),
    "rules.summary.little": ("unknown", "little"),
    "rules.summary.gap": ("unknown", "stale"),
    "rules.summary.silent": ("unknown", "stale"),
}


@dataclass(frozen=True, slots=True)
class Endings:
    """The keys of one sentence by how an engine ended: by a signal, with an exit code, or unknown."""

    by_signal: str
    by_exit: str
    unknown: str


RESTARTING = Endings(
    "dashboard.strip.restarting_signal", "dashboard.strip.restarting_exit", "dashboard.strip.restarting"
)
RETURNED = Endings("dashboard.strip.returned_signal", "dashboard.strip.returned_exit", "dashboard.strip.returned")


@dataclass(frozen=True, slots=True)
class Strip:
    """`tone`: problem, warning, good or unknown. `badge` is one word or two, `text` the sentence, `note` what stands dim behind it.

    `judged` says that the sentence is triage's: then the numbers beside it are the verdict's own.
    """

    tone: str
    badge: str
    text: str
    note: str = ""
    since_ns: int | None = None
    judged: bool = False


def said(line: Line | Fix, language: str) -> str:
    """The sentence; its key where this version knows no such sentence or its numbers don't fit."""
    try:
        return line.text(language)
    except (KeyError, ValueError, IndexError, TypeError):
        return line.key


def strip_of(view: View, stale_s: float) -> Strip | None:
    """What the strip says; None when there is nobody to speak about."""
    language, pair = view.selection.language, view.pair
    if pair is None:
        return None
    age_s = pair.age_s(view.now_ns)
    if age_s > stale_s:
        text = say("dashboard.strip.stale_text", language, age=duration(age_s, language))
        return Strip("unknown", say("dashboard.strip.stale", language), text)
    if pair.up == 0:
        return _down(view, pair)
    if view.unreadable:
        return Strip(
            "unknown", say("dashboard.strip.unreadable", language), say("dashboard.strip.unreadable_text", language)
        )
    if view.diagnosis is None:
        return Strip(
            "unknown", say("dashboard.strip.learning", language), say("dashboard.strip.waiting_text", language)
        )
    return _judged(view, view.diagnosis, pair.judged)


def _down(view: View, pair: PairNow) -> Strip:
    language = view.selection.language
    ended_ns = max(last_answer_ns(view) or 0, pair.restart.time_ns if pair.restart else 0)
    since = view.diagnosis is not None and view.diagnosis.at_ns > ended_ns
    spoken = view.diagnosis is not None and (bool(view.diagnosis.verdicts) or view.diagnosis.headline.key not in AWAY)
    headline = said(view.diagnosis.headline, language) if view.diagnosis and since and spoken else ""
    if not pair.starting:
        return Strip("problem", say("dashboard.strip.down", language), down_words(view, pair), headline)
    badge = say("dashboard.strip.starting", language)
    if pair.restart is None:
        return Strip("unknown", badge, say("dashboard.strip.starting_text", language, engine=pair.key.engine), headline)
    text = say("dashboard.strip.starting_again", language, text=down_words(view, pair))
    return Strip("warning", badge, text, headline)


def _judged(view: View, diagnosis: Diagnosis, newest: Sample | None) -> Strip:
    """`newest` is the last verdict: while nothing new is to be said it comes without a text."""
    language = view.selection.language
    headline = said(diagnosis.headline, language)
    spoke_ns = diagnosis.at_ns if newest is None else max(diagnosis.at_ns, newest.time_ns)
    silent_s = (view.now_ns - spoke_ns) / SECOND_NS
    if silent_s > VERDICT_STALE_S:
        text = say("dashboard.strip.silent_text", language, age=duration(silent_s, language), headline=headline)
        return Strip("unknown", say("dashboard.strip.silent", language), text)
    if diagnosis.verdicts:
        top, *others = diagnosis.verdicts
        causes = ", ".join(dict.fromkeys(say_cause(str(other.cause), language) for other in others))
        note = say("dashboard.strip.also", language, causes=causes) if causes else ""
        cause = say_cause(str(top.cause), language)
        return Strip("problem", cause, said(top.summary, language), note, top.since_ns, judged=True)
    tone, badge = HEADLINES.get(diagnosis.headline.key, ("good", "healthy"))
    returned = returned_words(view)
    if view.pair is not None and view.pair.up and diagnosis.headline.key in AWAY:
        text = returned or say("dashboard.strip.answers", language, engine=view.pair.key.engine)
        return Strip("unknown", say("dashboard.strip.starting", language), text)
    return Strip(tone, say(f"dashboard.strip.{badge}", language), headline, returned, judged=True)


def returned_words(view: View) -> str:
    """How the engine that answers again had ended, for some minutes after; empty when it has not ended lately."""
    pair = view.pair
    if pair is None or not pair.up or pair.restart is None:
        return ""
    if view.now_ns - pair.restart.time_ns > RETURNED_S * SECOND_NS:
        return ""
    return _ending(RETURNED, view, pair, pair.restart)


def down_words(view: View, pair: PairNow) -> str:
    """How the engine ended, from its newest restart event: `code` is its return code, negative for a signal.

    An event from before it last answered tells of another end than this one.
    """
    language, engine, event = view.selection.language, pair.key.engine, pair.restart
    answered_ns = last_answer_ns(view)
    if event is None or (answered_ns is not None and event.time_ns < answered_ns - ENDING_S * SECOND_NS):
        if answered_ns is None:
            return say("dashboard.strip.not_answering", language, engine=engine)
        when = moment_near(answered_ns, view.now_ns, view.selection.offset_s)
        return say("dashboard.strip.not_answering_since", language, engine=engine, when=when)
    return _ending(RESTARTING, view, pair, event)


def _ending(endings: Endings, view: View, pair: PairNow, event: Sample) -> str:
    """How the engine ended, from its restart event: `code` is its return code, negative for a signal."""
    language, engine = view.selection.language, pair.key.engine
    when = moment_near(event.time_ns, view.now_ns, view.selection.offset_s)
    code = event.fields.get("code")
    if not isinstance(code, int):
        return say(endings.unknown, language, engine=engine, when=when)
    if code < 0:
        known = -code in {number_.value for number_ in signal.Signals}
        name = f"{-code} ({signal.Signals(-code).name})" if known else str(-code)
        return say(endings.by_signal, language, engine=engine, signal=name, when=when)
    return say(endings.by_exit, language, engine=engine, code=code, when=when)


def last_answer_ns(view: View) -> int | None:
    """The start of the last bucket in which the engine answered; None when the window holds none."""
    if view.history is None:
        return None
    places = [
        place
        for series in view.history.columns.get(("engine", "up"), ())
        for place, up in enumerate(series.values)
        if up == 1
    ]
    window = view.history.window
    return window.start_ns + max(places) * window.step_ns if places else None


def strip(view: View, stale_s: float) -> Any:
    """The strip as components; an empty one when there is nobody to speak about."""
    words = strip_of(view, stale_s)
    pair = view.pair
    if words is None or pair is None:
        return []
    language, offset_s = view.selection.language, view.selection.offset_s
    diagnosis = view.diagnosis if words.judged else None
    numbers = Figures(pair.output_pct, pair.util_pct) if diagnosis is None else figures(view, diagnosis)
    when = "" if diagnosis is None else of_when(view)
    who = " · ".join(part for part in (pair.key.node, pair.key.engine, _since(words, view, offset_s)) if part)
    right = [_pair_numbers(pair, numbers, language), _loss(numbers, language)]
    return html.Div(
        [
            html.Span(words.badge, className="strip-badge"),
            html.Div(
                [
                    html.Span(words.text, className="strip-text"),
                    html.Span(when, className="figures-of") if when else None,
                    html.Span(who, className="strip-who"),
                    html.Span(words.note, className="strip-note") if words.note else None,
                ],
                className="strip-words",
            ),
            html.Div(right, className="strip-right"),
        ],
        className=f"strip strip-{words.tone}",
    )


def _since(words: Strip, view: View, offset_s: int) -> str:
    if words.since_ns is None:
        return ""
    language = view.selection.language
    return say(
        "dashboard.strip.since",
        language,
        when=moment_near(words.since_ns, view.now_ns, offset_s),
        duration=duration((view.now_ns - words.since_ns) / SECOND_NS, language),
    )


def _pair_numbers(pair: PairNow, numbers: Figures, language: str) -> Any:
    """The pair itself, in two numbers."""
    effort = say(f"dashboard.strip.stayed_{'gpu' if pair.effort == 'gpu' else 'cpu'}", language)
    # of an engine that is down, the last output is of a moment when it still ran
    output_pct = None if pair.up == 0 else numbers.output_pct
    sides = (("tokens", say("dashboard.strip.fell", language), output_pct), ("util", effort, numbers.util_pct))
    return html.Div(
        [
            html.Span([html.B(number(shown, "%")), html.Small(label)], className=f"yield yield-{role}")
            for role, label, shown in sides
        ],
        className="yields",
    )


def _loss(numbers: Figures, language: str) -> Any:
    """What is lost by the named cause, and how sure it is; nothing without one."""
    lines: list[str] = []
    if numbers.loss_pct:
        lines.append(say("dashboard.strip.loss", language, loss=number(numbers.loss_pct, "%")))
    if numbers.lost_tokens_per_s:
        lines.append(say("dashboard.strip.lost", language, tokens=number(numbers.lost_tokens_per_s)))
    if numbers.confidence is not None:
        lines.append(say("dashboard.strip.confidence", language, confidence=numbers.confidence))
    return html.Span([html.Span(line) for line in lines], className="strip-confidence") if lines else None
