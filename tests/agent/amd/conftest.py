"""A host with two AMD GPUs: the C double of AMD SMI, the real amdsmi in a real reader process, and the collector over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.collectors.amd import AmdCollector
from agent.collectors.gpu import Patience
from agent.collectors.interface import Tick
from agent.timing import ReaderTiming
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.amdsmi.library import build
from tests.doubles.amdsmi.scenario import Scenario, two_gpus

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

NEW, OLD = "aaa1", "bbb2"
"""The MI300-like and the older GPU, by the end of their uuids."""


@dataclass
class Host:
    """Ticks are a second apart by the clock that they carry, however fast the test runs."""

    scenario: Scenario
    root: Path  # of a file system without any device
    number: int = 0
    now: float = 1000.0
    collectors: list[AmdCollector] = field(default_factory=list)

    def collector(
        self, timing: ReaderTiming = EVERY_TICK, patience: Patience = UNHURRIED, memory: Path | None = None
    ) -> AmdCollector:
        made = AmdCollector({"node": "n07", "rack": "r2"}, timing, patience, root=self.root, memory=memory)
        self.collectors.append(made)
        return made

    def tick(self, collector: AmdCollector | None = None, seconds: float = 1.0) -> list[Sample]:
        """The samples of one tick, each checked against the catalogue."""
        self.number += 1
        self.now += seconds
        tick = Tick(self.number, 1_795_960_000_000_000_000 + self.number, self.now)
        asked = collector or self.collectors[-1]
        samples = [check(sample) for sample in asked.collect(tick)]
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


def gpus(samples: Sequence[Sample]) -> dict[str, Sample]:
    """The gpu samples by the last four characters of the uuid."""
    return {sample.tags.get("uuid", "")[-4:]: sample for sample in samples if sample.measurement == "gpu"}


def states(samples: list[Sample]) -> dict[str, object]:
    return {name: sample.fields["state"] for name, sample in gpus(samples).items()}


def events(samples: Sequence[Sample], kind: str) -> list[Sample]:
    return [sample for sample in samples if sample.measurement == "event" and sample.tags["kind"] == kind]


def add_device(root: Path, card: int, vendor: str = "0x1002") -> None:
    """A graphics card in /sys as the kernel shows it."""
    device = root / f"sys/devices/pci0000:00/0000:{card:02x}:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    drm = root / f"sys/class/drm/card{card}"
    drm.mkdir(parents=True)
    (drm / "device").symlink_to(device)
    (root / f"sys/class/drm/card{card}-DP-1").mkdir()


@pytest.fixture(scope="session")
def compiler(need_program: Callable[[str], str]) -> str:
    return need_program("cc")


@pytest.fixture(scope="session")
def library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(compiler, tmp_path_factory.mktemp("amdsmi"))


@contextmanager
def running_host(library: Path, folder: Path) -> Iterator[Host]:
    scenario = two_gpus(folder / "state")
    root = folder / "root"
    root.mkdir()
    made = Host(scenario, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMDSMI_DOUBLE_STATE", str(scenario.path))
        patch.setenv("ROCM_PATH", str(library))
        patch.delenv("ROCM_HOME", raising=False)
        yield made
    scenario.release()
    for collector in made.collectors:
        collector.close()


@pytest.fixture
def host(library: Path, tmp_path: Path) -> Iterator[Host]:
    with running_host(library, tmp_path) as made:
        yield made
