"""The numbers that rules compare with: one file, `thresholds.toml`, each with its source and with an enter and a leave value."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from rules.verdict import Cause


@dataclass(frozen=True, slots=True)
class Threshold:
    """Reached at or above when enter >= leave, at or below when enter < leave."""

    enter: float
    leave: float
    source: str

    def reached(self, value: float | None, held: bool) -> bool:
        """Whether `value` (None: unknown, never reached) is past the line that counts: `leave` while held, `enter` otherwise."""
        if value is None:
            return False
        line = self.leave if held else self.enter
        return value >= line if self.enter >= self.leave else value <= line


@cache
def thresholds() -> Mapping[str, Threshold]:
    """`table.name` -> threshold. ValueError names an entry that is not complete."""
    tables = tomllib.loads(files("rules").joinpath("thresholds.toml").read_text("utf-8"))
    found: dict[str, Threshold] = {}
    for table, entries in tables.items():
        for name, entry in entries.items():
            try:
                found[f"{table}.{name}"] = Threshold(float(entry["enter"]), float(entry["leave"]), str(entry["source"]))
            except (KeyError, TypeError) as error:
                raise ValueError(f"thresholds.toml: {table}.{name} needs enter, leave and source") from error
    return found


@dataclass(frozen=True, slots=True)
class Bar:
    """The thresholds as they stand for one pair: a cause that is held is let go only past its `leave` value."""

    held: frozenset[Cause] = frozenset()

    def reached(self, key: str, value: float | None) -> bool:
        """`key` is `table.name`; a table named after a held cause, or `loss` while any is held, answers by its leave value."""
        if value is None:
            return False
        if not self.held:
            return thresholds()[key].reached(value, False)
        table = key.partition(".")[0]
        return thresholds()[key].reached(value, table == "loss" or any(cause == table for cause in self.held))

    def enter(self, key: str) -> float:
        return thresholds()[key].enter

    def line(self, key: str) -> float:
        """The value that counts now, as printed beside the evidence."""
        table = key.partition(".")[0]
        held = bool(self.held) if table == "loss" else any(cause == table for cause in self.held)
        threshold = thresholds()[key]
        return threshold.leave if held else threshold.enter
