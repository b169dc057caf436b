"""How every daemon of the house writes its log: one line an event on stderr, with local time and level; in systemd's journal without."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime


def to_stderr(environment: Mapping[str, str] = os.environ, *, also: Sequence[str] = ()) -> None:
    """Give warnings and worse of this process the house's form, and what the loggers `also` merely tell. A second call changes nothing."""
    handler = logging.lastResort
    assert handler is not None
    handler.setLevel(logging.INFO if also else handler.level)
    for name in also:
        logging.getLogger(name).setLevel(logging.INFO)
    handler.setFormatter(_Plain() if _is_journal(environment) else _Timed())
    root = logging.getLogger()
    if handler not in root.handlers:
        root.addHandler(handler)


def and_then(problem: str, what: str) -> str:
    """A problem in one line, and what happens next: a question that ends the first is not run on."""
    return f"{problem} {what[:1].upper()}{what[1:]}" if problem.endswith(("?", "!", ".")) else f"{problem}; {what}"


class _Timed(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        return f"{when} {record.levelname.lower()}: {super().format(record)}"


class _Plain(logging.Formatter):
    """The journal puts its own time before each line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def _is_journal(environment: Mapping[str, str]) -> bool:
    """Whether stderr itself is the journal's, as systemd.exec(5) has it: a child whose stderr is a file inherits the variable too."""
    told = environment.get("JOURNAL_STREAM", "")
    try:
        place = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return told == f"{place.st_dev}:{place.st_ino}"
