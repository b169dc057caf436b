"""Many nodes at once: one shared cause at one place (circuit, rack, cluster), told once, with everyone that it was found on.

Of all places that could be it, the one wins that holds most of the affected nodes, and of those that hold as many the one with the
fewest others: a rack whose every node is hot, not its two circuits and not the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rules.finding import line
from rules.thresholds import thresholds
from rules.verdict import Cause, Diagnosis, Line, Verdict

LEVELS = ("circuit", "rack", "cluster")
OWN = frozenset((Cause.NONE, Cause.DEMAND))
BY_CIRCUIT = frozenset((Cause.POWER, Cause.TELEMETRY))
"""What the nodes of one circuit share beyond those of a rack: their feed, and with it whether they are there at all."""

KEPT_TAGS = ("rack", "circuit", "cluster", "origin")
MOST_NAMED = 24
CHANGES = frozenset(f"rules.evidence.changed_{kind}" for kind in ("deploy", "config"))
UNEVEN = "rules.summary.uneven"


@dataclass(frozen=True, slots=True)
class Place:
    """One rack, circuit or cluster, and the positions of the diagnoses of its nodes. Its name is empty for a cluster without a tag."""

    level: str
    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """A cause at a place: `hit` holds the verdict of each position that shows it, `of` how many nodes the place has."""

    place: Place
    hit: Mapping[int, Verdict]
    affected: frozenset[str]
    of: int


def widen(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The diagnoses with the scope of shared causes widened.

    Nodes without a tag for a level are not compared on it, but for `cluster`: there all nodes of one origin are one.
    """
    widened = list(diagnoses)
    _widen_nodes(widened)
    places = _places(widened)
    for cause in {verdict.cause for diagnosis in widened for verdict in diagnosis.verdicts} - OWN:
        taken: set[int] = set()
        found = [shared for place in places for shared in _shared(widened, place, cause)]
        for shared in sorted(found, key=lambda each: (-len(each.affected), each.of, LEVELS.index(each.place.level))):
            if taken.isdisjoint(shared.hit):
                taken.update(shared.hit)
                _tell(widened, shared)
    return widened


def _widen_nodes(diagnoses: list[Diagnosis]) -> None:
    """The same cause on several GPUs or engines of one node, and on most of its pairs, is the node's."""
    nodes: dict[str, list[int]] = {}
    for position, diagnosis in enumerate(diagnoses):
        nodes.setdefault(diagnosis.subject["node"], []).append(position)
    for members in nodes.values():
        for cause in {verdict.cause for m in members for verdict in diagnoses[m].verdicts}:
            hit = {m: v for m in members for v in diagnoses[m].verdicts if v.cause is cause and v.scope != "node"}
            showing = [m for m in members if any(v.cause is cause for v in diagnoses[m].verdicts)]
            if len(showing) < 2 or len(showing) < thresholds()["shared.share"].enter * len(members):
                continue
            for member, verdict in hit.items():
                subject = {name: value for name, value in verdict.subject.items() if name not in ("engine", "gpu")}
                _put(diagnoses, member, verdict, replace(verdict, scope="node", subject=subject))


def _put(diagnoses: list[Diagnosis], member: int, before: Verdict, after: Verdict) -> None:
    diagnosis = diagnoses[member]
    verdicts = tuple(after if entry is before else entry for entry in diagnosis.verdicts)
    diagnoses[member] = replace(diagnosis, verdicts=verdicts)


def _places(diagnoses: Sequence[Diagnosis]) -> list[Place]:
    found: dict[tuple[str, str, str], list[int]] = {}
    for position, diagnosis in enumerate(diagnoses):
        for level in LEVELS:
            name = diagnosis.subject.get(level, "")
            if name or level == "cluster":
                found.setdefault((level, name, diagnosis.subject.get("origin", "")), []).append(position)
    return [Place(level, name, tuple(members)) for (level, name, _), members in found.items()]


def _shared(diagnoses: Sequence[Diagnosis], place: Place, cause: Cause) -> Iterator[Shared]:
    """What the place may share of a cause: most of its nodes at one time, those that one change came to, or those of an uneven load."""
    hit = {m: verdict for m in place.members for verdict in diagnoses[m].verdicts if verdict.cause is cause}
    if len(hit) < 2 or (place.level == "circuit" and cause not in BY_CIRCUIT):
        return
    nodes = {diagnoses[m].subject["node"] for m in place.members}
    yield from _most_of(diagnoses, place, _together(hit, diagnoses), nodes)
    if place.level != "cluster":
        return
    if cause is Cause.SOFTWARE:
        for change in {_change_of(verdict) for verdict in hit.values()} - {None}:
            same = {m: verdict for m, verdict in hit.items() if _change_of(verdict) == change}
            changed = {diagnoses[m].subject["node"] for m in place.members if change in _changes_of(diagnoses[m])}
            yield from _most_of(diagnoses, place, same, changed)
    if cause is Cause.SCHEDULING:
        # an uneven load is nobody's own: some have too much because others have too little
        uneven = {m: verdict for m, verdict in hit.items() if verdict.summary.key == UNEVEN}
        affected = frozenset(diagnoses[m].subject["node"] for m in uneven)
        if len(affected) >= 2:
            yield Shared(place, uneven, affected, len(nodes))


