"""The engine's time by stage: read from its counters over the window, drawn as one bar, and left out where it isn't known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dashboard.breakdown import breakdown
from dashboard.fleet import Fleet, PairNow, read_fleet
from dashboard.history import STAGES, History
from dashboard.history_reader import HistoryReader
from dashboard.selection import SECOND_NS, PairKey, Selection, Window
from dashboard.view import View
from telemetry.catalogue import ENGINE
from telemetry.sample import Sample
from telemetry.store import Store

NOW = 1_767_225_600 * SECOND_NS
KEY = PairKey("n1", "chat")
WINDOW = Window(NOW - 120 * SECOND_NS, NOW, 2 * SECOND_NS)


def look(stages: dict[str, float], language: str = "en") -> View:
    history = History(WINDOW, stages=stages)
    return View(NOW, Selection(pair=KEY, language=language), WINDOW, Fleet(NOW), PairNow(KEY, NOW), history)


def parts(stages: dict[str, float], language: str = "en") -> list[Any]:
    made = json.dumps(breakdown(look(stages, language)), default=lambda value: value.to_plotly_json())
    found: list[Any] = json.loads(made)
    return [part["props"] for part in found]


def test_the_bar_has_a_part_for_each_stage_and_is_full() -> None:
    title, bar, legend = parts({"attention": 30.0, "mlp": 60.0, "sample": 9.9, "embed": 0.1, "schedule": 0.0})
    widths = {part["props"]["className"]: part["props"]["style"]["width"] for part in bar["children"]}
    assert widths == {
        "part part-embed": "0.10%",
        "part part-attention": "30.00%",
        "part part-mlp": "60.00%",
        "part part-sample": "9.90%",
    }
    assert bar["aria-label"] == "embedding 0 %, attention 30 %, MLP 60 %, head, sampling 10 %"
    assert title["children"] == "Where the engine's time goes"
    said = [item["props"]["children"][-1]["props"]["children"] for item in legend["children"]]
    assert said == ["< 1 %", "30 %", "60 %", "10 %"]


def test_it_is_said_in_chinese_too() -> None:
    title, bar, _ = parts({"attention": 1.0, "mlp": 1.0}, "zh")
    assert title["children"] == "引擎的时间花在哪里"
    assert bar["aria-label"] == "注意力 50 %, MLP 50 %"


@pytest.mark.parametrize("stages", [{}, {"mlp": 0.0}])
def test_an_engine_that_tells_nothing_or_did_nothing_has_no_bar(stages: dict[str, float]) -> None:
    assert breakdown(look(stages)) == []


def test_the_seconds_are_what_the_counters_grew_by_within_the_window(store: Store) -> None:
    tags = {"node": "n1", "engine": "chat", "kind": "pairscope", "model": "m", "gpus": ""}
    speeds = {f"stage_{name}_s": 0.01 * 2**number for number, name in enumerate(STAGES)}
    assert speeds.keys() == {name for name in ENGINE.fields if name.startswith("stage_")}
    samples = [
        Sample(
            "engine",
            tags,
            {"up": 1} | {name: 100.0 + rate * at for name, rate in speeds.items()},
            NOW + (at - 300) * SECOND_NS,
        )
        for at in range(301)
    ]
    other = [Sample("engine", tags | {"engine": "silent"}, {"up": 1}, sample.time_ns) for sample in samples]
    store.write([*samples, *other])
    fleet = read_fleet(store, NOW, forget_s=3600, stale_s=15)
    history = HistoryReader(store).read(fleet.pairs[KEY], WINDOW)
    for name in STAGES:
        assert history.stages[name] == pytest.approx(120 * speeds[f"stage_{name}_s"], rel=0.05)
    assert fleet.pairs[KEY].tells_stages
    assert not history.shares
    silent = fleet.pairs[PairKey("n1", "silent")]
    assert not silent.tells_stages
    assert HistoryReader(store).read(silent, WINDOW).stages == {}
