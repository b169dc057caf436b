"""From verdicts to alerts: one incident for each cause and place, pending, firing, resolved, told once each.

An incident's place is its node, or the rack, circuit or cluster that most of its nodes share; its engines and GPUs are named in it.
Symptoms never get here: verdicts hold roots only. Time counts as the sum of evaluations in which something could be told: a gap in
the telemetry, a suspended service or a stepped clock neither fires nor resolves anything. `rules.clearance` says what resolves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite

from rules.clearance import HARDWARE, Basis, basis_of, is_idle, is_well
from rules.thresholds import Bar
from rules.triage import can_tell
from rules.verdict import Cause, Diagnosis, Line, Verdict
from telemetry.catalogue import ALERT_STATES, COMMON_TAGS
from telemetry.messages import LANGUAGES
from telemetry.sample import Sample

WIDE = ("rack", "circuit", "cluster")
MOST_FLIPS = 16  # are counted
PENDING, FIRING, RESOLVED = "pending", "firing", "resolved"


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Seconds, and confidences between 0 and 1. Enter and leave differ so that a verdict on the line does not flap."""

    pending_s: float = 45.0
    pending_cold_start_s: float = 180.0  # a start takes minutes by nature
    wider_s: float = 5.0  # a circuit waits a turn more: the rack that holds it may be due in the next
    lapse_s: float = 15.0  # a pending condition may lapse this long
    clear_s: float = 120.0
    clear_max_s: float = 1800.0  # hold-down doubles with each flip up to this
    idle_clear_s: float = 1800.0  # of an engine that nobody asks for so long, what was its own trouble has ended
    gone_clear_s: float = (
        900.0  # of a node that reports without the card for so long, what the card suffered from has ended with it
    )
    flap_memory_s: float = 1800.0
    enter_confidence: float = 0.6
    leave_confidence: float = 0.4
    step_max_s: float = 15.0  # one evaluation counts for no more than this


@dataclass(frozen=True, slots=True)
class Condition:
    """One cause at one place, now: the most confident verdict of it, and everyone it was found on."""

    fingerprint: str
    cause: Cause
    scope: str
    place: Mapping[str, str]
    verdict: Verdict
    diagnosis: Diagnosis
    members: tuple[Mapping[str, str], ...]
    nodes: frozenset[str]
    rests_on: Mapping[str, Basis]  # by pair


@dataclass(slots=True)
class Alert:
    """The state of one fingerprint. Plain values only: this is what the state file holds."""

    fingerprint: str
    cause: str
    scope: str
    place: dict[str, str]
    nodes: list[str]
    severity: str
    state: str
    began_ns: int  # of the trouble, as far as can be told
    opened_ns: int  # when it was first seen here
    confidence: float
    loss_pct: float | None
    summary_key: str
    summary_values: dict[str, float | int | str]
    simulated: bool
    true_s: float = 0.0
    false_s: float = 0.0
    fired_ns: int | None = None
    resolved_ns: int | None = None
    flips: int = 0
    pairs: list[str] = field(default_factory=list)  # on which it was found
    rests_on: dict[str, list[list[str]]] = field(default_factory=dict)  # by pair: its fields, and its GPUs
    idle_s: float = 0.0  # for so long all of its engines had nothing to do
    gone_s: float = 0.0  # for so long its nodes have reported without a card that it is about
    gone: list[str] = field(default_factory=list)  # those cards, once it is sure that they are not there any more

    @property
    def incident(self) -> str:
        """The identity of this incident: the same over restarts, another one when it fires again."""
        return hashlib.sha256(f"{self.fingerprint}|{self.opened_ns}".encode()).hexdigest()[:32]

    @property
    def is_gone(self) -> bool:
        """Whether every card that it is about was taken out: it has ended and nothing was mended."""
        return bool(self.gone) and not self.rests_on


@dataclass(frozen=True, slots=True)
class Transition:
    """An incident that began to fire or was resolved, with the condition as last seen (None after a restart)."""

    state: str
    alert: Alert
    condition: Condition | None


