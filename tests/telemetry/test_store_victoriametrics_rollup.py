"""The fleet's cells on a real VictoriaMetrics: what stands, what is drawn again, and what a writer has to say for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from telemetry.sample import Sample
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS
from telemetry.store.victoriametrics import VictoriaStore
from telemetry.store.victoriametrics_rollup import Marks

if TYPE_CHECKING:
    from tests.store_servers import Victoria

S = 10**9
T0 = (int(time.time()) // 3600 - 12) * 3600 * S
LONG_AFTER = T0 + 7200 * S


def host(second: float, load: float, node: str = "n1") -> Sample:
    return Sample("host", {"node": node}, {"load1": load}, T0 + round(second * S))


@pytest.fixture
def store(deduplicating_victoria: Victoria) -> Iterator[VictoriaStore]:
    opened = VictoriaStore(deduplicating_victoria.new_url())
    yield opened
    opened.close()


def finish(store: VictoriaStore) -> None:
    while store.rollup(LONG_AFTER):
        pass


def highest(store: VictoriaStore, step_ns: int = MINUTE_NS, seconds: int = 60) -> list[float | None]:
    (spread,) = store.spread("host", ["load1"], start_ns=T0, end_ns=T0 + seconds * S, step_ns=step_ns)
    return spread.high


def state(store: VictoriaStore, level: int = MINUTE_NS) -> int:
    """What the minute's or quarter's marks come to."""
    return store._fleet._states(level, T0, T0 + level)[T0]


def cell(name: str, value: float, second: float, *, done: int | None = None, without: str = "") -> str:
    """The lines of a cell of one value."""
    at_ns = T0 + round(second * S)
    parts = {"n": "1i", "sum": value, "low": value, "high": value}
    text = ",".join(f"{part}={number}" for part, number in parts.items() if part != without)
    lines = f"pairscope_fleet_{name},measurement=host,field=load1 {text} {at_ns}\n"
    return lines + (f"pairscope_fleet_{name} done={done}i {at_ns}\n" if done is not None else "")


@pytest.mark.server
@pytest.mark.parametrize(("name", "level"), [("1min", MINUTE_NS), ("15min", QUARTER_NS)])
def test_a_cell_answers_until_something_later_is_written_in_its_time(
    store: VictoriaStore, name: str, level: int
) -> None:
    store.write([host(1, 5.0)])
    finish(store)
    store._post_lines(cell(name, 77.0, 59.999 if name == "1min" else 899.999, done=state(store, level)))
    assert highest(store, level) == [77.0]  # so it is read, and not the samples
    store.write([host(2, 6.0)])
    assert highest(store, level) == [6.0]
    finish(store)
    assert highest(store, level) == [6.0]


@pytest.mark.server
def test_a_cell_that_was_cut_off_or_is_of_an_earlier_state_is_not_taken(store: VictoriaStore) -> None:
    store.write([host(1, 5.0)])
    now = state(store)
    store._post_lines(cell("1min", 71.0, 10.0))
    store._post_lines(cell("1min", 72.0, 11.0, done=now - 1))
    store._post_lines(cell("1min", 73.0, 12.0, done=now, without="low"))
    assert highest(store) == [5.0]
    finish(store)
    store._post_lines(cell("1min", 74.0, 59.999, done=now - 1))
    assert highest(store) == [5.0]


@pytest.mark.server
def test_several_that_roll_up_while_late_samples_of_new_nodes_come_agree_in_the_end(
    deduplicating_victoria: Victoria,
) -> None:
    url = deduplicating_victoria.new_url()
    stop = threading.Event()
    failures: list[BaseException] = []

    def roll() -> None:
        mine = VictoriaStore(url)
        try:
            while not stop.is_set():
                mine.rollup(LONG_AFTER, 0.05)
        except BaseException as error:
            failures.append(error)
        mine.close()

    threads = [threading.Thread(target=roll) for _ in range(2)]
    for thread in threads:
        thread.start()
    writers = [VictoriaStore(url) for _ in range(2)]
    written: list[Sample] = []
    for number in range(12):
        batch = [host(second, float(number * 100 + second), node=f"n{number}") for second in range(0, 900, 45)]
        writers[number % 2].write(batch)
        written += batch
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    finish(writers[0])
    for step_ns in (MINUTE_NS, QUARTER_NS):
        (found,) = writers[1].spread("host", ["load1"], start_ns=T0, end_ns=T0 + QUARTER_NS, step_ns=step_ns)
        for place, mean in enumerate(found.mean):
            held = [s.fields["load1"] for s in written if (s.time_ns - T0) // step_ns == place]
            assert mean == pytest.approx(sum(map(float, held)) / len(held), rel=1e-12)
            assert (found.low[place], found.high[place]) == (min(held), max(held))
    for writer in writers:
        writer.close()


@pytest.mark.server
def test_a_server_that_counts_copies_twice_rolls_nothing_up_and_answers_from_samples(victoria: Victoria) -> None:
    store = VictoriaStore(victoria.new_url())
    store.write([host(1, 5.0)])
    store.write([host(1, 5.0)])
    assert not store.rolls_up and not store.rollup(LONG_AFTER)
    assert highest(store) == [5.0]
    assert store.spread("host", ["load1"], start_ns=T0, end_ns=T0 + S, step_ns=MINUTE_NS)[0].mean == [5.0]
    store.close()


# --- what a writer says


class Said:
    """A writer's marks on a clock that the test moves, as (number, minute)."""

    def __init__(self) -> None:
        self.now_ns = T0
        self.marks = Marks(lambda: self.now_ns)
        self.before: list[tuple[int, int]] = []
        self.after: list[tuple[int, int]] = []

    def write(self, *seconds: float, at: float, again: bool = False) -> None:
        self.now_ns = T0 + round(at * S)
        lines, touched = self.marks.before([host(second, 1.0) for second in seconds])
        self.before = numbers(lines)
        said: list[str] = []
        self.marks.after(touched, said.append, again=again)
        self.after = numbers("".join(said))


