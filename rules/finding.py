"""What one rule found about one cause, before the causes are weighed against each other; and the effect that a cause must have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rules.evidence import Evidence, GpuEvidence, Observation, value
from rules.priors import Strength
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Fix, Line, Number, Status


@dataclass(frozen=True, slots=True)
class Finding:
    """`status` is confirmed, ruled out or no data; whether a confirmed one is a symptom of another is decided later.

    `strength` and `support` say how likely the evidence is under this cause; `alone` marks a fault that needs no loss beside it.
    """

    cause: Cause
    status: Status
    evidence: tuple[Line, ...] = ()
    strength: Strength | None = None
    support: float = 1.0
    summary: Line | None = None
    fixes: tuple[Fix, ...] = ()
    since_ns: int | None = None
    gpus: tuple[str, ...] = ()  # the GPUs it is about, when it is about some of several
    scope: str = ""  # empty: the pair itself
    alone: bool = False


def line(key: str, lane: str = "", **values: Number) -> Line:
    """A sentence of `rules.evidence`, its numbers rounded to what a person reads."""
    return Line(f"rules.evidence.{key}", {name: _rounded(value) for name, value in values.items()}, lane)


def summary(key: str, **values: Number) -> Line:
    return Line(f"rules.summary.{key}", {name: _rounded(value) for name, value in values.items()})


def fix(key: str, cost: Cost, **values: Number) -> Fix:
    return Fix(f"rules.fix.{key}", cost, values)


def _rounded(value: Number) -> Number:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def confirmed(
    cause: Cause,
    strength: Strength,
    evidence: Iterable[Line | None],
    summary_line: Line,
    fixes: tuple[Fix, ...],
    *,
    since_ns: int | None = None,
    gpus: tuple[str, ...] = (),
    scope: str = "",
    support: float = 1.0,
    alone: bool = False,
) -> Finding:
    lines = tuple(entry for entry in evidence if entry is not None)
    return Finding(cause, Status.CONFIRMED, lines, strength, support, summary_line, fixes, since_ns, gpus, scope, alone)


def ruled_out(cause: Cause, *evidence: Line | None) -> Finding:
    return Finding(cause, Status.RULED_OUT, tuple(entry for entry in evidence if entry is not None))


def no_data(cause: Cause, *evidence: Line | None) -> Finding:
    return Finding(cause, Status.NO_DATA, tuple(entry for entry in evidence if entry is not None))


def cleared(cause: Cause, seen: Iterable[Line | None], missing: Sequence[Line]) -> Finding:
    """Ruled out by what was seen; no data where something that the cause would show in was not, which is named beside the rest."""
    lines = tuple(entry for entry in seen if entry is not None)
    if missing or not lines:
        return Finding(cause, Status.NO_DATA, (*lines, *missing))
    return Finding(cause, Status.RULED_OUT, lines)


def harmless(cause: Cause, effect: Effect, *seen: Line | None) -> Finding:
    """A sign without a loss beside it: ruled out where the output is known, and where it is not, nobody knows that it does no harm."""
    return cleared(cause, seen, () if effect.known else (line("harm_unknown"),))


def unread(lane: str, gpus: Iterable[str] = ()) -> Line:
    """A field that a cause is judged by and that nobody reads, by its title; of these GPUs, if it is one of theirs."""
    which = names(gpus)
    return line("unread_gpu", what=lane, gpus=which) if which else line("unread", what=lane)


def unread_gpus(evidence: Evidence, lane: str, reads: Callable[[GpuEvidence], bool]) -> list[Line]:
    """The line that names the GPUs of which it is not read; none when it is read of all."""
    missing = [gpu.index for gpu in evidence.gpus if not reads(gpu)]
    return [unread(lane, missing)] if missing else []


@dataclass(frozen=True, slots=True)
class Effect:
    """What the pair loses. `known` is False while nothing is expected yet: then nothing is slow, and nothing is fine either."""

    known: bool
    slow_output: bool
    slow_work: bool
    loss_pct: float | None  # of expected output, 0..100
    told: bool = False
    unsettled: bool = False  # a loss soon after a start, no larger than boots of one engine differ by

    @property
    def slow(self) -> bool:
        return self.slow_output or self.slow_work

    @property
    def hurts(self) -> bool:
        """A loss; or, of an incident that is told, that nobody says how much was lost."""
        return self.slow or (self.told and not self.known)

    @property
    def hurts_work(self) -> bool:
        """As `hurts`, and each unit of work takes longer: what a neighbour, a disk or a busy host does."""
        return self.slow_work or (self.told and self.hurts)


def effect_of(evidence: Evidence, bar: Bar) -> Effect:
    """Whether the pair is slow: in output, or in each unit of work, held over two of three spans. A young engine is never slow."""
    known = _latest.get("effect")
    if known is not None and known[0] is evidence and known[1] == bar.held:
        return known[2]
    effect = _effect(evidence, bar)
    _latest["effect"] = evidence, bar.held, effect
    return effect


_latest: dict[str, tuple[Evidence, frozenset[Cause], Effect]] = {}
"""The last answer: every rule asks it of the pair that is being judged."""


def _effect(evidence: Evidence, bar: Bar) -> Effect:
    output = evidence.output
    if evidence.told:
        return _told_effect(evidence)
    if output.output_ratio is None:
        return Effect(False, False, False, None)
    uptime = evidence.engine.uptime_s if evidence.engine else None
    # the window as a whole as well, so that no line is crossed by noise
    slow_output = bar.reached("loss.share", output.slow_share) and bar.reached("loss.ratio", output.output_ratio)
    slow_work = bar.reached("loss.share", output.work_slow_share)
    settled, seen = True, True
    if uptime is not None and uptime < bar.enter("cold_start.uptime_s"):
        worst = min(output.output_ratio, output.work_ratio if output.work_ratio is not None else 1.0)
        seen = uptime >= bar.enter("cold_start.blind_s")
        settled = seen and bar.reached("loss.restart_ratio", worst)
    return Effect(
        known=True,
        slow_output=settled and slow_output,
        slow_work=settled and slow_work,
        loss_pct=max(0.0, 100 * (1 - output.output_ratio)),
        unsettled=seen and not settled and slow_work,
    )


def _told_effect(evidence: Evidence) -> Effect:
    """What is told to be lost. Without requests nothing is, and a start's first minutes are slow by nature."""
    output, engine = evidence.output, evidence.engine
    shares = (output.output_ratio, output.told_work_ratio)
    share = next((entry for entry in shares if entry is not None), None)
    lost = None if share is None else max(0.0, 100 * (1 - share))
    if engine is not None and engine.stalled:
        return Effect(True, True, True, 100.0, told=True)
    idle = engine is not None and engine.running is not None and engine.running.value + (value(engine.waiting) or 0) < 1
    uptime = engine.uptime_s if engine is not None else None
    young = uptime is not None and uptime < Bar().enter("cold_start.uptime_s")
    if engine is not None and engine.load is None and (idle or young):
        return Effect(True, False, False, None, told=True)
    known = share is not None or output.ttft_ratio is not None
    return Effect(known, output.slow_share > 0, output.work_slow_share > 0, lost, told=True)