def fingerprint_of(cause: Cause, scope: str, place: Mapping[str, str]) -> str:
    """A stable name for a cause at a place: over restarts and versions, the same incident has the same one."""
    plain = "|".join((str(cause), scope, *(f"{name}={place[name]}" for name in sorted(place))))
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def conditions_of(diagnoses: Iterable[Diagnosis], least: float) -> dict[str, Condition]:
    """The conditions that the verdicts make, by fingerprint; verdicts of one cause at one place are one condition."""
    found: dict[str, Condition] = {}
    for diagnosis in diagnoses:
        for verdict in diagnosis.verdicts:
            if verdict.confidence < least:
                continue
            scope = verdict.scope if verdict.scope in WIDE else "node"
            place = {name: value for name, value in verdict.subject.items() if name in COMMON_TAGS}
            mark = fingerprint_of(verdict.cause, scope, place)
            member = {**diagnosis.subject, **verdict.subject}
            before = found.get(mark)
            rests_on = {_pair_name(diagnosis.subject): basis_of(diagnosis, verdict)}
            if before is None:
                node = frozenset((diagnosis.subject["node"],))
                found[mark] = Condition(
                    mark, verdict.cause, scope, place, verdict, diagnosis, (member,), node, rests_on
                )
                continue
            better = (
                before
                if before.verdict.confidence >= verdict.confidence
                else replace(before, verdict=verdict, diagnosis=diagnosis)
            )
            found[mark] = replace(
                better,
                members=(*before.members, member),
                nodes=before.nodes | {diagnosis.subject["node"]},
                rests_on={**before.rests_on, **rests_on},
            )
    return found


def severity_of(condition: Condition) -> str:
    """critical when output is mostly gone or the hardware is at risk, warning otherwise."""
    hard = {Cause.GPU_FAULT, Cause.SCHEDULING, Cause.TELEMETRY}
    loss = condition.verdict.loss_pct or 0.0
    return "critical" if loss >= 30 or condition.cause in hard else "warning"