def numbers(lines: str) -> list[tuple[int, int]]:
    found = []
    for line in lines.splitlines():
        series, value, moment = line.split(" ")
        if series.startswith("pairscope_mark,"):
            found.append((int(value.removeprefix("at=").removesuffix("i")), (int(moment) - T0) // MINUTE_NS))
    return found


def minutes(marks: list[tuple[int, int]]) -> list[int]:
    return [minute for _, minute in marks]


def test_a_minute_is_marked_when_it_begins_and_when_it_is_over_and_not_in_between() -> None:
    said = Said()
    said.write(1, at=1)
    assert (minutes(said.before), said.after) == ([0], [])
    said.write(59, at=59)
    assert (said.before, said.after) == ([], [])
    said.write(61, at=61)
    assert (minutes(said.before), minutes(said.after)) == ([1], [0])
    said.write(62, at=62)
    assert (said.before, said.after) == ([], [])


def test_a_minute_that_is_over_is_marked_with_each_write_and_again_with_a_larger_number_behind_it() -> None:
    said = Said()
    newest = 0
    for _ in range(3):
        said.write(1, 62, at=500)
        assert minutes(said.before) == minutes(said.after) == [0, 1]
        assert newest < said.before[0][0] < said.after[0][0]
        newest = said.after[0][0]


def test_what_is_sent_again_after_a_crash_of_the_server_is_marked_though_its_minute_goes_on() -> None:
    said = Said()
    said.write(1, at=1)
    said.write(2, at=2, again=True)
    assert minutes(said.after) == [0]


def test_no_two_marks_of_a_writer_have_one_time_since_the_server_would_keep_either() -> None:
    marks = Marks(lambda: LONG_AFTER)
    times = []
    for _ in range(500):
        lines, touched = marks.before([host(1, 1.0)])
        said: list[str] = [lines]
        marks.after(touched, said.append)
        times += [(line.split(" ")[0], line.split(" ")[2]) for line in "".join(said).splitlines()]
    assert len(set(times)) == len(times) > 1000


def test_single_happenings_leave_no_mark() -> None:
    event = Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"code": 1}, T0)
    assert Marks().before([event]) == ("", frozenset())
