"""How numbers, times and durations are printed."""

from __future__ import annotations

import pytest

from dashboard.selection import SECOND_NS
from dashboard.units import duration, moment, moment_near, number, zone_name

NOW = 1_767_225_600 * SECOND_NS  # 2026-01-01 00:00:00 UTC


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "%", "—"),
        (0.0, "%", "0 %"),
        (68.97, "%", "69 %"),
        (1290.4, "MHz", "1\u202f290 MHz"),
        (86.54, "°C", "86.5 °C"),
        (86.0, "°C", "86.0 °C"),
        (8.04, "%", "8.0 %"),
        (19.0, "", "19"),
        (19.06, "", "19.1"),
        (0.0123, "s", "0.01 s"),
        (3.2e9, "B/s", "3.20 GB/s"),
        (512.0, "B", "512 B"),
        (-5.25, "%", "-5.2 %"),
    ],
)
def test_a_number_has_its_unit_and_no_more_digits_than_it_can_mean(value: float | None, unit: str, text: str) -> None:
    assert number(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "en", "zh"),
    [
        (4, "4 s", "4 秒"),
        (303, "5 min 3 s", "5 分 3 秒"),
        (5400, "1 h 30 min", "1 小时 30 分"),
        (7200, "2 h", "2 小时"),
        (187_200, "2 d 4 h", "2 天 4 小时"),
        (-3, "0 s", "0 秒"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, en: str, zh: str) -> None:
    assert (duration(seconds, "en"), duration(seconds, "zh")) == (en, zh)


def test_a_moment_is_printed_in_the_viewers_zone() -> None:
    assert moment(NOW, 8 * 3600, day=True) == "2026-01-01 08:00:00"
    assert moment(NOW, -5 * 3600, day=True) == "2025-12-31 19:00:00"


def test_a_moment_of_another_day_carries_its_day() -> None:
    assert moment_near(NOW - 60 * SECOND_NS, NOW, 0) == "2025-12-31 23:59:00"
    assert moment_near(NOW + 60 * SECOND_NS, NOW, 0) == "00:01:00"


def test_a_zone_is_named_with_its_offset() -> None:
    assert zone_name("UTC", 0) == "UTC"
    assert zone_name("Asia/Kolkata", 19_800) == "UTC+05:30 Asia/Kolkata"
    assert zone_name("", -12_600) == "UTC-03:30"