class AlertMachine:
    """Feed it every evaluation; it answers with what changed. `state` and `of` carry it over a restart."""

    def __init__(self, settings: AlertSettings | None = None) -> None:
        self.settings = settings or AlertSettings()
        self.alerts: dict[str, Alert] = {}

    def step(self, diagnoses: Sequence[Diagnosis], at_ns: int, elapsed_s: float) -> list[Transition]:
        """One evaluation, `elapsed_s` of monotonic time after the last one. Transitions are at most one a fingerprint."""
        passed = min(max(elapsed_s, 0.0), self.settings.step_max_s)
        conditions = conditions_of(diagnoses, self.settings.leave_confidence)
        told = _nodes_that_tell(diagnoses)
        heard = frozenset(diagnosis.subject["node"] for diagnosis in diagnoses)
        self._absorb(conditions)
        found: list[Transition] = []
        for mark in [*conditions, *(known for known in self.alerts if known not in conditions)]:
            alert = self.alerts.get(mark)
            condition = conditions.get(mark)
            if alert is None or alert.state == RESOLVED:
                self._begin(mark, alert, condition, at_ns, passed)
            else:
                over = alert.simulated and not heard.intersection(alert.nodes)  # the simulation was switched off
                knows = over or (told.issuperset(alert.nodes) and _is_over(alert, diagnoses))
                if not knows and told.issuperset(alert.nodes) and _is_at_rest(alert, diagnoses):
                    alert.idle_s += passed
                    knows = alert.idle_s >= self.settings.idle_clear_s
                if condition is None and self._has_gone(alert, diagnoses, passed):
                    found += self._end(alert, at_ns) if alert.state == FIRING else []
                    self.alerts.pop(mark) if alert.state == PENDING else None
                else:
                    found += self._advance(alert, condition, conditions, knows, at_ns, passed)
        return found

    def _has_gone(self, alert: Alert, diagnoses: Sequence[Diagnosis], passed: float) -> bool:
        """Whether every card that it is about was taken out. Of several, those that were let it go, and the others answer for it."""
        away = _away(alert, diagnoses)
        alert.gone_s = alert.gone_s + passed if away else 0.0
        if not away or alert.gone_s < self.settings.gone_clear_s:
            return False
        alert.gone = sorted({*alert.gone, *(gpu for _, gpu in away)})
        for pair, basis in list(alert.rests_on.items()):
            left = [gpu for gpu in basis[1] if (pair, gpu) not in away]
            if left != basis[1]:
                alert.rests_on[pair] = [basis[0], left]
                if not left:
                    del alert.rests_on[pair]
                    alert.pairs = [other for other in alert.pairs if other != pair]
        return alert.is_gone

    def open(self) -> list[Alert]:
        return [alert for alert in self.alerts.values() if alert.state != RESOLVED]

    def _begin(self, mark: str, before: Alert | None, condition: Condition | None, at_ns: int, passed: float) -> None:
        if condition is None:
            if before is not None:
                before.false_s += passed
                if before.false_s > self.settings.flap_memory_s:
                    del self.alerts[mark]
            return
        if condition.verdict.confidence < self.settings.enter_confidence:
            return
        flips = before.flips if before is not None else 0
        self.alerts[mark] = _alert_of(condition, at_ns, flips)

    def _advance(
        self,
        alert: Alert,
        condition: Condition | None,
        conditions: Mapping[str, Condition],
        knows: bool,
        at_ns: int,
        passed: float,
    ) -> list[Transition]:
        covered = condition is not None or _covered(alert, conditions)
        if covered:
            alert.true_s += passed
            alert.false_s = alert.idle_s = 0.0
            if condition is not None:
                _refresh(alert, condition)
        elif knows:
            alert.false_s += passed
        else:
            return []  # nobody can tell: nothing fires, nothing ends
        if alert.state == PENDING:
            return self._advance_pending(alert, condition, at_ns)
        return self._advance_firing(alert, at_ns)

    def _advance_pending(self, alert: Alert, condition: Condition | None, at_ns: int) -> list[Transition]:
        if alert.false_s > self.settings.lapse_s:
            if alert.flips:
                alert.state, alert.false_s = RESOLVED, 0.0  # keep the memory of its flips
            else:
                del self.alerts[alert.fingerprint]
            return []
        cold = alert.cause == Cause.COLD_START
        wait_s = self.settings.pending_cold_start_s if cold else self.settings.pending_s
        if alert.scope == "circuit":
            wait_s += self.settings.wider_s
        if alert.false_s == 0 and condition is not None and alert.true_s >= wait_s:
            alert.state, alert.fired_ns, alert.resolved_ns = FIRING, at_ns, None
            alert.severity = severity_of(condition)
            return [Transition(FIRING, replace(alert), condition)]
        return []

    def _advance_firing(self, alert: Alert, at_ns: int) -> list[Transition]:
        hold_s = min(self.settings.clear_s * 2**alert.flips, self.settings.clear_max_s)
        return [] if alert.false_s < hold_s else self._end(alert, at_ns)

    def _end(self, alert: Alert, at_ns: int) -> list[Transition]:
        alert.state, alert.resolved_ns = RESOLVED, at_ns
        alert.true_s = alert.false_s = alert.idle_s = alert.gone_s = 0.0
        alert.flips = min(alert.flips + 1, MOST_FLIPS)
        return [Transition(RESOLVED, replace(alert), None)]

    def _absorb(self, conditions: Mapping[str, Condition]) -> None:
        """A wide condition takes over what its nodes have pending: it was pending since then."""
        for mark, condition in conditions.items():
            if condition.scope not in WIDE or mark in self.alerts:
                continue
            narrow = [
                alert
                for alert in self.alerts.values()
                if alert.state == PENDING and alert.cause == condition.cause and condition.nodes.issuperset(alert.nodes)
            ]
            if not narrow or condition.verdict.confidence < self.settings.enter_confidence:
                continue
            eldest = max(narrow, key=lambda alert: alert.true_s)
            wide = _alert_of(condition, eldest.opened_ns, 0)
            wide.began_ns = min(wide.began_ns, eldest.began_ns)
            wide.true_s = eldest.true_s
            for alert in narrow:
                del self.alerts[alert.fingerprint]
            self.alerts[mark] = wide

    def state(self) -> dict[str, object]:
        return {"version": 1, "alerts": [asdict(alert) for alert in self.alerts.values()]}

    @staticmethod
    def of(state: object, settings: AlertSettings | None = None) -> AlertMachine:
        """ValueError for anything that `state` could not have made."""
        machine = AlertMachine(settings)
        try:
            if not isinstance(state, dict) or state["version"] != 1:
                raise ValueError("it was made by another version")
            for plain in state["alerts"]:
                alert = alert_of(plain)
                machine.alerts[alert.fingerprint] = alert
        except (KeyError, TypeError) as error:
            raise ValueError(f"the state of the alerts is not complete: {error}") from error
        return machine


