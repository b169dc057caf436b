"""One tick, one time; no drift; a missed tick is skipped; nobody's failure is another's; the clock may do what it likes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.collectors.interface import Tick
from agent.counters import Rate
from agent.sampler import Sampler, Storage, misses_many
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.fake_clock import FakeClock

TAGS = {"node": "n01", "rack": "r2"}


class Source:
    """A collector that does what it is told."""

    def __init__(self, name: str, work: Callable[[Tick], Sequence[Sample]] | None = None) -> None:
        self.name = name
        self.errors = 0
        self.closed = False
        self.ticks: list[Tick] = []
        self._work = work

    def collect(self, tick: Tick) -> Sequence[Sample]:
        self.ticks.append(tick)
        if self._work:
            return self._work(tick)
        return [Sample("host", TAGS, {"load1": float(tick.number)}, tick.time_ns)]

    def close(self) -> None:
        self.closed = True


class Run:
    """A sampler on a fake clock that stops after some waits, and what came of it."""

    def __init__(self, sources: Sequence[Source], ticks: int, clock: FakeClock | None = None, **how: object) -> None:
        self.clock = clock or FakeClock()
        self.batches: list[list[Sample]] = []
        self.stop = threading.Event()
        self._left = ticks
        self.sampler = Sampler(sources, TAGS, self._take, clock=self.clock, **how)  # type: ignore[arg-type]

    def _take(self, samples: Sequence[Sample]) -> None:
        self.batches.append(list(samples))
        self._left -= 1
        if self._left == 0:
            self.stop.set()

    def go(self) -> Run:
        self.sampler.run(self.stop)
        self.sampler.close()
        return self

    def times(self) -> list[int]:
        return [batch[-1].time_ns for batch in self.batches]

    def of(self, measurement: str) -> list[Sample]:
        return [sample for batch in self.batches for sample in batch if sample.measurement == measurement]


def test_all_collectors_of_a_tick_have_one_time() -> None:
    one, two = Source("host"), Source("engine")
    run = Run([one, two], 3).go()
    assert one.ticks == two.ticks
    for batch in run.batches:
        assert len({sample.time_ns for sample in batch}) == 1
    assert len(set(run.times())) == 3


def test_ticks_keep_to_the_grid_however_long_each_takes() -> None:
    clock = FakeClock()
    start_s = clock.now_s

    def work(tick: Tick) -> Sequence[Sample]:
        clock.advance(0.3 if tick.number % 2 else 0.7)
        return []

    source = Source("host", work)
    run = Run([source], 200, clock).go()
    assert [tick.monotonic_s - start_s for tick in source.ticks] == pytest.approx([float(n) for n in range(200)])
    assert run.sampler.missed == 0


def test_a_missed_tick_is_skipped_and_counted_not_queued() -> None:
    clock = FakeClock()
    start_s = clock.now_s

    def work(tick: Tick) -> Sequence[Sample]:
        if tick.number == 2:
            clock.advance(3.6)
        return []

    source = Source("host", work)
    run = Run([source], 4, clock).go()
    assert [tick.monotonic_s - start_s for tick in source.ticks] == pytest.approx([0.0, 1.0, 5.0, 6.0])
    assert run.sampler.missed == 3


def test_what_was_missed_of_late_is_told_beside_what_was_due_and_forgotten_after_five_minutes() -> None:
    clock = FakeClock()

    def work(tick: Tick) -> Sequence[Sample]:
        clock.advance(1.6 if 10 < tick.number <= 30 else 0.1)
        return []

    source = Source("host", work)
    run = Run([source], 30, clock)
    assert run.sampler.missed_of_late() == (0, 0) and not misses_many(0, 0)
    run.go()
    missed, due = run.sampler.missed_of_late()
    assert missed == run.sampler.missed >= 19 and due == 30 + missed and misses_many(missed, due)
    clock.advance(400)
    assert run.sampler.missed_of_late()[0] == 0
    assert not misses_many(2, 10) and not misses_many(14, 300) and misses_many(15, 300)


def test_a_tick_that_is_a_little_late_is_made_and_the_grid_stays() -> None:
    clock = FakeClock()
    start_s = clock.now_s

    def work(tick: Tick) -> Sequence[Sample]:
        if tick.number == 1:
            clock.advance(1.2)
        return []

    source = Source("host", work)
    run = Run([source], 3, clock).go()
    assert [tick.monotonic_s - start_s for tick in source.ticks] == pytest.approx([0.0, 1.2, 2.0])
    assert run.sampler.missed == 0


def test_a_collector_that_raises_costs_only_its_own_samples() -> None:
    def fail(_tick: Tick) -> Sequence[Sample]:
        raise RuntimeError("broken")

    run = Run([Source("engine", fail), Source("host")], 3).go()
    assert len(run.of("host")) == 3
    assert run.of("agent")[-1].fields["errors_engine_total"] == 3
    assert run.of("agent")[-1].fields["errors_host_total"] == 0


def test_a_collector_that_hangs_costs_only_its_own_samples_and_holds_one_thread() -> None:
    released = threading.Event()

    def hang(_tick: Tick) -> Sequence[Sample]:
        released.wait(120)
        return [Sample("host", TAGS, {"load1": 99.0}, 1)]

    before = threading.active_count()
    stuck = Source("engine", hang)
    run = Run([stuck, Source("host")], 5).go()
    assert threading.active_count() <= before + 2
    released.set()
    assert len(stuck.ticks) == 1
    assert [sample.fields["load1"] for sample in run.of("host")] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert run.of("agent")[-1].fields["errors_engine_total"] == 5


def test_a_collector_for_which_no_thread_is_left_costs_only_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    left = [False]

    def start_some(thread: threading.Thread) -> None:
        if thread.name == "collect-thermal" and not left[0]:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    host, thermal = Source("host"), Source("thermal")
    run = Run([host, thermal], 2)
    run.sampler.tick()
    assert (len(host.ticks), len(thermal.ticks)) == (1, 0)
    assert run.sampler.errors() == {"host": 0, "thermal": 1}
    left[0] = True
    run.sampler.tick()
    run.sampler.close()
    assert (len(host.ticks), len(thermal.ticks)) == (2, 1)


def test_where_proc_is_hidden_the_agent_ticks_on_without_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(_path: Path, *_how: object, **_more: object) -> str:
        raise OSError(24, "Too many open files")

    run = Run([Source("host")], 3)
    run.sampler.tick()
    monkeypatch.setattr(Path, "read_text", hidden)
    run.sampler.tick()
    run.sampler.close()
    before, after = run.of("agent")
    assert "rss_bytes" in before.fields
    assert "rss_bytes" not in after.fields and "cpu_s" in after.fields


def test_an_answer_that_comes_after_its_tick_is_never_given_to_another() -> None:
    late = threading.Event()

    def work(tick: Tick) -> Sequence[Sample]:
        if tick.number == 1:
            late.wait(120)
        return [Sample("host", TAGS, {"load1": float(tick.number)}, tick.time_ns)]

    source = Source("host", work)
    sampler = Sampler([source], TAGS, lambda _samples: None, interval_s=0.05, clock=FakeClock())
    first = sampler.tick()
    late.set()
    later: list[Sample] = []
    while len(source.ticks) < 2:  # until the thread has come back from its first tick
        later = sampler.tick()
    assert [sample for sample in first if sample.measurement == "host"] == []
    for sample in later:
        if sample.measurement == "host":
            assert sample.fields["load1"] != 1.0


def test_an_event_in_an_answer_that_comes_late_is_in_a_later_tick_with_its_own_time_and_counts_as_told_then() -> None:
    late = threading.Event()

    def work(tick: Tick) -> Sequence[Sample]:
        if tick.number == 1:
            late.wait(30)
            return [Sample("event", {**TAGS, "kind": "deploy", "subject": "x"}, {"text": "t", "code": 0}, tick.time_ns)]
        return []

    source = Source("host", work)
    clock = FakeClock()
    sampler = Sampler([source], TAGS, lambda _samples: None, interval_s=0.05, clock=clock)
    at_ns = clock.wall_ns()
    first = sampler.tick()
    assert [s for s in first if s.measurement == "event"] == []
    assert sampler.answered() == [(source, 0)]
    late.set()
    told: list[Sample] = []
    give_up_s = time.monotonic() + 30
    while sampler.answered() == [(source, 0)]:
        assert time.monotonic() < give_up_s
        clock.advance(1.0)
        told += [s for s in sampler.tick() if s.measurement == "event"]
    assert [sample.time_ns for sample in told] == [at_ns]


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 3.0, -3.0])
def test_a_step_of_the_wall_clock_is_an_event_and_the_ticks_go_on(step_s: float) -> None:
    clock = FakeClock()

    class Stepping(Source):
        def collect(self, tick: Tick) -> Sequence[Sample]:
            if tick.number == 3:
                clock.wall_s += step_s
            return super().collect(tick)

    source = Stepping("host")
    run = Run([source], 6, clock).go()
    events = run.of("event")
    assert [check(event).tags["kind"] for event in events] == ["clock_step"]
    assert events[0].fields["code"] == pytest.approx(step_s * 1000, abs=1)
    assert f"{step_s:+.3f}" in str(events[0].fields["text"])
    assert [
        later.monotonic_s - tick.monotonic_s for tick, later in zip(source.ticks, source.ticks[1:], strict=False)
    ] == (pytest.approx([1.0] * 5))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(-4000, 4000), st.floats(0, 3)), min_size=1, max_size=12))
def test_no_clock_gives_a_negative_rate_or_ticks_out_of_order(moves: list[tuple[float, float]]) -> None:
    clock = FakeClock()
    rate, rates = Rate(), []

    def work(tick: Tick) -> Sequence[Sample]:
        step_s, held_s = moves[tick.number % len(moves)]
        clock.wall_s += step_s
        clock.advance(held_s)
        rates.append(rate.per_second({"a": 7.0 * tick.monotonic_s}, tick.monotonic_s))
        return []

    source = Source("host", work)
    Run([source], len(moves) + 2, clock).go()
    gaps = [b.monotonic_s - a.monotonic_s for a, b in zip(source.ticks, source.ticks[1:], strict=False)]
    assert all(gap > 0.749 for gap in gaps)  # late by at most a quarter of the interval
    assert [tick.number for tick in source.ticks] == list(range(1, len(moves) + 3))
    assert all(found is None or found == pytest.approx(7.0) for found in rates)


def test_what_the_catalogue_does_not_hold_is_dropped_and_counted() -> None:
    def work(tick: Tick) -> Sequence[Sample]:
        return [
            Sample("host", TAGS, {"load1": 1.0, "made_up": 2.0, "cpu_pct": float("nan")}, tick.time_ns),
            Sample("nowhere", TAGS, {"x": 1.0}, tick.time_ns),
        ]

    run = Run([Source("host", work)], 1).go()
    assert [sample.fields for sample in run.of("host")] == [{"load1": 1.0}]
    assert run.of("nowhere") == []
    assert run.of("agent")[0].fields["dropped_total"] == 3


def test_the_agent_reports_itself_in_the_same_tick() -> None:
    run = Run([Source("host")], 1, storage=lambda: Storage(2.5, 4096, 7, 3)).go()
    (report,) = run.of("agent")
    check(report)
    assert report.fields["lag_s"] == 2.5
    assert report.fields["spool_bytes"] == 4096.0
    assert report.fields["dropped_total"] == 7
    assert report.fields["errors_delivery_total"] == 3
    assert report.fields["rss_bytes"] > 1e6  # type: ignore[operator]
    assert report.fields["cpu_s"] > 0  # type: ignore[operator]
    assert report.time_ns == run.of("host")[0].time_ns


def test_what_is_not_known_of_storage_is_absent() -> None:
    run = Run([Source("host")], 1).go()
    assert not {"lag_s", "spool_bytes"} & run.of("agent")[0].fields.keys()


def test_a_sink_that_fails_is_counted_and_that_tick_is_not_reported_complete() -> None:
    completed: list[Tick] = []
    calls = []

    def sink(samples: Sequence[Sample]) -> None:
        calls.append(samples)
        if len(calls) == 2:
            raise OSError("no space left on device")

    sampler = Sampler([Source("host")], TAGS, sink, clock=FakeClock(), after_tick=completed.append)
    for _ in range(3):
        last = sampler.tick()
    assert [tick.number for tick in completed] == [1, 3]
    assert last[-1].fields["errors_delivery_total"] == 1


def test_closing_closes_every_collector() -> None:
    sources = [Source("host"), Source("engine")]
    Run(sources, 1).go()
    assert all(source.closed for source in sources)
