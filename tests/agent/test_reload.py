"""What a new configuration changes: which sources are made anew, which engines start and stop, and what waits for a restart."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agent.collectors.interface import Tick
from agent.hosting import Hosting, HostingTimes
from agent.reload import describe, difference, engine_changes, to_make_anew, warm
from agent.sampler import COLLECTORS, DEPENDS_ON, Sampler
from agent.settings import AgentSettings, BmcTarget, EngineTarget, PduTarget
from telemetry.sample import Sample
from tests.doubles.fake_clock import FakeClock
from tests.processes import has_ended

PROGRAM = Path(__file__).parents[1] / "doubles" / "hosted_engine.py"


def settings(**more: Any) -> AgentSettings:
    return AgentSettings(**{"state_dir": Path("/s"), "store_url": "sqlite:///s/store.db", "node": "n1", **more})


def until(holds: Callable[[], Any], what: str) -> Any:
    give_up_s = time.monotonic() + 90
    while time.monotonic() < give_up_s:
        found = holds()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"never came: {what}")


def test_what_can_not_change_while_running_is_kept_and_named() -> None:
    now = settings(rack="r1")
    wanted = settings(state_dir=Path("/other"), store_url="sqlite:///other.db", port=1, rack="r2", interval_s=5.0)
    found = difference(now, wanted)
    assert (found.kept, found.changed) == (["state_dir", "store_url", "port"], ["rack", "interval_s"])
    assert found.settings == settings(rack="r2", interval_s=5.0)


def test_a_change_is_described_without_its_values() -> None:
    secret = BmcTarget("https://bmc.example", "u", "hunter2")
    a, b, c = (EngineTarget(name, "http://127.0.0.1:1", api_key="k-hunter2") for name in "abc")
    now = settings(engines=(a, b))
    wanted = settings(engines=(dataclasses.replace(b, gpus="0"), c), bmc=secret)
    assert engine_changes(now.engines, wanted.engines) == {"a": "removed", "b": "changed", "c": "added"}
    told = describe(now, difference(now, wanted))
    assert told == "bmc, engine c added, engine a removed, engine b changed"
    assert "hunter2" not in told


def test_only_the_sources_that_a_change_concerns_are_made_anew() -> None:
    depends_on = {"gpu": ("nvml", "interval_s"), "host": (), "engine": ("engines", "interval_s")}
    sources = ["gpu", "host", "engine", "new"]
    assert to_make_anew(["nvml"], depends_on, sources) == {"gpu", "new"}
    assert to_make_anew(["interval_s"], depends_on, sources) == {"gpu", "engine", "new"}
    assert to_make_anew(["rack", "node"], depends_on, sources) == set()
    assert to_make_anew([], depends_on, sources) == set()


class Asked:
    """Settings that note what is asked of them."""

    def __init__(self, inner: AgentSettings) -> None:
        self._inner = inner
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("source", sorted(DEPENDS_ON))
def test_a_source_says_all_that_it_is_made_from(source: str) -> None:
    everything = settings(
        bmc=BmcTarget("https://127.0.0.1:1"),
        pdus=(PduTarget("p", "127.0.0.1", community="c"),),
        dcgm_url="http://127.0.0.1:1",
        ascend_url="http://127.0.0.1:1",
    )
    asked = Asked(everything)
    made = COLLECTORS[source](cast(AgentSettings, asked), {"node": "n1"}, None)
    if made is not None:
        made.close()
    assert asked.names - {"language", "node", "tags"} <= set(DEPENDS_ON[source])


def test_every_source_that_says_what_it_depends_on_exists() -> None:
    fields = {field.name for field in dataclasses.fields(AgentSettings)}
    assert set(DEPENDS_ON) <= set(COLLECTORS)
    assert all(set(names) <= fields for names in DEPENDS_ON.values())


class Source:
    def __init__(self, name: str, tags: dict[str, str]) -> None:
        self.name = name
        self.errors = 0
        self.ticks: list[int] = []
        self.closed = False
        self._tags = dict(tags)

    def collect(self, tick: Tick) -> Sequence[Sample]:
        self.ticks.append(tick.number)
        return [Sample(self.name, self._tags, {"inlet_c" if self.name == "thermal" else "load1": 1.0}, tick.time_ns)]

    def close(self) -> None:
        self.closed = True


def test_a_sampler_goes_on_with_what_it_is_given_and_loses_no_tick() -> None:
    old = {"node": "n1", "rack": "r1"}
    staying, leaving = Source("host", old), Source("thermal", {**old, "circuit": "c9"})
    clock = FakeClock()
    sampler = Sampler([staying, leaving], old, lambda _: None, interval_s=1.0, clock=clock)
    sampler.tick()
    new = {"node": "n1", "cluster": "chat"}
    coming = Source("thermal", new)
    done = sampler.change([staying, coming], new, 5.0)
    assert not done.is_set()
    tags = {sample.measurement: dict(sample.tags) for sample in sampler.tick()}
    assert done.is_set()
    assert (staying.ticks, leaving.ticks, coming.ticks) == ([1, 2], [1], [2])
    assert tags == {"host": new, "thermal": new, "agent": new}  # the rack is gone, the cluster is there
    sampler.close()
    assert staying.closed and coming.closed and not leaving.closed


def test_a_source_keeps_the_tags_of_its_own_when_the_hosts_change() -> None:
    old = {"node": "n1", "circuit": "c1"}
    pdu = Source("thermal", {"node": "n1", "circuit": "c9"})
    sampler = Sampler([pdu], old, lambda _: None, interval_s=1.0)
    sampler.change([pdu], {"node": "n2", "circuit": "c2"}, 1.0)
    (sample,) = (sample for sample in sampler.tick() if sample.measurement == "thermal")
    sampler.close()
    assert sample.tags == {"node": "n2", "circuit": "c9"}


def test_progress_tells_when_each_source_last_answered_and_last_said_something() -> None:
    class Silent(Source):
        def collect(self, tick: Tick) -> Sequence[Sample]:
            return super().collect(tick) if tick.number == 1 else []

    class Broken(Source):
        def collect(self, tick: Tick) -> Sequence[Sample]:
            raise OSError("gone")

    clock = FakeClock()
    tags = {"node": "n1"}
    sources = [Silent("host", tags), Broken("thermal", tags)]
    sampler = Sampler(sources, tags, lambda _: None, interval_s=1.0, clock=clock)
    sampler.tick()
    clock.advance(7.0)
    sampler.tick()
    clock.advance(2.0)
    progress = sampler.progress()
    sampler.close()
    assert progress["host"] == {"answered_age_s": 2.0, "samples_age_s": 9.0}
    assert progress["thermal"] == {"answered_age_s": None, "samples_age_s": None}


def test_a_new_source_is_read_until_it_is_ready_and_its_events_are_kept() -> None:
    class Starting(Source):
        def collect(self, tick: Tick) -> Sequence[Sample]:
            self.ticks.append(tick.number)
            return [Sample("event", {"node": "n", "kind": "deploy", "subject": "x"}, {"text": "t", "code": 0}, 1)]

        @property
        def pending(self) -> bool:
            return len(self.ticks) < 3

        def findings(self, language: str) -> Sequence[Any]:
            return []

    class Broken(Source):
        def collect(self, tick: Tick) -> Sequence[Sample]:
            raise RuntimeError("no")

    starting = Starting("host", {})
    assert len(warm(starting, 30.0)) == 3
    assert starting.ticks == [-1, -2, -3]  # no number that a tick of the sampler has
    assert warm(Broken("host", {})) == []


@pytest.fixture
def hosting(tmp_path: Path) -> Iterator[Callable[[Sequence[EngineTarget]], Hosting]]:
    made: list[Hosting] = []

    def start(targets: Sequence[EngineTarget]) -> Hosting:
        times = HostingTimes(restart_s=(0.0,), look_s=0.02, look_ready_s=0.05)
        made.append(Hosting({"node": "n1"}, targets, tmp_path, times=times))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.stop(0.2)


def engine(name: str, port: int, *arguments: str, **more: Any) -> EngineTarget:
    command = (sys.executable, str(PROGRAM), str(port), *arguments)
    return EngineTarget(name, f"http://127.0.0.1:{port}", command=command, **more)


def test_engines_are_added_removed_changed_and_left_alone(
    hosting: Callable[[Sequence[EngineTarget]], Hosting], free_port: Callable[[], int]
) -> None:
    steady, leaving, changing, coming = (
        engine(name, free_port()) for name in ("steady", "leaving", "changing", "coming")
    )
    host = hosting([steady, leaving, changing])
    until(lambda: all(status.state == "ready" for status in host.statuses().values()), "ready")
    before = {name: status.pid for name, status in host.statuses().items()}
    changed = dataclasses.replace(changing, gpus="0")
    host.change([dataclasses.replace(steady, probe_every_s=30.0), changed, coming], {"node": "n1"}, 10.0)
    until(lambda: all(status.state == "ready" for status in host.statuses().values()), "ready again")
    after = {name: status.pid for name, status in host.statuses().items()}
    assert set(after) == {"steady", "changing", "coming"}
    assert after["steady"] == before["steady"]
    assert after["changing"] != before["changing"]
    assert all(has_ended(before[name] or 0) for name in ("leaving", "changing"))
    assert host.collect(Tick(1, 1, 1.0)) == []  # what was asked for is no death


def test_nothing_is_started_once_the_end_was_asked_for(
    hosting: Callable[[Sequence[EngineTarget]], Hosting], free_port: Callable[[], int]
) -> None:
    host = hosting([])
    host.stop(0.1)
    host.change([engine("late", free_port())], {"node": "n1"}, 1.0)
    assert host.statuses() == {}
