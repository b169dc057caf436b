"""What an address names: every state has one, nonsense falls back, nothing raises."""

from __future__ import annotations

import pytest

from dashboard.selection import SECOND_NS, PairKey, read

NOW = 1_767_225_600 * SECOND_NS


def test_an_empty_address_means_the_defaults_of_the_installation() -> None:
    selection = read({}, "zh", NOW)
    assert (selection.pair, selection.range, selection.language, selection.theme) == (None, "15m", "zh", "light")
    assert not selection.zoomed


def test_an_address_names_everything_that_a_viewer_can_choose() -> None:
    query = {
        "node": "n/1 &",
        "engine": "聊天",
        "range": "6h",
        "lang": "zh",
        "theme": "dark",
        "tz": "local",
        "offset": "-210",
    }
    selection = read(query, "en", NOW)
    assert selection.pair == PairKey("n/1 &", "聊天")
    assert (selection.range, selection.language, selection.theme) == ("6h", "zh", "dark")
    assert (selection.local, selection.offset_s) == (True, -210 * 60)


@pytest.mark.parametrize(
    "query",
    [
        {"range": "3y"},
        {"lang": "xx"},
        {"theme": "<script>"},
        {"from": "1", "to": "-5"},
        {"from": "9" * 400, "to": "1"},
        {"from": "²", "to": "³"},
        {"tz": "local", "zone": "../../etc/passwd"},
        {"tz": "local", "zone": "Mars/Olympus", "offset": "99999"},
        {"node": ""},
    ],
)
def test_nonsense_falls_back_to_the_defaults(query: dict[str, str]) -> None:
    selection = read(query, "en", NOW)
    assert (selection.range, selection.language, selection.theme) == ("15m", "en", "light")
    assert (selection.pair, selection.start_ms, selection.offset_s) == (None, None, 0)


def test_a_name_of_any_length_is_cut() -> None:
    pair = read({"node": "n" * 10_000}, "en", NOW).pair
    assert pair is not None
    assert len(pair.node) == 256


def test_a_zoomed_span_gets_finer_buckets_and_never_the_future() -> None:
    now_ms = NOW // 10**6
    query = {"from": str(now_ms - 600_000), "to": str(now_ms + 600_000)}
    window = read(query, "en", NOW).window(NOW)
    assert window.end_ns == NOW
    assert window.step_ns == 4 * SECOND_NS
    assert window.count == 150


def test_a_zoom_to_nothing_still_shows_half_a_minute() -> None:
    now_ms = NOW // 10**6
    window = read({"from": str(now_ms - 60_000), "to": str(now_ms - 59_999)}, "en", NOW).window(NOW)
    assert window.count * window.step_ns == 30 * SECOND_NS


def test_a_zoom_of_years_is_cut_to_a_month() -> None:
    selection = read({"from": "1000", "to": str(NOW // 10**6)}, "en", NOW)
    assert selection.window(NOW).count < 521


def test_a_known_zone_wins_over_the_browsers_minutes() -> None:
    selection = read({"tz": "local", "zone": "Asia/Shanghai", "offset": "0"}, "en", NOW)
    assert (selection.zone, selection.offset_s) == ("Asia/Shanghai", 8 * 3600)
