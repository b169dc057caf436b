"""`pairscope store init` and `pairscope store check`: what a store needs is made where it can be, and how it is is said in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime

from agent.collectors.interface import Finding
from agent.settings import AgentSettings
from telemetry.messages import say
from telemetry.store import StoreDown, StoreError, Survey, open_existing, open_store, public_url
from telemetry.store.interface import Store
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS
from telemetry.store.victoriametrics import VictoriaStore

DAY_NS = 86_400 * 10**9


def initialise(settings: AgentSettings) -> Sequence[Finding]:
    """Make the file, the database and the retention of rollups, where this user may; then say how the store is. Safe to repeat."""
    return _examined(settings, make=True)


def check(settings: AgentSettings) -> Sequence[Finding]:
    return _examined(settings, make=False)


def _examined(settings: AgentSettings, *, make: bool) -> Sequence[Finding]:
    language = settings.language
    found: list[Finding] = []
    try:
        shown = public_url(settings.store_url)
        opened = open_store(settings.store_url) if make else open_existing(settings.store_url)
        if opened is None:
            return [Finding("store", "error", _say("none", language, store=shown), _say("none_remedy", language))]
        with closing(opened) as store:
            if make:
                store.prepare(settings.keep_days * 86_400)
            survey = store.survey()
            key = "ready" if make else "answers"
            found.append(Finding("store", "ok", _say(key, language, store=shown, server=survey.server)))
            if make and not survey.write_problem:
                found += _levels(store, settings)
    except StoreError as error:
        remedy = say(f"doctor.store.{'down' if isinstance(error, StoreDown) else 'unusable'}_remedy", language)
        return [*found, Finding("store", "error", error.told(language), remedy)]
    return found + _told(survey, settings)


def _levels(store: Store, settings: AgentSettings) -> list[Finding]:
    """Rollups stay as long as the configuration says."""
    if not store.rolls_up:
        return [Finding("rollups", "absent", _say("no_levels", settings.language))]
    if isinstance(store, VictoriaStore):  # its one -retentionPeriod is for all
        return [Finding("rollups", "ok", _say("fleet_levels", settings.language))]
    now_ns = time.time_ns()
    levels = ((MINUTE_NS, settings.keep_1min_days), (QUARTER_NS, settings.keep_15min_days))
    for level_ns, days in levels:
        store.prune({"*": now_ns - int(days * DAY_NS)}, level_ns)
    minutes, quarters = (days for _, days in levels)
    return [Finding("rollups", "ok", _say("levels", settings.language, minutes=minutes, quarters=quarters))]


def _told(survey: Survey, settings: AgentSettings) -> list[Finding]:
    language = settings.language
    found = [Finding("read", "ok", _say("readable", language))]
    if survey.write_problem:
        found.append(Finding("write", "error", survey.write_problem, _say("write_remedy", language)))
    else:
        found.append(Finding("write", "ok", _say("writable", language)))
    if survey.oldest_ns is None or survey.newest_ns is None:
        found.append(Finding("samples", "ok", _say("empty", language)))
    else:
        span = {"oldest": _moment(survey.oldest_ns), "newest": _moment(survey.newest_ns)}
        found.append(Finding("samples", "ok", _say("samples", language, **span)))
    if survey.size_bytes is not None:
        sizes = {"size": survey.size_bytes / 1e6, "free": (survey.free_bytes or 0) / 1e9}
        found.append(Finding("size", "ok", _say("size", language, **sizes)))
    found.append(Finding("retention", "ok", _retention(survey, settings)))
    for name in survey.advice:
        days = (survey.retention_s or 0) / 86_400
        text = _say(f"advice.{name}", language, days=days)
        found.append(Finding("settings", "warning", text, _say(f"remedy.{name}", language, keep=settings.keep_days)))
    return found


def _retention(survey: Survey, settings: AgentSettings) -> str:
    if survey.retention_s:
        return _say("retention.server", settings.language, days=survey.retention_s / 86_400)
    if survey.retention_s == 0:
        return _say("retention.endless", settings.language)
    if settings.store_url.startswith("sqlite:"):
        return _say("retention.agent", settings.language, days=settings.keep_days)
    return _say("retention.unknown", settings.language)


def _moment(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _say(key: str, language: str, **values: object) -> str:
    return say(f"store.{key}", language, **values)
