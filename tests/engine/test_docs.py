"""docs/engine.md says what is: its settings, defaults, metrics and module names exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from engine.metrics import HISTOGRAMS, RANKS
from engine.settings import EngineSettings
from engine.stats import Counters
from telemetry.catalogue import ENGINE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "engine.md").read_text("utf-8")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_setting_is_documented_with_its_default() -> None:
    documented = {}
    for line in section("Settings").splitlines():
        if line.startswith("| `"):
            _, names, defaults, _, _ = line.split("|")
            values = [value.strip("` ") for value in defaults.split(",")]
            for name, value in zip(re.findall(r"`(\w+)`", names), values, strict=True):
                documented[name] = value
    assert documented == {
        field.name: "none" if field.default is None else str(field.default)
        for field in dataclasses.fields(EngineSettings)
    }


def test_every_metric_that_is_named_exists() -> None:
    known = {*ENGINE.fields, *HISTOGRAMS, *(field.name for field in dataclasses.fields(Counters)), "<field>"}
    known |= {f"rank_{name}_total" for name in RANKS}
    named = set(re.findall(r"`pairscope_([\w<>]+)`", TEXT))
    assert len(named) > 10
    assert named <= known
    assert set(HISTOGRAMS) <= named


def test_every_module_that_is_named_exists() -> None:
    names = re.findall(r"`([a-z.]+)`", section("Where things are").split("A further")[0])
    assert len(names) > 12
    for name in (name for name in names if not name.endswith("/")):
        assert (ROOT / "engine" / f"{name}.py").is_file(), name
