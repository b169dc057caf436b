"""What happened over time: each pair's output and verdicts, moment by moment, and the incidents that these make up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rules.evidence import Evidence
from rules.loss import Lost, Reading, lost_over
from rules.observation.reader import NOW_S
from rules.triage import Triage
from rules.verdict import Cause, Diagnosis, Verdict
from rules.window import SECOND

SAME_S = 60.0
"""A cause that comes back within this is the same incident, and so are pairs that begin this close together."""

PASSING_S = 15.0
"""A verdict that stood for less, and no longer does, is told in the timeline and is no incident."""

PairKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Moment:
    """One judgement of one pair in short. Output in % of the expected one and in tokens/s, both over the last 30 s."""

    time_ns: int
    output_pct: float | None
    util_pct: float | None
    tokens_per_s: float | None
    expected_tokens_per_s: float | None
    cause: Cause | None
    confidence: float


@dataclass(slots=True)
class Spell:
    """A stretch over which one cause was the likeliest of a pair, with the judgement that says most about it."""

    cause: Cause
    first_ns: int
    last_ns: int
    diagnosis: Diagnosis
    evidence: Evidence

    @property
    def verdict(self) -> Verdict:
        return self.diagnosis.verdicts[0]

    @property
    def since_ns(self) -> int:
        return min(self.verdict.since_ns or self.first_ns, self.first_ns)


@dataclass(slots=True)
class Course:
    """One pair over the walk; `last` and `seen` are its final judgement and what that saw."""

    last: Diagnosis
    seen: Evidence
    moments: list[Moment] = field(default_factory=list)
    spells: list[Spell] = field(default_factory=list)

    @property
    def key(self) -> PairKey:
        return pair_key(self.last.subject)

    def add(self, diagnosis: Diagnosis, evidence: Evidence) -> None:
        self.last, self.seen = diagnosis, evidence
        top = diagnosis.verdicts[0] if diagnosis.verdicts else None
        self.moments.append(
            Moment(
                diagnosis.at_ns,
                diagnosis.output_pct,
                diagnosis.util_pct,
                diagnosis.tokens_per_s,
                diagnosis.expected_tokens_per_s,
                top.cause if top else None,
                top.confidence if top else 0.0,
            )
        )
        if top is None:
            return
        for spell in reversed(self.spells):
            if spell.cause is top.cause and diagnosis.at_ns - spell.last_ns <= SAME_S * SECOND:
                spell.last_ns = diagnosis.at_ns
                if top.confidence >= spell.verdict.confidence:
                    spell.diagnosis, spell.evidence = diagnosis, evidence
                return
        self.spells.append(Spell(top.cause, diagnosis.at_ns, diagnosis.at_ns, diagnosis, evidence))


@dataclass(frozen=True, slots=True)
class Struck:
    """One pair in an incident, and what it lost there."""

    course: Course
    spell: Spell
    lost: Lost

    @property
    def gpus(self) -> int:
        return len(self.spell.evidence.gpus)


@dataclass(frozen=True, slots=True)
class Incident:
    """One cause at one place. `until_ns` is None while it stands at the end of the walk. The worst-hit pair comes first."""

    cause: Cause
    scope: str
    subject: Mapping[str, str]
    since_ns: int
    until_ns: int | None
    struck: tuple[Struck, ...]

    @property
    def verdict(self) -> Verdict:
        return self.struck[0].spell.verdict

    @property
    def lost(self) -> Lost:
        """Of all pairs together; tokens are None where none of them is known."""
        each = [struck.lost for struck in self.struck]
        tokens = [lost.tokens for lost in each if lost.tokens is not None]
        shares = [lost.share_s for lost in each if lost.share_s is not None]
        return Lost(
            sum(tokens) if tokens else None,
            sum(shares) if shares else None,
            sum(lost.known_s for lost in each),
            sum(lost.unknown_s for lost in each),
        )


def follow(
    walked: Iterable[tuple[Triage, list[Diagnosis]]], tell: Callable[[int], None] = lambda _at_ns: None
) -> dict[PairKey, Course]:
    """The course of every pair, in the order of nodes and engines. `tell` hears of each moment that is done."""
    courses: dict[PairKey, Course] = {}
    for triage, diagnoses in walked:
        seen = {(entry.node, entry.engine.name if entry.engine else ""): entry for entry in triage.last.values()}
        for diagnosis in diagnoses:
            key = pair_key(diagnosis.subject)
            course = courses.get(key)
            if course is None:
                course = courses[key] = Course(diagnosis, seen[key])
            course.add(diagnosis, seen[key])
        if diagnoses:
            tell(diagnoses[0].at_ns)
    return dict(sorted(courses.items()))


def incidents_of(courses: Iterable[Course], from_ns: int, end_ns: int) -> list[Incident]:
    """The incidents that stood at some time from `from_ns` on: those that still stand at `end_ns` first, then by what they cost."""
    groups: list[list[tuple[Course, Spell]]] = []
    for course in courses:
        for spell in _incident_spells(course, end_ns):
            if spell.last_ns < from_ns:
                continue
            home = next((group for group in groups if _belongs(spell, group[0][1])), None)
            if home is None:
                groups.append([(course, spell)])
            else:
                home.append((course, spell))
    found = [_incident(group, end_ns) for group in groups]
    return sorted(found, key=lambda i: (i.until_ns is not None, -_cost(i.lost), i.since_ns))


def pair_key(subject: Mapping[str, str]) -> PairKey:
    return subject.get("node", ""), subject.get("engine", "")


def readings_of(course: Course) -> list[Reading]:
    """What the pair yielded, for `lost_over`. A judgement is the mean of the `NOW_S` before it, and speaks for their middle."""
    half_ns = int(NOW_S / 2 * SECOND)
    found = [Reading(m.time_ns - half_ns, m.expected_tokens_per_s, m.tokens_per_s) for m in course.moments]
    if course.moments:
        last = course.moments[-1]
        found.append(Reading(last.time_ns, last.expected_tokens_per_s, last.tokens_per_s))
    return found


def _incident_spells(course: Course, end_ns: int) -> list[Spell]:
    """Those that are more than a passing judgement, one that still stands with its final judgement."""
    for spell in course.spells:
        if _stands(spell, course, end_ns):
            spell.diagnosis, spell.evidence = course.last, course.seen
    return [
        spell
        for spell in course.spells
        if _stands(spell, course, end_ns)
        or (
            spell.last_ns - spell.first_ns >= PASSING_S * SECOND
            and not any(_swallows(other, spell) for other in course.spells)
        )
    ]


def _stands(spell: Spell, course: Course, end_ns: int) -> bool:
    last = course.moments[-1]
    return spell.last_ns == last.time_ns >= end_ns - int(SAME_S * SECOND) and last.cause is spell.cause


def _swallows(longer: Spell, shorter: Spell) -> bool:
    """`shorter` was a judgement on the way to, or from, what `longer` says of the same trouble."""
    if longer is shorter or longer.last_ns - longer.first_ns <= shorter.last_ns - shorter.first_ns:
        return False
    near_ns = int(SAME_S * SECOND)
    return longer.first_ns - near_ns <= shorter.last_ns and shorter.first_ns <= longer.last_ns + near_ns


def _belongs(spell: Spell, other: Spell) -> bool:
    """The same cause at the same time and place; a GPU or engine of a node and the node itself are one place."""
    mine, theirs = spell.verdict, other.verdict
    if mine.cause is not theirs.cause or ("node" in mine.subject) != ("node" in theirs.subject):
        return False
    if mine.subject.get("node") != theirs.subject.get("node"):
        return False
    if "node" not in mine.subject and (mine.scope, dict(mine.subject)) != (theirs.scope, dict(theirs.subject)):
        return False
    near_ns = int(SAME_S * SECOND)
    return spell.first_ns - near_ns <= other.last_ns and other.first_ns <= spell.last_ns + near_ns


def _incident(group: Sequence[tuple[Course, Spell]], end_ns: int) -> Incident:
    stands = any(_stands(spell, course, end_ns) for course, spell in group)
    since_ns = min(spell.since_ns for _, spell in group)
    until_ns = None if stands else max(spell.last_ns for _, spell in group)
    last_ns = end_ns if until_ns is None else until_ns
    struck = [
        Struck(course, spell, lost_over(readings_of(course), spell.since_ns, min(last_ns, course.moments[-1].time_ns)))
        for course, spell in group
    ]
    struck.sort(key=lambda entry: -_cost(entry.lost))
    first = struck[0].spell.verdict
    scope, subject = first.scope, dict(first.subject)
    if any((entry.spell.verdict.scope, dict(entry.spell.verdict.subject)) != (scope, subject) for entry in struck):
        scope = "node"  # parts of it, or a part and the whole
        subject = {tag: name for tag, name in subject.items() if tag not in ("engine", "gpu")}
    return Incident(first.cause, scope, subject, since_ns, until_ns, tuple(struck))


def _cost(lost: Lost) -> float:
    """For the order only: what can't be counted, as of an engine that is away, may be the worst."""
    return float("inf") if lost.tokens is None else lost.tokens
