"""The alerts on disk, read entry by entry: a damaged one costs itself and not the others."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rules.alerts import AlertMachine, AlertSettings, alert_of
from rules.statefile import put_aside

log = logging.getLogger(__name__)

BEGINNING = re.compile(r'\{\s*"fingerprint"\s*:')
HEAD = re.compile(r'\s*\{\s*"version"\s*:\s*1\s*,')


def load_alerts(path: Path, settings: AlertSettings | None = None) -> AlertMachine:
    """What can be read of the file; one line in the log says how many were lost. What was damaged is kept beside it as `.damaged`."""
    machine = AlertMachine(settings)
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return machine
    except OSError as error:
        put_aside(path, str(error))
        return machine
    try:
        entries = [*_entries(text)]
    except ValueError as error:
        put_aside(path, str(error))
        return machine
    reasons: list[str] = []
    for entry in entries:
        try:
            if isinstance(entry, ValueError):
                raise entry
            alert = alert_of(entry)
            machine.alerts[alert.fingerprint] = alert
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        _keep(path, len(reasons), len(machine.alerts), reasons[0])
    return machine


def _entries(text: str) -> Iterator[object]:
    """Each entry, or the ValueError of one that can't be read. ValueError for what is no file of alerts of this version."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        if HEAD.match(text) is None:
            raise ValueError(str(error)) from None
        yield from _salvaged(text)
        return
    if not isinstance(state, dict) or state.get("version") != 1 or not isinstance(state.get("alerts"), list):
        raise ValueError("it was made by another version")
    yield from state["alerts"]


def _salvaged(text: str) -> Iterator[object]:
    """Of a text that is broken somewhere: whatever begins like an entry and ends before the next one does."""
    starts = [found.start() for found in BEGINNING.finditer(text)]
    if not starts:
        yield ValueError("no entry in it")
    for start, following in zip(starts, [*starts[1:], len(text)], strict=True):
        try:
            entry, end = json.JSONDecoder().raw_decode(text, start)
            if end > following or "\ufffd" in text[start:end]:
                raise ValueError("bytes that are no text")
            yield entry
        except (ValueError, RecursionError) as error:
            yield ValueError(str(error))


def _keep(path: Path, lost: int, kept: int, reason: str) -> None:
    if not kept:
        put_aside(path, reason)
        return
    aside = path.with_name(path.name + ".damaged")
    log.warning(
        "%s: %d of its alerts can't be read (%s) and are lost, %d go on; kept as %s",
        path,
        lost,
        reason,
        kept,
        aside.name,
    )
    try:
        shutil.copyfile(path, aside)
    except OSError as error:
        log.warning("%s can't be kept: %s", path, error)
