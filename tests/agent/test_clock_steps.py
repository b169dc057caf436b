"""Whatever the wall clock does, in any order and across restarts: ticks keep their pace, rates their value, and each step is one event."""

from __future__ import annotations

import resource
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.collectors.dialects.vllm import VLLM
from agent.collectors.engine_readings import EngineReadings
from agent.collectors.host import HostCollector
from agent.collectors.interface import Tick
from agent.exposition import parse
from agent.sampler import Sampler
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.engine_texts.vllm import vllm
from tests.doubles.fake_clock import FakeClock

TAGS = {"node": "n01"}
ENGINE_TAGS = {**TAGS, "engine": "chat-a", "kind": "vllm", "model": "m", "gpus": "0"}
INTERVAL_S = 1.0
TOLD_FROM_S = 0.25
TOKENS_S, PROMPT_TOKENS_S, PAGES_S, STALLED_US_S = 1700.0, 410.0, 6.0, 30_000.0


@dataclass(frozen=True, slots=True)
class Second:
    """What comes to pass from one tick to the next: the collectors' work, steps of the wall clock during it, and steps after it."""

    busy_s: float
    working: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()

    @property
    def net_s(self) -> float:
        return sum(self.working) + sum(self.waiting)


class SteppingClock(FakeClock):
    """Its wall clock steps as a script says, its monotonic clock never does."""

    def __init__(self) -> None:
        super().__init__()
        self.script: deque[Second] = deque()

    def work(self) -> None:
        """The collectors are busy, less long than an interval, so that a wait comes after it."""
        if self.script:
            self.advance(self.script[0].busy_s)
            self.wall_s += sum(self.script[0].working)

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.advance(seconds / 2)
        if self.script:
            self.wall_s += sum(self.script.popleft().waiting)
        return super().wait(stop, seconds / 2)


@dataclass
class Engine:
    """An engine of a steady yield, as its metrics tell of it."""

    clock: SteppingClock
    name: str = "engine"
    errors: int = 0
    ticks: list[Tick] = field(default_factory=list)
    readings: EngineReadings = field(default_factory=lambda: EngineReadings(VLLM))

    def collect(self, tick: Tick) -> Sequence[Sample]:
        self.ticks.append(tick)
        now_s = tick.monotonic_s
        text = vllm(generated=(round(TOKENS_S * now_s, 3),), prompts=(round(PROMPT_TOKENS_S * now_s, 3),))
        fields = self.readings.read(parse(text), now_s, tick.time_ns / 1e9)
        self.clock.work()
        return [Sample("engine", ENGINE_TAGS, fields, tick.time_ns)]

    def close(self) -> None:
        pass


class Host(HostCollector):
    """The host's collector over a /proc that swaps and stalls steadily."""

    def __init__(self, proc: Path) -> None:
        super().__init__(TAGS, proc, proc / "no sys")

    def collect(self, tick: Tick) -> Sequence[Sample]:
        swapped, stalled = round(PAGES_S * tick.monotonic_s * 1e6), round(STALLED_US_S * tick.monotonic_s)
        (self._proc / "vmstat").write_text(f"pswpin {swapped}\npswpout {2 * swapped}\n")
        (self._proc / "pressure").mkdir(exist_ok=True)
        (self._proc / "pressure" / "cpu").write_text(f"some avg10=0.00 total={stalled}\n")
        return super().collect(tick)


@dataclass(frozen=True, slots=True)
class Course:
    """What one run of an agent brought: its ticks, and the samples of each."""

    ticks: Sequence[Tick]
    batches: Sequence[Sequence[Sample]]

    def of(self, measurement: str) -> list[Sample]:
        return [sample for batch in self.batches for sample in batch if sample.measurement == measurement]


def lived_through(script: Sequence[Second], clock: SteppingClock, proc: Path) -> Course:
    """One run of an agent's sampler: a tick, then each second of the script and the tick after it."""
    stop = threading.Event()
    engine, batches = Engine(clock), list[list[Sample]]()
    clock.script.extend(script)

    def taken(samples: Sequence[Sample]) -> None:
        batches.append(list(samples))
        if len(batches) > len(script):
            stop.set()

    sampler = Sampler([Host(proc), engine], TAGS, taken, interval_s=INTERVAL_S, clock=clock)
    sampler.run(stop)
    sampler.close()
    return Course(engine.ticks, batches)