def alert_of(plain: object) -> Alert:
    """The alert of one entry of the state. ValueError for one that `state` could not have written."""
    if not isinstance(plain, dict):
        raise ValueError(f"no alert: {plain!r:.60}")
    try:
        alert = Alert(**plain)
        _check(alert)
    except TypeError as error:
        raise ValueError(f"an alert that is not complete: {error}") from error
    _make_sayable(alert)
    return alert


def _check(alert: Alert) -> None:
    """ValueError for a value that `state` could not have written: it would end every turn to come."""
    if alert.state not in ALERT_STATES:
        raise ValueError(f"state {alert.state!r}")
    texts = [alert.fingerprint, alert.cause, alert.scope, alert.severity, alert.summary_key]
    if not isinstance(alert.place, dict) or not isinstance(alert.nodes, list) or not alert.nodes:
        raise ValueError(f"an alert of no place: {alert.place!r}, {alert.nodes!r}")
    if not isinstance(alert.pairs, list) or not isinstance(alert.gone, list) or not isinstance(alert.rests_on, dict):
        raise ValueError("an alert of no pairs")
    for pair, basis in alert.rests_on.items():
        if not (isinstance(basis, list) and len(basis) == 2 and all(isinstance(part, list) for part in basis)):
            raise ValueError(f"what it rests on at {pair!r} can't be told")
    texts += [*alert.place, *alert.place.values(), *alert.nodes, *alert.pairs, *alert.gone, *alert.rests_on]
    texts += [text for basis in alert.rests_on.values() for part in basis for text in part]
    if not all(isinstance(text, str) for text in texts) or not isinstance(alert.summary_values, dict):
        raise ValueError("a name or a summary that is no text")
    "".join(texts).encode()  # half a character could never be written again
    if alert.cause not in list(Cause):
        raise ValueError(f"a cause that is not known here: {alert.cause!r}")
    whole = [alert.began_ns, alert.opened_ns, alert.fired_ns, alert.resolved_ns, alert.flips]
    missing = [alert.fired_ns, alert.resolved_ns, alert.loss_pct].count(None)
    if [*whole, alert.loss_pct].count(None) > missing or not all(
        type(number) is int and 0 <= number < 2**63 for number in whole if number is not None
    ):
        raise ValueError("a time or a count that is none")
    measured = [alert.true_s, alert.false_s, alert.confidence, alert.idle_s, alert.gone_s, alert.loss_pct]
    if not all(type(number) in (int, float) and isfinite(number) for number in measured if number is not None):
        raise ValueError("a measure that is no number")
    if None in measured[:5] or alert.flips > MOST_FLIPS or not isinstance(alert.simulated, bool):
        raise ValueError("a measure, a count of flips or a mark that can't be")


def _make_sayable(alert: Alert) -> None:
    """Another version may have said it in a sentence that is none here. The incident stands all the same: its cause is its summary."""
    try:
        for language in LANGUAGES:
            if "{" in Line(alert.summary_key, alert.summary_values).text(language):
                raise ValueError("it wants numbers that the state has not")
    except (KeyError, ValueError, TypeError, IndexError, AttributeError):
        alert.summary_key, alert.summary_values = f"rules.cause.{alert.cause}", {}


def alert_sample(alert: Alert, summary: str, at_ns: int) -> Sample:
    """The `alert` sample. A shared incident carries the tag of one of its nodes, since every sample has a node."""
    tags = {**alert.place, "alert": alert.cause, "severity": alert.severity}
    tags.setdefault("node", alert.nodes[0] if alert.nodes else "")
    state = ALERT_STATES.index(alert.state)
    return Sample("alert", tags, {"state": state, "summary": summary, "fingerprint": alert.fingerprint}, at_ns)


def _alert_of(condition: Condition, at_ns: int, flips: int) -> Alert:
    verdict = condition.verdict
    return Alert(
        fingerprint=condition.fingerprint,
        cause=str(condition.cause),
        scope=condition.scope,
        place=dict(condition.place),
        nodes=sorted(condition.nodes),
        severity=severity_of(condition),
        state=PENDING,
        began_ns=verdict.since_ns or at_ns,
        opened_ns=at_ns,
        confidence=verdict.confidence,
        loss_pct=verdict.loss_pct,
        summary_key=verdict.summary.key,
        summary_values=dict(verdict.summary.values),
        simulated=condition.diagnosis.simulated,
        flips=flips,
        pairs=_pairs(condition),
        rests_on=_plain(condition),
    )


