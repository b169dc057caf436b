"""Another process at the same address is known by its start, its uptime, its token or its counters; never by one odd number."""

from __future__ import annotations

import pytest

from agent.collectors.engine_incarnation import Incarnation, Turn, start_time_s
from agent.exposition import parse


def started(at_s: float) -> str:
    return f"process_start_time_seconds {at_s}\n"


def test_the_first_answer_is_no_restart() -> None:
    assert Incarnation().turn(parse(started(5.0)), 1.0) is Turn.SAME


@pytest.mark.parametrize(("later_s", "turn"), [(1_000.4, Turn.SAME), (1_002.0, Turn.NEW), (900.0, Turn.NEW)])
def test_a_start_time_that_differs_by_more_than_rounding_is_another_process(later_s: float, turn: Turn) -> None:
    incarnation = Incarnation()
    incarnation.turn(parse(started(1_000.0)), 1.0)
    assert incarnation.turn(parse(started(later_s)), 2.0) is turn


def test_a_start_that_was_known_before_is_another_server_and_no_restart() -> None:
    incarnation = Incarnation()
    turns = [incarnation.turn(parse(started(at_s)), n) for n, at_s in enumerate((10.0, 20.0, 10.0, 20.0, 20.0, 30.0))]
    assert turns == [Turn.SAME, Turn.NEW, Turn.OTHER, Turn.OTHER, Turn.SAME, Turn.NEW]


def test_a_token_means_nothing_but_that_it_changed() -> None:
    incarnation = Incarnation()
    tokens = ["99", "99", "11", ""]
    assert [incarnation.turn(parse(""), n, token) for n, token in enumerate(tokens)] == [
        *(Turn.SAME, Turn.SAME, Turn.NEW, Turn.SAME)
    ]


def test_the_oldest_creation_time_stands_for_the_start() -> None:
    text = 'a_created{x="1"} 50\na_created{x="2"} 44\nb_created 60\npython_gc_created 1\nhttp_requests_created 2\n'
    assert start_time_s(parse(text)) == 44.0


@pytest.mark.parametrize(
    ("after", "turn"),
    [
        ({"a": 5.0, "b": 900.0, "c": 2.0}, Turn.NEW),
        ({"a": 5.0, "b": 901.0, "c": 70.0}, Turn.SAME),  # one alone may be a defect
        ({"c": 71.0}, Turn.SAME),
    ],
)
def test_without_any_start_counters_that_fell_together_are_a_restart(after: dict[str, float], turn: Turn) -> None:
    incarnation = Incarnation()
    incarnation.turn(parse("x 1\n"), 0.0, counters={"a": 100.0, "b": 900.0, "c": 70.0})
    assert incarnation.turn(parse("x 1\n"), 1.0, counters=after) is turn


def test_a_counter_that_fell_is_no_restart_where_the_start_is_told() -> None:
    incarnation = Incarnation()
    incarnation.turn(parse(started(5.0)), 0.0, counters={"a": 9.0, "b": 9.0})
    assert incarnation.turn(parse(started(5.0)), 1.0, counters={"a": 1.0, "b": 1.0}) is Turn.SAME


def test_a_dynamo_workers_uptime_is_one() -> None:
    incarnation = Incarnation()
    incarnation.turn(parse("dynamo_component_uptime_seconds 500\n"), 0.0)
    assert incarnation.turn(parse("dynamo_component_uptime_seconds 3\n"), 10.0) is Turn.NEW
