"""Reading a signals file: every value in the type that its key asks for, within bounds, or one line that names the key."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rules.signals.keys import FLAG_NAMES, KEYS, Key
from rules.signals.reasons import reason_of
from telemetry.lineprotocol import printable
from telemetry.messages import say

LARGEST_FILE_BYTES = 8 * 2**20
MOST_INCIDENTS = 20_000
MOST_KEYS = 500
LONGEST_LIST = 4096
LONGEST_TEXT = 200
LONGEST_LAUNCH = 4000
NOT_READ = frozenset(("n/a", "na", "[n/a]", "not supported", "[not supported]", "unknown", "nan"))
"""What tools print for a reading that they have not; it is the same as an absent key."""


KINDS = {"event": "flag"}


class SignalsError(ValueError):
    """A file or a value that can't be judged: one line for the person who gave it."""


@dataclass(frozen=True, slots=True)
class Signals:
    """One incident: what is told, by key, in its type; an absent key is unknown."""

    name: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    reasons: frozenset[str] | None = None  # of NVML that are active; None: not told
    impossible: tuple[str, ...] = ()  # keys whose reading nothing can have
    unknown: tuple[str, ...] = ()  # keys that mean nothing here

    @property
    def empty(self) -> bool:
        told = self.numbers or self.flags or self.texts or self.lists or self.impossible
        return not told and self.reasons is None


def read_signals(path: Path, language: str = "en") -> tuple[list[Signals], bool]:
    """(the incidents of the file, or of stdin for `-`, whether it holds a list). SignalsError in one line for what can't be read."""
    try:
        if str(path) == "-":
            path = Path("stdin")
            body = sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1) if sys.stdin is not None else b""
        else:
            with path.open("rb") as file:
                body = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise SignalsError(_say("unreadable", language, path=path, reason=error.strerror or error)) from None
    if len(body) > LARGEST_FILE_BYTES:
        raise SignalsError(_say("too_large", language, path=path, most=LARGEST_FILE_BYTES // 2**20))
    try:
        told = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        reason = printable(str(error))[:LONGEST_TEXT]
        raise SignalsError(_say("not_json", language, path=path, reason=reason)) from None
    if not isinstance(told, list):
        return [parse(told, language)], False
    if len(told) > MOST_INCIDENTS:
        raise SignalsError(_say("too_many", language, path=path, most=MOST_INCIDENTS))
    return [parse(entry, language, f"{position}") for position, entry in enumerate(told, 1)], True


def parse(told: object, language: str = "en", name: str = "") -> Signals:
    """One object of keyed signals. SignalsError names the incident and the key that is not what it should be."""
    where = say("rules.signals.of", language, name=name) if name else ""
    if told is None:
        return Signals(name)
    if not isinstance(told, dict):
        raise SignalsError(_say("no_object", language, where=where, got=_kind_of(told, language)))
    if len(told) > MOST_KEYS:
        raise SignalsError(_say("too_many_keys", language, where=where, most=MOST_KEYS))
    numbers: dict[str, float] = {}
    flags: dict[str, bool] = {}
    texts: dict[str, str] = {}
    lists: dict[str, tuple[float, ...]] = {}
    reasons: frozenset[str] | None = None
    impossible: list[str] = []
    unknown: list[str] = []
    for written, value in told.items():
        raw = written if written in KEYS else re.sub(r"[\s-]+", "_", written.strip().lower())
        key = KEYS.get(raw)
        if key is None:
            unknown.append(printable(written)[:40])
            continue
        if value is None or (isinstance(value, str) and value.strip().lower() in NOT_READ and key.kind != "text"):
            continue
        try:
            if key.kind == "number":
                number = _number(value)
                if key.low <= number <= key.high:
                    numbers[raw] = number
                else:
                    impossible.append(raw)
            elif key.kind == "event" and isinstance(value, str):
                flags[raw], texts[raw] = True, _text(value, key)
            elif key.kind in ("flag", "event"):
                flags[raw] = _flag(value)
            elif key.kind == "text":
                texts[raw] = _text(value, key, LONGEST_LAUNCH if raw == "launch" else LONGEST_TEXT)
            elif key.kind == "names":
                reasons, strange = _names(value)
                unknown += [f"flags: {name}" for name in strange]
            else:
                listed = _list(value)
                if all(key.low <= number <= key.high for number in listed):
                    lists[raw] = listed
                else:
                    impossible.append(raw)
        except TypeError:
            wanted = say(
                f"rules.signals.kind_{KINDS.get(key.kind, key.kind) if not key.choices else 'choice'}", language
            )
            choices = f" ({', '.join(key.choices or FLAG_NAMES)})" if key.choices or key.kind == "names" else ""
            got = _kind_of(value, language)
            raise SignalsError(
                _say("wrong_type", language, where=where, signal=raw, wanted=wanted + choices, got=got)
            ) from None
    title = texts.pop("id", "") or name
    return Signals(title, numbers, flags, texts, lists, reasons, tuple(impossible), tuple(unknown))


def near(unknown: str) -> str | None:
    """The key that was probably meant."""
    close = difflib.get_close_matches(unknown, KEYS, n=1, cutoff=0.8)
    return close[0] if close else None


def _say(key: str, language: str, **values: object) -> str:
    return say(f"rules.signals.{key}", language, **values)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _each_once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """ValueError for a key that is there twice: nobody knows which of its values was meant."""
    told: dict[str, object] = {}
    for name, value in pairs:
        if name in told:
            raise ValueError(f"{name!r} is told twice")
        told[name] = value
    return told


def _number(value: object) -> float:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return math.inf
        return number
    raise TypeError


def _flag(value: object) -> bool:
    """True and false; a count or a size of the thing says as much."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value > 0
    raise TypeError


def _text(value: object, key: Key, longest: int = LONGEST_TEXT) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError
    text = printable(str(value)[:longest])
    if key.choices and text.lower() not in key.choices:
        raise TypeError
    return text.lower() if key.choices else text


def _list(value: object) -> tuple[float, ...]:
    entries: Sequence[object] = value if isinstance(value, list) else [value]
    if len(entries) > LONGEST_LIST:
        raise TypeError
    return tuple(_number(entry) for entry in entries)


def _names(value: object) -> tuple[frozenset[str] | None, list[str]]:
    entries = value if isinstance(value, list) else [value]
    if len(entries) > LONGEST_LIST or not all(isinstance(entry, str) for entry in entries):
        raise TypeError
    names = {str(entry): reason_of(str(entry)) for entry in entries}
    strange = [printable(entry.strip().lower())[:40] for entry, name in names.items() if name is None]
    known = frozenset(name for name in names.values() if name)
    return known if known or not strange else None, strange  # of words that are not understood nothing follows


def _kind_of(value: object, language: str) -> str:
    for types, kind in ((bool, "flag"), (int | float, "number"), (str, "text"), (list, "numbers"), (dict, "object")):
        if isinstance(value, types):
            return say(f"rules.signals.kind_{kind}", language)
    return say("rules.signals.kind_nothing", language)