def _most_of(
    diagnoses: Sequence[Diagnosis], place: Place, hit: Mapping[int, Verdict], nodes: set[str]
) -> Iterator[Shared]:
    affected = frozenset(diagnoses[m].subject["node"] for m in hit)
    limits = thresholds()
    least = limits["shared.circuit_nodes" if place.level == "circuit" else "shared.nodes"].enter
    share = 1.0 if len(affected) < limits["shared.nodes"].enter else limits["shared.share"].enter
    if len(affected) >= least and len(affected) >= share * len(nodes):
        yield Shared(place, hit, affected, len(nodes))


def _change_of(verdict: Verdict) -> str | None:
    return next((str(entry.values.get("text", "")) for entry in verdict.evidence if entry.key in CHANGES), None)


def _changes_of(diagnosis: Diagnosis) -> set[str]:
    """The changes that a node has seen of late, whether they are blamed or not."""
    lines = [entry for step in diagnosis.steps for entry in step.evidence if entry.key in CHANGES]
    return {str(entry.values.get("text", "")) for entry in lines}


def _together(hit: Mapping[int, Verdict], diagnoses: Sequence[Diagnosis]) -> dict[int, Verdict]:
    """Those that began within three minutes of the middle one."""
    if not hit:
        return {}
    starts = sorted(verdict.since_ns or diagnoses[member].at_ns for member, verdict in hit.items())
    middle = starts[len(starts) // 2]
    apart_ns = thresholds()["shared.apart_s"].enter * 1e9
    return {
        member: verdict
        for member, verdict in hit.items()
        if abs((verdict.since_ns or diagnoses[member].at_ns) - middle) <= apart_ns
    }


def _tell(diagnoses: list[Diagnosis], shared: Shared) -> None:
    """Give each verdict the shared scope and place, and say who else shows it."""
    level, name = shared.place.level, shared.place.name
    where = line(
        f"shared_{level}" if name else "shared_all",
        nodes=len(shared.affected),
        of=shared.of,
        name=name,
        where=_named(_where(diagnoses, shared)),
    )
    why = _common(shared, lambda entry: entry.key in COMMON_CAUSES)
    for member, verdict in shared.hit.items():
        subject = {tag: value for tag, value in verdict.subject.items() if tag in KEPT_TAGS}
        if name:
            subject[level] = name
        evidence = (where, *(entry for entry in why if entry not in verdict.evidence), *verdict.evidence)
        after = replace(verdict, scope=level, subject=_upwards(subject, level), evidence=evidence)
        _put(diagnoses, member, verdict, after)


COMMON_CAUSES = frozenset(f"rules.evidence.{key}" for key in ("inlet_up", "inlet_peers", "fan_down", "circuit_load"))
"""What one node's sensors say of the air or the feed that it shares with the others."""


def _common(shared: Shared, chosen: Callable[[Line], bool]) -> tuple[Line, ...]:
    """One line of each kind that several verdicts have: those of the first that has it speak for all."""
    found: dict[str, Line] = {}
    for verdict in shared.hit.values():
        for entry in verdict.evidence:
            if chosen(entry):
                found.setdefault(entry.key, entry)
    return tuple(found.values())


def _where(diagnoses: Sequence[Diagnosis], shared: Shared) -> list[str]:
    """`n1/3` for each GPU that it was found on, `n1` where it is about no single ones."""
    found: dict[str, None] = {}
    for member, verdict in sorted(shared.hit.items(), key=lambda entry: diagnoses[entry[0]].subject["node"]):
        node = diagnoses[member].subject["node"]
        for name in [f"{node}/{index}" for index in verdict.gpus] or [node]:
            found[name] = None
    return list(found)


def _named(names: Sequence[str]) -> str:
    more = f" +{len(names) - MOST_NAMED}" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _upwards(tags: dict[str, str], level: str) -> dict[str, str]:
    """Only the tags at or above the level name the shared place: a rack's subject names no circuit."""
    above = LEVELS[LEVELS.index(level) :]
    return {name: value for name, value in tags.items() if name in above or name == "origin"}
