"""What record, replay and export have in common on the command line: which samples, how a copy ends, how it is told."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from pairscope.moment import iso, moment_ns, span_ns
from pairscope.selection import Selection
from pairscope.whole_file import CannotCopy
from telemetry import catalogue
from telemetry.lineprotocol import printable
from telemetry.messages import say

DEFAULT_SPAN_NS = 3600 * 10**9
AGAIN_S = 0.05


class Stopped(BaseException):
    """Told to stop by a signal; `code` is what the shell expects."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped inside the block, so that whatever is open is cleaned up.

    A signal that comes while an object is being finalised would be heard by nobody, since what is raised there is thrown away:
    it is sent again until the block hears it.
    """
    inside, unraisable, main = True, sys.unraisablehook, threading.get_ident()

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stopped(128 + number)

    def again(number: int) -> None:
        if inside:
            signal.pthread_kill(main, number)

    def thrown_away(told: sys.UnraisableHookArgs) -> None:
        if isinstance(told.exc_value, Stopped):
            threading.Timer(AGAIN_S, again, (told.exc_value.code - 128,)).start()
        else:
            unraisable(told)

    sys.unraisablehook = thrown_away
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        inside = False
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = unraisable


def select(
    *,
    start: str | None,
    end: str | None,
    last: str | None,
    nodes: Sequence[str] | None,
    measurements: Sequence[str] | None,
    now_ns: int,
    language: str,
    ahead: bool = False,
) -> Selection:
    """The selection that the options name. CannotCopy for a mistake in them. `ahead`: without an end it goes on for ever."""
    unknown = [name for name in measurements or () if name not in catalogue.MEASUREMENTS]
    if unknown:
        known = ", ".join(catalogue.MEASUREMENTS)
        raise CannotCopy(say("recording.measurement_wrong", language, name=unknown[0], known=known))
    if start and last:
        raise CannotCopy(say("recording.one_start", language))
    end_ns = now_ns if end is None else _moment(end, "--to", language)
    start_ns = end_ns - DEFAULT_SPAN_NS
    if last:
        start_ns = end_ns - span_option(last, "--last", language)
    elif start:
        start_ns = _moment(start, "--from", language)
    if end is None and ahead:
        end_ns = 2**62
    if start_ns >= end_ns:
        raise CannotCopy(say("recording.order_wrong", language, start=iso(start_ns), end=iso(end_ns)))
    chosen = tuple(dict.fromkeys(measurements or ())) or tuple(catalogue.MEASUREMENTS)
    return Selection(max(start_ns, 1), end_ns, tuple(dict.fromkeys(nodes or ())), chosen)


def _moment(text: str, option: str, language: str) -> int:
    try:
        return moment_ns(text)
    except (ValueError, OverflowError):
        raise CannotCopy(say("recording.when_wrong", language, option=option, text=text)) from None


def span_option(text: str, option: str, language: str) -> int:
    try:
        return span_ns(text)
    except ValueError:
        raise CannotCopy(say("recording.span_wrong", language, option=option, text=text)) from None


def when(time_ns: int | None) -> str | None:
    return None if time_ns is None else iso(time_ns)


def tell(line: str, *, warning: bool = False) -> None:
    """One line on stderr; nothing that came out of a recording or a store reaches the terminal as a command."""
    style = "yellow" if warning else ""
    Console(stderr=True, soft_wrap=True).print(printable(line), style=style, markup=False, highlight=False)


def print_summary(summary: dict[str, object], *, to_stderr: bool = False) -> None:
    """One line of JSON; on stderr when the data itself went to stdout."""
    print(json.dumps(summary, ensure_ascii=False), file=sys.stderr if to_stderr else sys.stdout)
