"""Where the time goes: marks give each stage its own time, a device is never waited for, and the server tells all stages."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from engine.settings import EngineSettings
from engine.stages import TIMED_EVERY, DeviceClock, HostClock, Stage, StageClock, Untimed, nothing
from tests.engine.checkpoints import write_checkpoint
from tests.engine.fakes import ask, make, run_out
from tests.engine.running import ThreadServer

IN_STEP = (Stage.SCHEDULE, Stage.EMBED, Stage.ATTENTION, Stage.MLP, Stage.ATTENTION, Stage.MLP, Stage.SAMPLE)


class Watch:
    """A clock that runs only when told to."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """A device's queue of work: what is recorded comes to pass only when `done` reaches it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.at_work = False
        self.made = 0

    def event(self) -> QueueEvent:
        self.made += 1
        return QueueEvent(self)


class QueueEvent:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = 1000 * self.queue.watch()

    def query(self) -> bool:
        return not self.queue.at_work

    def elapsed_time(self, end_event: QueueEvent) -> float:
        assert not self.queue.at_work, "this would raise on a device"
        return end_event.at_ms - self.at_ms


def one_step(clock: StageClock, watch: Watch, tokens: int, scale: float = 1.0) -> None:
    """Each mark takes a time of its own: 1, 2, 4, ... seconds, in the order of IN_STEP."""
    clock.begin(tokens)
    for number, stage in enumerate(IN_STEP):
        watch.now += scale * 2**number
        clock.mark(stage)


EXPECTED = [0.0, 1.0, 2.0, 4.0 + 16.0, 8.0 + 32.0, 64.0, 0.0]


def test_each_mark_gives_its_stage_what_went_by_since_the_one_before() -> None:
    watch = Watch()
    clock = HostClock(watch)
    for _ in range(2):
        watch.now += 1000.0  # between steps nothing counts
        one_step(clock, watch, 3)
        assert clock.take(127.0) == EXPECTED


def test_a_device_is_read_only_when_it_has_come_so_far() -> None:
    watch = Watch()
    queue = Queue(watch)
    clock = DeviceClock(queue.event)
    queue.at_work = True
    one_step(clock, watch, 3)
    assert clock.take(127.0) is None  # unknown yet, and not waited for
    one_step(clock, watch, 3)
    queue.at_work = False
    assert clock.take(127.0) == pytest.approx(EXPECTED)


def test_of_a_devices_steps_few_are_timed_and_the_others_shared_out_by_size() -> None:
    watch = Watch()
    queue = Queue(watch)
    clock = DeviceClock(queue.event)
    one_step(clock, watch, 1)
    assert clock.take(254.0) == pytest.approx([2 * seconds for seconds in EXPECTED])
    clock.begin(200)
    watch.now += 9.0
    clock.mark(Stage.MLP)
    assert clock.take(3.0) == [0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0]
    timed = 0
    for _ in range(10 * TIMED_EVERY):
        before = watch.now
        watch.now += 1000.0
        one_step(clock, watch, 1)
        timed += any(event.at_ms >= 1000 * (before + 1000.0) for event in clock._events)  # type: ignore[attr-defined]
        assert clock.take(127.0) == pytest.approx(EXPECTED)
    assert 10 <= timed <= 12
    assert queue.made == len(IN_STEP) + 1  # events are used again


def test_a_step_that_is_replayed_shares_its_time_as_the_last_one_that_went_by_stages() -> None:
    watch = Watch()
    clock = DeviceClock(Queue(watch).event)
    clock.begin(3)
    clock.in_one_piece()
    assert clock.take(127.0) is None  # nothing is known of such a step yet
    one_step(clock, watch, 3)
    assert clock.take(127.0) == pytest.approx(EXPECTED)
    for _ in range(3 * TIMED_EVERY):
        clock.begin(3)
        clock.in_one_piece()
        watch.now += 1000.0
        clock.mark(Stage.SAMPLE)
        assert clock.take(254.0) == pytest.approx([2 * seconds for seconds in EXPECTED])


def test_untimed_tells_nothing_rather_than_zero() -> None:
    watch = Watch()
    clock = Untimed()
    one_step(clock, watch, 3)
    assert clock.take(127.0) is None


def test_scheduling_and_detokenising_are_the_engines_own_and_unknown_stays_unknown() -> None:
    engine, runner, clock = make()
    run = runner.run
    engine.stats.stage_seconds = nothing()
    engine.add(ask("a", 3, 4, clock))
    run_out(engine)
    assert engine.stats.stage_seconds == nothing()  # this runner tells no stages
    watch = Watch()
    engine._stopwatch = watch
    schedule = engine.scheduler.schedule

    def slow_schedule(drafts):  # type: ignore[no-untyped-def]
        watch.now += 0.5
        return schedule(drafts)

    engine.scheduler.schedule = slow_schedule  # type: ignore[method-assign]

    def timed(plan):  # type: ignore[no-untyped-def]
        return replace(run(plan), stages=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0])

    runner.run = timed  # type: ignore[method-assign]
    engine.add(ask("b", 3, 2, clock))
    run_out(engine)
    assert engine.stats.stage_seconds == [0.0, 2 * 1.5, 2 * 2.0, 2 * 3.0, 2 * 4.0, 2 * 5.0, 0.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def values(text: str) -> dict[str, float]:
    """Stage -> seconds, and what else is asked for."""
    found = {}
    for line in text.splitlines():
        if line.startswith("pairscope_stage_seconds_total{"):
            found[line.split('stage="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found


def test_the_server_tells_every_stage_and_those_of_the_steps_fit_into_them(folder: Path) -> None:
    settings = EngineSettings(model=str(folder), kv_blocks=256, threads=1)
    with ThreadServer(settings) as server:
        before = values(server.http.get("/metrics").text)
        assert before == dict.fromkeys((stage.label for stage in Stage), 0.0)
        body = {"prompt": "some words", "max_tokens": 60, "ignore_eos": True, "stop": ["nowhere at all"]}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        text = server.http.get("/metrics").text
        each = server.http.get("/debug/steps").json()["steps"]
    spent = values(text)
    assert list(spent) == [stage.label for stage in Stage]
    assert all(seconds > 0 for seconds in spent.values())
    steps = next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "step_time_seconds_sum" in line)
    within = ("embed", "attention", "mlp", "sample")
    assert sum(spent[name] for name in within) <= steps
    # of most steps: any one may have stood still between two stages while the machine did something else
    assert statistics.median(sum(step["stages"][name] for name in within) / step["seconds"] for step in each) > 0.3


def test_without_timers_there_are_no_stages(folder: Path) -> None:
    settings = EngineSettings(model=str(folder), kv_blocks=256, threads=1, stage_timers=False)
    with ThreadServer(settings) as server:
        assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
        assert values(server.http.get("/metrics").text) == {}
