"""The strip: the verdict in words, and the right words when there is no verdict, no engine or no data."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from dashboard.fleet import Fleet, PairNow
from dashboard.history import History, Series
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


@pytest.mark.parametrize(
    ("headline", "tone", "badge"),
    [
        (Line("rules.summary.unexplained", {"loss_pct": 20.0}), "warning", "Below expected"),
        (Line("rules.summary.slow", {"output_pct": 71.0}), "unknown", "Below expected"),
        (Line("rules.summary.warming"), "unknown", "Warming up"),
        (Line("rules.summary.starting", {"engine": "chat", "down_s": 3.0}), "unknown", "Starting"),
        (Line("rules.summary.idle"), "good", "Healthy"),
        (Line("rules.summary.healthy_cpu", {"output_pct": 88.0, "util_pct": 99.0}), "good", "Healthy"),
    ],
)
def test_without_a_verdict_the_tone_follows_triages_headline(headline: Line, tone: str, badge: str) -> None:
    diagnosis = replace(scene.diagnosis(SUBJECT, NOW), headline=headline)
    silent = replace(PAIR, up=None)  # no sample says whether it answers, so triage's word stands
    found = strip_of(look(silent, diagnosis=diagnosis), 15)
    assert found is not None and (found.tone, found.badge) == (tone, badge)
    assert found.text == headline.text("en")


def test_the_strip_is_grey_while_triage_has_not_spoken() -> None:
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


def answered(until_s: int) -> History:
    """The engine answered until so many seconds before NOW, and does not since."""
    window = Window(NOW - 100 * SECOND_NS, NOW, 2 * SECOND_NS)
    up = [1.0 if place < (100 - until_s) // 2 else 0.0 for place in range(50)]
    return History(window, {("engine", "up"): [Series({}, up)]})


def test_an_older_restart_does_not_explain_why_the_engine_is_silent_now() -> None:
    pair = replace(PAIR, up=0, restart=restart(0))
    found = strip_of(look(pair, history=answered(20)), 15)
    assert found is not None and found.text == "Engine chat has not answered since 2025-12-31 23:59:38"
    killed = replace(restart(-9), time_ns=NOW - 21 * SECOND_NS)
    found = strip_of(look(replace(pair, restart=killed), history=answered(20)), 15)
    assert found is not None and "killed by signal 9" in found.text


def test_the_numbers_beside_a_verdict_are_those_that_it_speaks_of() -> None:
    newer = replace(PAIR, output_pct=84.0)
    text = words(strip(look(newer, diagnosis=scene.diagnosis(SUBJECT, NOW)), 15))
    assert "99 %" in text and "84 %" not in text
    assert "84 %" in words(strip(look(newer), 15))


def numbers_later(seconds: float, **fields: float) -> View:
    """A verdict whose words are of so long ago and whose numbers are of now."""
    words_of = scene.diagnosis(SUBJECT, NOW - round(seconds * SECOND_NS), HOT)
    judged = Sample("verdict", {**SUBJECT, "scope": "engine", "cause": "thermal"}, fields, NOW - SECOND_NS)
    pair = replace(PAIR, judged=judged, output_pct=57.0, util_pct=96.0)
    return look(pair, diagnosis=words_of)


def test_numbers_are_the_newest_verdicts_and_words_that_are_older_tell_their_moment() -> None:
    view = numbers_later(115, confidence=0.83, loss_pct=40.0, loss_tokens_per_s=722.0)
    text = words(strip(view, 15))
    for part in ("60 %", "96 %", "loss 40 %", "−722 tokens/s", "confidence 0.83", "figures of 2025-12-31 23:58:05"):
        assert part in text, part
    assert "69 %" not in text and "0.92" not in text
    assert "Output fell 31 %" in text


def test_words_of_the_last_minute_tell_their_moment_only_where_their_loss_is_another() -> None:
    assert "figures of" not in words(strip(numbers_later(40, confidence=0.9, loss_pct=34.0), 15))
    assert "figures of" in words(strip(numbers_later(40, confidence=0.9, loss_pct=37.0), 15))
    assert "figures of" in words(strip(numbers_later(61, confidence=0.9, loss_pct=31.0), 15))


def test_a_newest_verdict_without_a_loss_shows_none_of_an_older_one() -> None:
    text = words(strip(numbers_later(40, confidence=0.9), 15))
    assert "loss" not in text and "tokens/s" not in text


def test_good_words_of_long_ago_stand_beside_the_newest_reading() -> None:
    judged = Sample("verdict", {**SUBJECT, "cause": "none"}, {"confidence": 0.0}, NOW - SECOND_NS)
    pair = replace(PAIR, judged=judged, output_pct=94.0, util_pct=91.0)
    text = words(strip(look(pair, diagnosis=scene.diagnosis(SUBJECT, NOW - 500 * SECOND_NS)), 15))
    for part in ("94 %", "91 %", "Output is 99 % of expected", "figures of 2025-12-31 23:51:40"):
        assert part in text, part


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


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "Engine chat was killed by signal 9 (SIGKILL) at "),
        (3, "Engine chat ended with exit code 3 at "),
        (None, "restarted at "),
    ],
)
def test_an_engine_that_is_back_still_says_how_it_ended_for_some_minutes(code: int | None, said: str) -> None:
    event = replace(restart(code), time_ns=NOW - 60 * SECOND_NS)
    stale = replace(
        scene.diagnosis(SUBJECT, NOW), headline=Line("rules.summary.starting", {"engine": "chat", "down_s": 0.0})
    )
    found = strip_of(look(replace(PAIR, restart=event), diagnosis=stale), 15)
    assert found is not None and said in found.text and "is starting" not in found.text
    healthy = strip_of(look(replace(PAIR, restart=event), diagnosis=scene.diagnosis(SUBJECT, NOW)), 15)
    assert healthy is not None and said in healthy.note and healthy.tone == "good"
    later = replace(event, time_ns=NOW - 600 * SECOND_NS)
    calm = strip_of(look(replace(PAIR, restart=later), diagnosis=scene.diagnosis(SUBJECT, NOW)), 15)
    assert calm is not None and calm.note == ""


def test_a_judgement_that_says_away_gives_way_to_a_sample_that_says_up() -> None:
    stale = replace(scene.diagnosis(SUBJECT, NOW), headline=Line("rules.summary.engine_away", {"engine": "chat"}))
    found = strip_of(look(diagnosis=stale), 15)
    assert found is not None and found.text == "Engine chat answers; learning what is usual"
