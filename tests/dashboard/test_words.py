"""Every word that the page may need exists in both languages, and none is kept that nothing says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dashboard.lanes import _COMBINE
from dashboard.selection import RANGES
from dashboard.strip import HEADLINES
from rules.verdict import Cause, Cost, Status, Step
from telemetry.catalogue import EVENT_KINDS
from telemetry.messages import LANGUAGES, catalogue, say
from telemetry.pairs import THROTTLE_REASONS

ROOM = Path(__file__).parents[2] / "dashboard"
SOURCE = "\n".join(path.read_text("utf-8") for path in sorted(ROOM.glob("*.py")))
MADE = {
    # tables whose keys are made from names
    "dashboard.reason": [name for _, name in THROTTLE_REASONS],
    "dashboard.event": list(EVENT_KINDS),
    "dashboard.range": list(RANGES),
    "dashboard.chart": [word for word, _ in _COMBINE.values() if word],
    "dashboard.empty": [f"{name}_title" for name in ("store", "nothing", "gone", "window", "engine")],
    "dashboard.strip": ["stayed_gpu", "stayed_cpu"],
    "rules.cause": list(Cause),
    "rules.step": list(Step),
    "rules.status": list(Status),
    "rules.cost": list(Cost),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_name_that_may_be_shown_has_a_word(language: str) -> None:
    for table, names in MADE.items():
        for name in names:
            assert say(f"{table}.{name}", language), (table, name)


def test_every_sentence_that_the_code_asks_for_is_there() -> None:
    asked = set(re.findall(r'"(dashboard\.[a-z_]+\.[a-z0-9_]+)"', SOURCE))
    assert len(asked) > 60
    assert asked <= set(catalogue())


def test_every_headline_that_sets_the_tone_is_one_that_triage_can_say() -> None:
    assert set(HEADLINES) <= set(catalogue())


def test_no_sentence_is_kept_that_nothing_says() -> None:
    made = {f"{table}.{name}" for table, names in MADE.items() for name in names}
    for key in catalogue():
        if key.startswith("dashboard.") and key not in made:
            assert re.search(rf"\b{re.escape(key.rsplit('.', 1)[1])}\b", SOURCE), key
