"""A drill as data: what was looked at and guessed, the truth, triage's own judgement, and the points."""

from __future__ import annotations

from collections.abc import Sequence

from pairscope.drill.play import Played, judged, sums
from pairscope.moment import iso

Plain = dict[str, object]


def transcript(done: Sequence[Played], seed: int, difficulty: str) -> Plain:
    return {"seed": seed, "difficulty": difficulty, "rounds": [_round(played) for played in done], "sum": sums(done)}


def _round(played: Played) -> Plain:
    truth, guess, points = played.round.truth, played.guess, played.points
    return {
        "round": played.round.number,
        "nodes": list(played.round.nodes),
        "looks": list(played.looks),
        "guess": None if guess is None else {"cause": str(guess.cause), "node": guess.node},
        "truth": {
            "cause": str(played.round.cause),
            "nodes": sorted(played.round.right_nodes),
            "fault": truth.fault if truth else None,
            "harmless_twin": truth.null_twin if truth else False,
            "since": iso(truth.since_ns) if truth else None,
        },
        "triage": [
            {
                "cause": str(incident.cause),
                "confidence": incident.verdict.confidence,
                "scope": incident.scope,
                "subject": dict(incident.subject),
                "after_s": after_s,
            }
            for incident, after_s in judged(played.round)
        ],
        "points": {
            "total": points.total,
            "cause": points.cause,
            "node": points.node,
            "quick": points.quick,
            "right": points.right,
            "false_alarm": points.false_alarm,
            "missed": points.missed,
        },
    }