STEPS_S = st.sampled_from([3600.0, -3600.0, 3.0, -3.0, 0.26, -0.26, 0.2, -0.2])
SECONDS = st.builds(
    Second,
    busy_s=st.floats(0.0, 0.9),
    working=st.lists(STEPS_S, max_size=2).map(tuple),
    waiting=st.lists(STEPS_S, max_size=2).map(tuple),
)
RUNS = st.lists(
    st.tuples(st.floats(0.0, 30.0), STEPS_S, st.lists(SECONDS, min_size=1, max_size=8)), min_size=1, max_size=3
)
"""Runs of the agent, each after so many seconds in which there was none, and a step in them that nobody saw."""


@settings(max_examples=60, deadline=None)
@given(RUNS)
@example([(0.0, 3.0, [Second(0.0, (3600.0,)), Second(0.0, (-3600.0,)), Second(0.0, (), (-3.0,))])])
@example([(0.0, 3.0, [Second(0.5)]), (2.0, -3600.0, [Second(0.5, (), (-3.0, -3.0)), Second(0.9, (3.0,), (-3.0,))])])
def test_steps_of_the_wall_clock_open_no_gap_bend_no_rate_and_are_one_event_each(
    runs: list[tuple[float, float, list[Second]]],
) -> None:
    clock = SteppingClock()
    with tempfile.TemporaryDirectory() as folder:
        for away_s, unseen_s, script in runs:
            clock.advance(away_s)
            clock.wall_s += unseen_s
            course = lived_through(script, clock, Path(folder))
            no_gap(course, script)
            no_rate_is_bent(course)
            each_step_is_one_event(course, script)


def no_gap(course: Course, script: Sequence[Second]) -> None:
    assert [tick.number for tick in course.ticks] == list(range(1, len(script) + 2))
    assert len(course.of("engine")) == len(course.of("host")) == len(script) + 1
    gaps = [after.monotonic_s - before.monotonic_s for before, after in pairwise(course.ticks)]
    assert all(0 < gap <= 2 * INTERVAL_S for gap in gaps), gaps


def no_rate_is_bent(course: Course) -> None:
    """Each rate is the true one in every tick but the first, which has none; and nothing at all is below zero."""
    steady = {
        "tokens_per_s": TOKENS_S,
        "prompt_tokens_per_s": PROMPT_TOKENS_S,
        "swap_in_bytes_s": PAGES_S * 1e6 * resource.getpagesize(),
        "swap_out_bytes_s": 2 * PAGES_S * 1e6 * resource.getpagesize(),
        "psi_cpu_pct": STALLED_US_S / 1e4,
    }
    for number, batch in enumerate(course.batches):
        told = {name: value for sample in batch for name, value in sample.fields.items() if name in steady}
        assert told == pytest.approx(steady if number else {}, rel=1e-3)
        numbers = [
            (name, value)
            for sample in batch
            if sample.measurement != "event"
            for name, value in sample.fields.items()
            if not isinstance(value, str)
        ]
        assert [(name, value) for name, value in numbers if value < 0] == []


def each_step_is_one_event(course: Course, script: Sequence[Second]) -> None:
    """In the first tick that sees it. Steps between two ticks are seen as their sum."""
    told = [
        (number, check(sample).fields["code"])
        for number, batch in enumerate(course.batches)
        for sample in batch
        if sample.tags.get("kind") == "clock_step"
    ]
    expected = [
        (number, round(second.net_s * 1000))
        for number, second in enumerate(script, 1)
        if abs(second.net_s) > TOLD_FROM_S
    ]
    assert [number for number, _ in told] == [number for number, _ in expected]
    assert [code for _, code in told] == pytest.approx([code for _, code in expected], abs=1)
    for event in course.of("event"):
        assert f"{float(event.fields['code']) / 1000:+.3f}" in str(event.fields["text"])
