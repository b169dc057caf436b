"""The strip: the verdict in words, and the right words when there is no verdict, no engine or no data."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from dashboard.fleet import Fleet, PairNow
from dashboard.selection import SECOND_NS, PairKey, Selection, Window
from dashboard.steps import do_next, steps
from dashboard.strip import strip, strip_of
from dashboard.view import View
from rules.verdict import Line
from telemetry.sample import Sample

scene = sys.modules["scene"]
NOW = 1_767_225_600 * SECOND_NS
HOT = scene.Incident(NOW - 5400 * SECOND_NS, NOW + 10**15)
KEY = PairKey("n1", "chat")
SUBJECT = {"node": "n1", "engine": "chat"}
PAIR = PairNow(KEY, NOW - SECOND_NS, up=1, effort="gpu", baseline="history", output_pct=69.0, util_pct=98.0)


def look(pair: PairNow = PAIR, language: str = "en", **more: Any) -> View:
    selection = Selection(pair=KEY, language=language)
    return View(NOW, selection, Window(NOW - 900 * SECOND_NS, NOW, 2 * SECOND_NS), Fleet(NOW), pair, **more)


def restart(code: int | None) -> Sample:
    fields: dict[str, Any] = {"text": "died"} | ({} if code is None else {"code": code})
    when = NOW - 5215 * SECOND_NS
    return Sample("event", {"node": "n1", "kind": "restart", "subject": "chat"}, fields, when)


def words(component: Any) -> str:
    return json.dumps(component, default=lambda value: value.to_plotly_json(), ensure_ascii=False)


def test_a_verdict_says_what_fell_what_stayed_since_when_and_how_sure() -> None:
    view = look(diagnosis=scene.diagnosis(SUBJECT, NOW, HOT))
    found = strip_of(view, 15)
    assert found is not None
    assert (found.tone, found.badge) == ("problem", "Thermal throttling")
    assert found.text == "Output fell 31 % while GPU-Util stayed at 98 %"
    text = words(strip(view, 15))
    for part in ("since 2025-12-31 22:30:00 (1 h 30 min)", "confidence 0.92", "69 %", "98 %", "n1", "chat"):
        assert part in text, part


def test_the_strip_is_green_when_nothing_is_wrong() -> None:
    found = strip_of(look(diagnosis=scene.diagnosis(SUBJECT, NOW)), 15)
    assert found is not None
    assert (found.tone, found.text) == ("good", "Output is 99 % of expected")


def test_low_output_without_a_cause_is_not_green() -> None:
    diagnosis = replace(scene.diagnosis(SUBJECT, NOW), output_pct=71.0)
    found = strip_of(look(diagnosis=diagnosis), 15)
    assert found is not None and found.tone == "warning"


def test_the_strip_is_grey_while_triage_learns_or_has_not_spoken() -> None:
    learning = replace(scene.diagnosis(SUBJECT, NOW), output_pct=None)
    found = strip_of(look(replace(PAIR, baseline="warming"), diagnosis=learning), 15)
    assert found is not None and (found.tone, found.badge) == ("unknown", "Warming up")
    found = strip_of(look(), 15)
    assert found is not None and (found.tone, found.badge) == ("unknown", "Warming up")
    assert "No verdict yet" in found.text


def test_stale_data_is_grey_with_its_age_whatever_the_last_verdict_was() -> None:
    pair = replace(PAIR, heard_ns=NOW - 63 * SECOND_NS)
    found = strip_of(look(pair, diagnosis=scene.diagnosis(SUBJECT, NOW, HOT)), 15)
    assert found is not None
    assert found.tone == "unknown"
    assert "1 min 3 s" in found.text


def test_a_verdict_that_triage_no_longer_renews_is_grey() -> None:
    found = strip_of(look(diagnosis=scene.diagnosis(SUBJECT, NOW - 95 * SECOND_NS, HOT)), 15)
    assert found is not None
    assert found.tone == "unknown"
    assert "1 min 35 s" in found.text


def test_a_verdict_of_another_version_is_said_to_be_unreadable() -> None:
    found = strip_of(look(unreadable=True), 15)
    assert found is not None and (found.tone, found.badge) == ("unknown", "Verdict unreadable")


@pytest.mark.parametrize(
    ("code", "en", "zh"),
    [
        (
            -9,
            "Engine chat is restarting: killed by signal 9 (SIGKILL) at 2025-12-31 22:33:05",
            "引擎 chat 正在重启:2025-12-31 22:33:05 被信号 9 (SIGKILL) 终止",
        ),
        (
            137,
            "Engine chat is restarting: it ended with exit code 137 at 2025-12-31 22:33:05",
            "引擎 chat 正在重启:2025-12-31 22:33:05 以退出码 137 结束",
        ),
        (None, "Engine chat is restarting since 2025-12-31 22:33:05", "引擎 chat 自 2025-12-31 22:33:05 起正在重启"),
    ],
)
def test_an_engine_that_is_down_says_how_it_ended(code: int | None, en: str, zh: str) -> None:
    pair = replace(PAIR, up=0, restart=restart(code))
    for language, expected in (("en", en), ("zh", zh)):
        found = strip_of(look(pair, language), 15)
        assert found is not None
        assert (found.tone, found.text) == ("problem", expected)


def test_an_engine_that_loads_is_starting_and_no_problem() -> None:
    found = strip_of(look(replace(PAIR, up=0, starting=True)), 15)
    assert found is not None and (found.tone, found.text) == ("unknown", "Engine chat is starting")
    found = strip_of(look(replace(PAIR, up=0, starting=True, restart=restart(-9))), 15)
    assert found is not None and found.tone == "warning"
    assert "killed by signal 9" in found.text and "loading again" in found.text


def test_a_sentence_that_this_version_does_not_know_shows_its_key() -> None:
    diagnosis = replace(scene.diagnosis(SUBJECT, NOW), headline=Line("rules.summary.of_the_future", {"x": 1}))
    found = strip_of(look(diagnosis=diagnosis), 15)
    assert found is not None and found.text == "rules.summary.of_the_future"


def test_all_six_steps_are_shown_with_word_and_symbol_also_before_any_verdict() -> None:
    for view, expected in (
        (look(diagnosis=scene.diagnosis(SUBJECT, NOW, HOT)), ["✓", "●", "✓", "✓", "↳", "?"]),
        (look(), ["○"] * 6),
    ):
        shown = steps(view)
        assert len(shown) == 6
        for entry, symbol in zip(shown, expected, strict=True):
            assert f'"{symbol}"' in words(entry)
    text = words(steps(look(diagnosis=scene.diagnosis(SUBJECT, NOW, HOT))))
    for word in ("valid", "confirmed", "ruled out", "symptom", "no data", "prior 40 %", "now 92 %"):
        assert word in text, word


def test_no_data_does_not_look_like_ruled_out() -> None:
    classes = [entry.className for entry in steps(look(diagnosis=scene.diagnosis(SUBJECT, NOW)))]
    assert classes[5].split()[1] == "step-no_data"
    assert classes[2].split()[1] == "step-ruled_out"


def test_what_to_do_next_is_cheapest_first_with_its_cost() -> None:
    diagnosis = scene.diagnosis(SUBJECT, NOW, HOT)
    verdict = replace(diagnosis.verdicts[0], fixes=tuple(reversed(diagnosis.verdicts[0].fixes)))
    text = words(do_next(look(diagnosis=replace(diagnosis, verdicts=(verdict,)))))
    assert text.index("fan speed") < text.index("thermal paste")
    assert text.index("operations, cheap") < text.index("hardware, costly")