def _refresh(alert: Alert, condition: Condition) -> None:
    verdict = condition.verdict
    alert.confidence, alert.loss_pct = verdict.confidence, verdict.loss_pct
    alert.summary_key, alert.summary_values = verdict.summary.key, dict(verdict.summary.values)
    alert.nodes = sorted(set(alert.nodes) | condition.nodes)
    alert.pairs = sorted({*alert.pairs, *_pairs(condition)})
    alert.gone = []
    for pair, (lanes, gpus) in _plain(condition).items():
        before = alert.rests_on.get(pair, [[], gpus])
        about = sorted({*before[1], *gpus}) if before[1] and gpus else []
        alert.rests_on[pair] = [sorted({*before[0], *lanes}), about]


def _pairs(condition: Condition) -> list[str]:
    return sorted({_pair_name(member) for member in condition.members})


def _pair_name(subject: Mapping[str, str]) -> str:
    return f"{subject['node']}\x1f{subject.get('engine', '')}"


def _plain(condition: Condition) -> dict[str, list[list[str]]]:
    return {pair: [list(basis.lanes), list(basis.gpus)] for pair, basis in condition.rests_on.items()}


def _concerned(alert: Alert, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The pairs that it was found on. Hardware outlives its engine: where none of a node's is watched any more, all that is left of it."""
    here = [diagnosis for diagnosis in diagnoses if diagnosis.subject["node"] in alert.nodes]
    found = [diagnosis for diagnosis in here if not alert.pairs or _pair_name(diagnosis.subject) in alert.pairs]
    if alert.cause in HARDWARE:
        known = {diagnosis.subject["node"] for diagnosis in found}
        found += [diagnosis for diagnosis in here if diagnosis.subject["node"] not in known]
    return found


def _is_over(alert: Alert, diagnoses: Sequence[Diagnosis]) -> bool:
    """Whether every pair on which it was found shows that it is well: what is not seen has not ended."""
    for diagnosis in _concerned(alert, diagnoses):
        lanes, gpus = alert.rests_on.get(_pair_name(diagnosis.subject), [[], []])
        if not is_well(diagnosis, alert.cause, Basis(tuple(lanes), tuple(gpus))):
            return False
    return True


def _away(alert: Alert, diagnoses: Sequence[Diagnosis]) -> set[tuple[str, str]]:
    """(pair, GPU) of the cards that it is about and that their node, which reports, has none of."""
    there: dict[str, set[str]] = {}
    for diagnosis in diagnoses:
        seen = diagnosis.seen
        if seen is not None and not Bar().reached("telemetry.stale_s", seen.silent_s):
            there.setdefault(diagnosis.subject["node"], set()).update(gpu.index for gpu in seen.gpus)
    return {
        (pair, gpu)
        for pair, (_, gpus) in alert.rests_on.items()
        for gpu in gpus
        if (node := pair.partition("\x1f")[0]) in there and gpu not in there[node]
    }


def _is_at_rest(alert: Alert, diagnoses: Sequence[Diagnosis]) -> bool:
    """Trouble of engines only, and all of them have nothing to do."""
    engines = _concerned(alert, diagnoses)
    return alert.cause not in HARDWARE and bool(engines) and all(is_idle(diagnosis) for diagnosis in engines)


def _covered(alert: Alert, conditions: Mapping[str, Condition]) -> bool:
    """A wider or narrower condition of the same cause on the same nodes keeps the incident going."""
    return any(
        condition.cause == alert.cause and condition.nodes.intersection(alert.nodes)
        for condition in conditions.values()
    )


def _nodes_that_tell(diagnoses: Iterable[Diagnosis]) -> frozenset[str]:
    """Nodes of which every pair can be judged now."""
    heard: dict[str, bool] = {}
    for diagnosis in diagnoses:
        node = diagnosis.subject["node"]
        heard[node] = heard.get(node, True) and can_tell(diagnosis)
    return frozenset(node for node, clear in heard.items() if clear)