def pair_line(evidence: Evidence) -> Line | None:
    """The two sides of the pair in one sentence."""
    ratio, util = evidence.output.output_ratio, evidence.util_pct
    if ratio is not None and util is None and evidence.told:
        return line("told_loss", "pair.output_pct", output_pct=100 * ratio)
    if ratio is None or util is None:
        return None
    return line(f"pair_{evidence.effort}", "pair.output_pct", output_pct=100 * ratio, util_pct=util)


def against(seen: Observation | None) -> Line | None:
    """An observation of which only the ratio against usual is known, as a sentence; None for any other."""
    if seen is None or not seen.relative:
        return None
    return line("relative", seen.lane, what=seen.lane, pct=100 * seen.value)


def names_cause(cause: Cause, effect: Effect) -> Line:
    """The plain summary: what is lost, where that is known, and the cause."""
    if effect.loss_pct is not None and effect.slow:
        return summary("loss_by", loss_pct=effect.loss_pct, cause=str(cause))
    return summary("speaks_for", cause=str(cause))


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that speaks for a cause, and how strongly it does by itself."""

    strength: Strength
    line: Line


def strongest(signs: Sequence[Sign]) -> Strength:
    """Of several; two that are fair are strong together."""
    order = list(Strength)
    best = min((sign.strength for sign in signs), key=order.index)
    return Strength.STRONG if best is Strength.FAIR and len(signs) > 1 else best


def names(gpus: Iterable[str]) -> str:
    return ", ".join(gpus)
