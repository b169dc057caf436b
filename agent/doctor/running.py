"""Does an agent run here already: what its /healthz says, or who else has its port."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from agent.collectors.interface import Finding, Level
from agent.sampler import misses_many
from agent.settings import AgentSettings
from telemetry.lineprotocol import printable
from telemetry.messages import say

DEADLINE_S = 3.0
FROZEN_S = 10.0
FROZEN_INTERVALS = 5
"""A collector that has not answered for this long, whichever is more, answers no more."""

LATE_S = 60.0
"""A delivery that is so far behind is worth a warning."""


def findings(settings: AgentSettings) -> Sequence[Finding]:
    language = settings.language
    place = {"host": settings.host, "port": settings.port}
    if settings.port == 0:
        return [Finding("agent", "absent", say("doctor.agent.any_port", language))]
    said = ask_health(settings)
    if said is None:
        reason = _why_not_bindable(settings.host, settings.port)
        if reason:
            remedy = say("doctor.agent.port_remedy", language)
            return [Finding("agent", "error", say("doctor.agent.port_taken", language, **place, reason=reason), remedy)]
        hosted = ", ".join(engine.name for engine in settings.engines if engine.command)
        key = "start_remedy_engines" if hosted else "start_remedy"
        remedy = say(f"doctor.agent.{key}", language, engines=hosted)
        return [Finding("agent", "absent", say("doctor.agent.none", language, **place), remedy)]
    if "status" not in said or "ticks" not in said:
        remedy = say("doctor.agent.port_remedy", language)
        return [Finding("agent", "error", say("doctor.agent.other", language, **place), remedy)]
    return [
        *_ticks(said, language),
        *_elsewhere(said, settings),
        *_paused(said, language),
        *_frozen(said, language),
        *_delivery(said, language),
    ]


def ask_health(settings: AgentSettings) -> Mapping[str, Any] | None:
    """What answers at the agent's address says of itself; {} when it is no agent, None when nothing answers."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    try:
        answer = httpx.get(f"http://{host}:{settings.port}/healthz", timeout=DEADLINE_S, trust_env=False)
        said = answer.json()
    except httpx.ConnectError:
        return None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, UnicodeError):
        return {}
    return said if isinstance(said, dict) else {}


def without_paused(settings: AgentSettings) -> AgentSettings:
    """The settings, without the devices that an agent here has let go of on request: whoever asked wants nobody to open them."""
    if (ask_health(settings) or {}).get("paused_until"):
        return replace(settings, nvml=False, amd=False, ascend=False)
    return settings


def _ticks(said: Mapping[str, Any], language: str) -> Sequence[Finding]:
    age = said.get("tick_age_s")
    values = {
        "ticks": _number(said.get("ticks")),
        "age_s": _number(age),
        "missed": _number(said.get("ticks_missed")),
        "node": printable(str(said.get("node", "")))[:64],
    }
    status = said["status"]
    if status == "starting":
        return [Finding("agent", "warning", say("doctor.agent.starting", language, **values))]
    if status == "stalled":
        remedy = say("doctor.agent.stalled_remedy", language)
        return [Finding("agent", "error", say("doctor.agent.stalled", language, **values), remedy)]
    missed, due = int(_number(said.get("ticks_missed_of_late"))), int(_number(said.get("ticks_due_of_late")))
    if misses_many(missed, due):
        text = say("doctor.agent.missed", language, node=values["node"], of_late=missed, due=due)
        return [Finding("agent", "warning", text, say("doctor.agent.missed_remedy", language))]
    return [Finding("agent", "ok", say("doctor.agent.ticks", language, **values))]


def _elsewhere(said: Mapping[str, Any], settings: AgentSettings) -> Sequence[Finding]:
    """An agent with another state folder has another configuration than the one that is examined."""
    theirs = said.get("state_dir")
    if not isinstance(theirs, str) or os.path.realpath(theirs) == os.path.realpath(settings.state_dir):
        return []
    language, path = settings.language, printable(theirs)[:4096]
    remedy = say("doctor.agent.elsewhere_remedy", language, path=path)
    return [Finding("agent", "warning", say("doctor.agent.elsewhere", language, path=path), remedy)]


def _paused(said: Mapping[str, Any], language: str) -> Sequence[Finding]:
    until = said.get("paused_until")
    if not until:
        return []
    text = say("doctor.agent.paused", language, until=printable(str(until))[:64])
    return [Finding("agent", "warning", text, "pairscope resume")]


def _frozen(said: Mapping[str, Any], language: str) -> Sequence[Finding]:
    """The collectors that stopped answering while the ticks went on."""
    progress = said.get("collectors")
    ages = {
        printable(str(name))[:64]: _number(ages.get("answered_age_s"))
        for name, ages in (progress.items() if isinstance(progress, dict) else ())
        if isinstance(ages, dict)
    }
    limit_s = max(FROZEN_S, FROZEN_INTERVALS * _number(said.get("interval_s")))
    remedy = say("doctor.agent.frozen_remedy", language)
    return [
        Finding("agent", "error", say("doctor.agent.frozen", language, name=name, age_s=age_s), remedy)
        for name, age_s in ages.items()
        if age_s > limit_s
    ]


def _delivery(said: Mapping[str, Any], language: str) -> Sequence[Finding]:
    delivery = said.get("delivery")
    delivery = delivery if isinstance(delivery, dict) else {}
    values = {
        "lag_s": _number(delivery.get("lag_s")),
        "spool_mib": _number(said.get("spool_bytes")) / (1 << 20),
        "error": printable(str(delivery.get("error") or ""))[:200],
    }
    if delivery.get("connected") is False:
        remedy = say("doctor.store.down_remedy", language)
        return [Finding("agent", "error", say("doctor.agent.not_delivering", language, **values), remedy)]
    level: Level = "warning" if _number(delivery.get("lag_s")) > LATE_S else "ok"
    return [Finding("agent", level, say("doctor.agent.delivers", language, **values))]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _why_not_bindable(host: str, port: int) -> str:
    """Why the agent could not listen there; empty when it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""
