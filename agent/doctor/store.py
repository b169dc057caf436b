"""Does the store answer. It is asked a question, never written to; an embedded store that isn't there yet is not made."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from agent.collectors.interface import Finding
from telemetry.messages import say
from telemetry.store import StoreDown, StoreError, open_existing, public_url, remedy_of
from telemetry.store.sqlite import path_of
from telemetry.store.sqlite_file import check_layout, check_parts

RECENT_NS = 3600 * 10**9


def findings(url: str, language: str) -> Sequence[Finding]:
    shown = public_url(url)
    if url.startswith("sqlite://"):
        return [_embedded(url, shown, language)]
    try:
        opened = open_existing(url)
        if opened is None:
            return [Finding("store", "ok", say("doctor.store.to_be_made", language, store=shown))]
        with closing(opened) as store:
            nodes = {tags.get("node", "") for tags in store.series("agent", since_ns=time.time_ns() - RECENT_NS)}
    except StoreDown as error:
        remedy = say(remedy_of(url, error), language)
        return [Finding("store", "error", say("doctor.store.down", language, reason=error.told(language)), remedy)]
    except StoreError as error:
        remedy = say(remedy_of(url, error), language)
        return [Finding("store", "error", say("doctor.store.unusable", language, reason=error.told(language)), remedy)]
    return [Finding("store", "ok", say("doctor.store.answers", language, store=shown, count=len(nodes)))]


def _embedded(url: str, shown: str, language: str) -> Finding:
    path = Path(url.removeprefix("sqlite://"))
    try:
        path = path_of(url)
        check_parts(path)
        if not path.exists():
            return Finding("store", "ok", say("doctor.store.to_be_made", language, store=shown))
        _read(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, os.strerror(13))
    except StoreError as error:
        remedy = say("doctor.store.unusable_remedy", language)
        reason = error.told(language)
        return Finding("store", "error", say("doctor.store.unusable", language, reason=reason), remedy)
    except (OSError, sqlite3.Error) as error:
        reason = f"{path}: {getattr(error, 'strerror', None) or error}"
        remedy = say("doctor.store.unusable_remedy", language)
        return Finding("store", "error", say("doctor.store.unusable", language, reason=reason), remedy)
    return Finding("store", "ok", say("doctor.store.file", language, store=shown, mib=path.stat().st_size / (1 << 20)))


def _read(path: Path) -> None:
    """OSError, sqlite3.Error or StoreError for what is no store. `immutable` where no writer is at work, so that no file appears."""
    at_work = path.with_name(path.name + "-shm").exists()
    options = "mode=ro" if at_work else "mode=ro&immutable=1"
    with closing(sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True, timeout=2.0)) as connection:
        check_layout(connection, path)
