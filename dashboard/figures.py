"""The figures beside a verdict, from its newest sample; and how old the figures in its words are, which are written less often."""

from __future__ import annotations

from dataclasses import dataclass

from dashboard.fleet import value
from dashboard.selection import SECOND_NS
from dashboard.units import moment_near
from dashboard.view import View
from rules.verdict import Diagnosis
from rules.verdict_record import MATERIAL_LOSS_POINTS
from telemetry.messages import say
from telemetry.sample import Sample

OLD_S = 60.0
"""Words may be so much older than the numbers beside them before their moment is told."""


@dataclass(frozen=True, slots=True)
class Figures:
    """`output_pct` and `loss_pct` are of what is expected, `lost_tokens_per_s` is what is missing of it. None: not known."""

    output_pct: float | None
    util_pct: float | None
    loss_pct: float | None = None
    lost_tokens_per_s: float | None = None
    confidence: float | None = None


def figures(view: View, diagnosis: Diagnosis) -> Figures:
    """Of the newest verdict. What it does not carry itself is as in its words, or as last read where those are old."""
    pair, newest = view.pair, _newer(view, diagnosis)
    old = pair is not None and are_old(view)
    output_pct = pair.output_pct if pair is not None and old else diagnosis.output_pct
    util_pct = pair.util_pct if pair is not None and old else diagnosis.util_pct
    if not diagnosis.verdicts:
        return Figures(output_pct, util_pct)
    top = diagnosis.verdicts[0]
    if newest is None:
        return Figures(output_pct, util_pct, top.loss_pct, top.loss_tokens_per_s, top.confidence)
    loss_pct, lost = value(newest, "loss_pct"), value(newest, "loss_tokens_per_s")
    if loss_pct is not None and loss_pct > 0:  # 0: as expected or above it, so that it says nothing of the output
        output_pct = 100 - loss_pct
    return Figures(output_pct, util_pct, loss_pct, lost, value(newest, "confidence"))


def are_old(view: View) -> bool:
    """Whether the words are of so long ago, or of another loss, that their moment must be told."""
    diagnosis = view.diagnosis
    if diagnosis is None:
        return False
    if view.now_ns - diagnosis.at_ns > OLD_S * SECOND_NS:
        return True
    newest = _newer(view, diagnosis)
    if newest is None or not diagnosis.verdicts:
        return False
    loss_pct, said_pct = value(newest, "loss_pct"), diagnosis.verdicts[0].loss_pct
    return loss_pct is not None and said_pct is not None and abs(loss_pct - said_pct) >= MATERIAL_LOSS_POINTS


def of_when(view: View) -> str:
    """`figures of 00:19:05`; empty while the words are as good as new."""
    if view.diagnosis is None or not are_old(view):
        return ""
    when = moment_near(view.diagnosis.at_ns, view.now_ns, view.selection.offset_s)
    return say("dashboard.strip.figures_of", view.selection.language, when=when)


def _newer(view: View, diagnosis: Diagnosis) -> Sample | None:
    """The newest verdict where it came after its words."""
    newest = view.pair.judged if view.pair is not None else None
    return newest if newest is not None and newest.time_ns > diagnosis.at_ns else None
