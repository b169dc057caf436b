"""`pairscope store init` and `pairscope store check`: what a store needs is made where it can be, and how it is is said in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from math import ceil

from agent.collectors.interface import Finding
from agent.settings import AgentSettings
from telemetry.messages import say
from telemetry.store import StoreError, Survey, open_existing, open_store, public_url, remedy_of
from telemetry.store.interface import RARE_DAYS, Store
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
                store.prepare(max(settings.keep_days, RARE_DAYS) * 86_400)
            survey = store.survey()
            key = "ready" if make else "answers"
            found.append(Finding("store", "ok", _say(key, language, store=shown, server=survey.server)))
            if not (make and survey.write_problem):
                found.append(_levels(store, survey, settings, make=make))
    except StoreError as error:
        remedy = say(remedy_of(settings.store_url, error), language)
        return [*found, Finding("store", "error", error.told(language), remedy)]
    return found + _told(survey, settings)


def _levels(store: Store, survey: Survey, settings: AgentSettings, *, make: bool) -> Finding:
    """How long rollups stay: made so by `init`, told by `check` as the server has it."""
    language = settings.language
    if not store.rolls_up:
        return Finding("rollups", "absent", _say("no_levels", language))
    if isinstance(store, VictoriaStore):  # its one -retentionPeriod is for all
        return Finding("rollups", "ok", _say("fleet_levels", language))
    days = settings.keep_1min_days, settings.keep_15min_days
    if make:
        for level_ns, kept in zip((MINUTE_NS, QUARTER_NS), days, strict=True):
            store.prune({"*": time.time_ns() - int(kept * DAY_NS)}, level_ns)
    elif not settings.store_url.startswith("sqlite:"):
        if survey.rollup_days is None:
            return Finding("rollups", "absent", _say("levels_unmade", language))
        days = survey.rollup_days
    return Finding("rollups", "ok", _say("levels", language, minutes=days[0], quarters=days[1]))


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
    keep = ceil(max(settings.keep_days, RARE_DAYS))  # what is one for all has to keep events and verdicts too
    days = (survey.retention_s or 0) / 86_400
    for name in survey.advice:
        text = _say(f"advice.{name}", language, days=days)
        remedy = _say(f"remedy.{name}", language, keep=keep, policy=survey.policy)
        found.append(Finding("settings", "warning", text, remedy))
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
