"""The neutral message of an incident as JSON: what Alertmanager's webhook (version 4) sends, and the pair and the verdict besides."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from rules.alerts import FIRING, Alert, Condition, Transition
from rules.present import not_live_mark
from rules.verdict import Line
from rules.webhook import Message, encode
from telemetry.messages import say

NEVER = "0001-01-01T00:00:00Z"
SHOWN = 20
"""Alerts listed in one message; the counts are taken before it is cut."""


@dataclass(frozen=True, slots=True)
class Voice:
    """How messages speak: the language, the dashboard's address for links ("" for none), and which receiver they are for."""

    language: str = "en"
    external_url: str = ""
    receiver: str = "pairscope"


def place_name(place: Mapping[str, str], scope: str) -> str:
    """The shortest name of a place: its node, or its rack, circuit or cluster."""
    return place.get(scope) or place.get("node") or place.get("rack") or place.get("cluster") or "?"


def summary_text(alert: Alert, language: str) -> str:
    return Line(alert.summary_key, alert.summary_values).text(language)


def messages_of(transitions: Sequence[Transition], voice: Voice) -> list[Message]:
    """One message for all incidents of one cause that changed alike at once: a thousand GPUs make one message."""
    groups: dict[tuple[str, str, bool], list[Transition]] = {}
    for transition in transitions:
        key = (transition.alert.cause, transition.state, transition.alert.simulated)
        groups.setdefault(key, []).append(transition)
    return [_message(group, voice) for group in groups.values()]


def _message(group: Sequence[Transition], voice: Voice) -> Message:
    first = group[0]
    alerts = [_alert(transition, voice) for transition in group]
    firing = sum(1 for transition in group if transition.state == FIRING)
    labels = [_labels(transition.alert) for transition in group]
    common = {name: value for name, value in labels[0].items() if all(other.get(name) == value for other in labels)}
    payload: dict[str, object] = {
        "version": "4",
        "groupKey": f"{{}}:{{alertname={first.alert.cause!r}}}",
        "status": "firing" if firing else "resolved",
        "receiver": voice.receiver,
        "groupLabels": {"alertname": first.alert.cause},
        "commonLabels": common,
        "commonAnnotations": alerts[0]["annotations"] if len(alerts) == 1 else {},
        "externalURL": voice.external_url,
        "truncatedAlerts": max(0, len(alerts) - SHOWN),
        "numFiring": firing,
        "numResolved": len(group) - firing,
        "simulated": first.alert.simulated,
        "verdict": _verdict(first, voice.language),
        "pair": _pair(first.condition),
        "links": {"pair": _link(first.alert, voice)},
        "alerts": alerts[:SHOWN],
    }
    key = hashlib.sha256("|".join(sorted(f"{t.alert.incident}:{t.state}" for t in group)).encode()).hexdigest()[:32]
    return Message(key, encode(payload))


def _labels(alert: Alert) -> dict[str, str]:
    return {"alertname": alert.cause, "severity": alert.severity, "scope": alert.scope, **alert.place}


def _alert(transition: Transition, voice: Voice) -> dict[str, object]:
    alert, condition = transition.alert, transition.condition
    firing = transition.state == FIRING
    place = place_name(alert.place, alert.scope)
    if alert.simulated:
        place = f"{not_live_mark(alert.place, voice.language)} {place}"
    cause = say(f"rules.cause.{alert.cause}", voice.language)
    if firing:
        title = say(
            "rules.alert.firing", voice.language, cause=cause, place=place, summary=summary_text(alert, voice.language)
        )
    else:
        minutes = ((alert.resolved_ns or 0) - alert.began_ns) / 60e9
        key, cards = ("rules.alert.gone", ", ".join(alert.gone)) if alert.is_gone else ("rules.alert.resolved", "")
        title = say(key, voice.language, cause=cause, place=place, minutes=max(minutes, 0.0), gpus=cards)
    annotations = {"summary": title}
    if condition is not None:
        annotations["description"] = "; ".join(line.text(voice.language) for line in condition.verdict.evidence)
        annotations["fix"] = "; ".join(fix.text(voice.language) for fix in condition.verdict.fixes)
        annotations["affected"] = ", ".join(_member(member) for member in condition.members[:5])
    return {
        "status": transition.state,
        "labels": _labels(alert),
        "annotations": annotations,
        "startsAt": _time(alert.began_ns),
        "endsAt": NEVER if firing or alert.resolved_ns is None else _time(alert.resolved_ns),
        "generatorURL": _link(alert, voice),
        "fingerprint": alert.fingerprint,
    }


def _member(member: Mapping[str, str]) -> str:
    return "/".join(member[name] for name in ("node", "engine", "gpu") if name in member)


def _verdict(transition: Transition, language: str) -> dict[str, object]:
    alert, condition = transition.alert, transition.condition
    found: dict[str, object] = {
        "cause": alert.cause,
        "rank": 1,
        "confidence": round(alert.confidence, 3),
        "loss_pct": None if alert.loss_pct is None else round(alert.loss_pct, 1),
        "scope": alert.scope,
        "summary": summary_text(alert, language),
        "evidence": [],
    }
    if condition is not None:
        found["rank"] = 1 + list(condition.diagnosis.verdicts).index(condition.verdict)
        found["step"] = int(condition.verdict.step)
        found["evidence"] = [
            {"text": line.text(language), "lane": line.lane, **line.values} for line in condition.verdict.evidence
        ]
    return found


def _pair(condition: Condition | None) -> dict[str, object]:
    if condition is None:
        return {}
    diagnosis = condition.diagnosis
    return {
        "tokens_per_s": _round(diagnosis.tokens_per_s),
        "expected": _round(diagnosis.expected_tokens_per_s),
        "output_pct": _round(diagnosis.output_pct),
        "gpu_util": _round(diagnosis.util_pct),
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _link(alert: Alert, voice: Voice) -> str:
    if not voice.external_url:
        return ""
    node = alert.place.get("node") or (alert.nodes[0] if alert.nodes else "")
    return f"{voice.external_url.rstrip('/')}/?node={quote(node, safe='')}"


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
