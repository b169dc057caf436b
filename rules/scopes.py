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
        shared = replace(verdict, scope=level, subject=_upwards(kept, level))
        diagnosis = diagnoses[member]
        diagnoses[member] = replace(
            diagnosis, verdicts=tuple(shared if entry is verdict else entry for entry in diagnosis.verdicts)
        )


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
