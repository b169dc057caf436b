"""Many nodes at once: the same cause on most nodes behind one circuit, rack or cluster is one shared cause, not many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rules.thresholds import thresholds
from rules.verdict import Cause, Diagnosis, Verdict

LEVELS = ("circuit", "rack", "cluster")
OWN = frozenset((Cause.NONE, Cause.DEMAND))


def widen(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The diagnoses with the scope of shared causes widened: the narrowest level whose nodes mostly show the cause together.

    Nodes without a tag for a level are not compared on it, but for `cluster`: there all nodes of one origin are one.
    """
    widened = list(diagnoses)
    _widen_nodes(widened)
    for level in LEVELS:
        groups: dict[tuple[str, str], list[int]] = {}
        for position, diagnosis in enumerate(widened):
            tag = diagnosis.subject.get(level, "" if level != "cluster" else "all")
            if tag:
                groups.setdefault((tag, diagnosis.subject.get("origin", "")), []).append(position)
        for (tag, _), members in groups.items():
            for cause in {verdict.cause for m in members for verdict in widened[m].verdicts} - OWN:
                _widen_group(widened, members, cause, level, tag)
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


def _widen_group(diagnoses: list[Diagnosis], members: Sequence[int], cause: Cause, level: str, tag: str) -> None:
    nodes = {diagnoses[m].subject["node"] for m in members}
    hit: dict[int, Verdict] = {}
    for member in members:
        for verdict in diagnoses[member].verdicts:
            if verdict.cause is cause and verdict.scope not in LEVELS:
                hit[member] = verdict
    hit = _together(hit, diagnoses)
    affected = {diagnoses[m].subject["node"] for m in hit}
    limits = thresholds()
    if len(affected) < limits["shared.nodes"].enter or len(affected) < limits["shared.share"].enter * len(nodes):
        return
    for member, verdict in hit.items():
        kept = {
            name: value for name, value in verdict.subject.items() if name in ("rack", "circuit", "cluster", "origin")
        }
        if level != "cluster" or "cluster" in diagnoses[member].subject:
            kept[level] = tag
        _put(diagnoses, member, verdict, replace(verdict, scope=level, subject=_upwards(kept, level)))


def _together(hit: dict[int, Verdict], diagnoses: Sequence[Diagnosis]) -> dict[int, Verdict]:
    """Those that began within three minutes of the middle one."""
    if not hit:
        return hit
    starts = sorted(verdict.since_ns or diagnoses[member].at_ns for member, verdict in hit.items())
    middle = starts[len(starts) // 2]
    apart_ns = thresholds()["shared.apart_s"].enter * 1e9
    return {
        member: verdict
        for member, verdict in hit.items()
        if abs((verdict.since_ns or diagnoses[member].at_ns) - middle) <= apart_ns
    }


def _upwards(tags: dict[str, str], level: str) -> dict[str, str]:
    """Only the tags at or above the level name the shared place: a rack's subject names no circuit."""
    above = LEVELS[LEVELS.index(level) :]
    return {name: value for name, value in tags.items() if name in above or name == "origin"}
