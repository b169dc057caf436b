"""A host with two GPUs: the C double of NVML, the real pynvml in a real reader process, and the collector over it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.collectors.gpu import Patience
from agent.collectors.interface import Tick
from agent.collectors.nvidia import NvidiaCollector
from agent.timing import ReaderTiming
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.nvml.library import FILE, build
from tests.doubles.nvml.scenario import Scenario, two_gpus

EVERY_TICK = ReaderTiming(
    memory_s=0.0,
    processes_s=0.0,
    health_s=0.0,
    limits_s=0.0,
    names_s=0.0,
    retry_s=0.05,
    rediscover_s=0.05,
    takeover_s=20.0,
)
"""All groups at every tick, and no long waits for what is out. No GPU counts as stuck, however busy the machine is."""

UNHURRIED = Patience(answer_s=20.0)
"""Waits for the end of each sweep however busy the machine is: a tick of the test is a sweep."""


@dataclass
class Host:
    """Ticks are a second apart by the clock that they carry, however fast the test runs."""

    scenario: Scenario
    folder: Path
    compiler: str
    number: int = 0
    now: float = 1000.0
    collectors: list[NvidiaCollector] = field(default_factory=list)

    def collector(self, timing: ReaderTiming = EVERY_TICK, patience: Patience = UNHURRIED) -> NvidiaCollector:
        made = NvidiaCollector({"node": "n07", "rack": "r2"}, timing, patience)
        self.collectors.append(made)
        return made

    def tick(
        self, collector: NvidiaCollector | None = None, seconds: float = 1.0, *, is_safe: bool = True
    ) -> list[Sample]:
        """The samples of one tick, each checked against the catalogue. `is_safe`: they come on disk before anything else happens."""
        self.number += 1
        self.now += seconds
        tick = Tick(self.number, 1_795_960_000_000_000_000 + self.number, self.now)
        asked = collector or self.collectors[-1]
        samples = [check(sample) for sample in asked.collect(tick)]
        if is_safe:
            asked.remember(tick.number)
        return samples

    def until(self, met: Callable[[list[Sample]], bool], attempts: int = 2000) -> list[Sample]:
        """Tick until the samples of one tick meet the condition; fails when they never do."""
        seen: list[Sample] = []
        for _ in range(attempts):
            seen = self.tick()
            if met(seen):
                return seen
            time.sleep(0.02)
        raise AssertionError(f"never seen; last: {seen}")

    def replace_library(self, *, version: int = 1, without: Sequence[str] = ()) -> None:
        build(self.compiler, self.folder, version=version, without=without)


def gpus(samples: Sequence[Sample]) -> dict[str, Sample]:
    """The gpu samples by the last four characters of the uuid."""
    return {sample.tags.get("uuid", "")[-4:]: sample for sample in samples if sample.measurement == "gpu"}


def states(samples: list[Sample]) -> dict[str, object]:
    return {name: sample.fields["state"] for name, sample in gpus(samples).items()}


def events(samples: Sequence[Sample], kind: str) -> list[Sample]:
    return [sample for sample in samples if sample.measurement == "event" and sample.tags["kind"] == kind]


@pytest.fixture(scope="session")
def compiler(need_program: Callable[[str], str]) -> str:
    return need_program("cc")


@pytest.fixture(scope="session")
def library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(compiler, tmp_path_factory.mktemp("nvml"))


@contextmanager
def running_host(library: Path, compiler: str, folder: Path) -> Iterator[Host]:
    """A host whose state, and whose own copy of the library, are in `folder`."""
    shutil.copy(library / FILE, folder)
    scenario = two_gpus(folder / "state")
    made = Host(scenario, folder, compiler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVML_DOUBLE_STATE", str(scenario.path))
        patch.setenv("LD_LIBRARY_PATH", os.pathsep.join((str(folder), os.environ.get("LD_LIBRARY_PATH", ""))))
        yield made
    scenario.release()
    for collector in made.collectors:
        collector.close()


@pytest.fixture
def host(library: Path, compiler: str, tmp_path: Path) -> Iterator[Host]:
    with running_host(library, compiler, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_host(library: Path, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One reader for many cases, its collector at work."""
    with running_host(library, compiler, tmp_path_factory.mktemp("shared")) as made:
        made.collector()
        yield made
