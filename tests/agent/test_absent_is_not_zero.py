"""Absent is not zero: a source that was well and is then at its worst leaves nothing in the store that it did not say itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent.sampler import Sampler
from telemetry.catalogue import MEASUREMENTS
from telemetry.sample import Sample
from telemetry.store import open_store
from tests.agent.worst_sources import STEP_S, TAGS, WORST, made
from tests.doubles.fake_clock import FakeClock

WORDS = ("event", "agent")
"""Measurements of what happened and of the agent itself."""


def beyond(samples: Sequence[Sample], says: set[str]) -> list[str]:
    return [
        f"{sample.measurement}.{name}={value}"
        for sample in samples
        if sample.measurement not in WORDS
        for name, value in sample.fields.items()
        if name not in says
    ]


@pytest.mark.parametrize(("source", "how"), [(source, how) for source, (_, hows) in WORST.items() for how in hows])
def test_a_source_at_its_worst_stores_nothing_that_it_did_not_say(
    source: str, how: str, tmp_path: Path, need_program: Callable[[str], str]
) -> None:
    store = open_store(f"sqlite://{tmp_path / 'store.db'}")
    times: list[int] = []
    with WORST[source][0](made(tmp_path / "plant"), how, need_program) as plant:
        clock = FakeClock()
        sampler = Sampler(
            [plant.collector], TAGS, store.write, clock=clock, after_tick=lambda tick: times.append(tick.time_ns)
        )

        def until(met: Callable[[list[Sample]], bool], what: str) -> None:
            give_up_s = time.monotonic() + 90
            seen: list[Sample] = []
            while time.monotonic() < give_up_s:
                clock.advance(STEP_S)
                seen = sampler.tick()
                if met(seen):
                    return
                time.sleep(0.02)
            raise AssertionError(f"{what} never came; last: {beyond(seen, plant.says)}")

        until(lambda seen: any(plant.well in sample.fields for sample in seen), "health")
        plant.worsen()
        asked = plant.asked()
        until(lambda seen: plant.asked() >= asked + 2 and not beyond(seen, plant.says), "the worst")
        worst_ns = times[-1]
        asked, ticked, enough_s = plant.asked(), len(times), time.monotonic() + 0.3

        def seen_enough(_seen: list[Sample]) -> bool:
            return len(times) >= ticked + 3 and (plant.asked() >= asked + 4 or time.monotonic() > enough_s)

        until(seen_enough, "more readings")
        sampler.close()
    found = [sample for name in MEASUREMENTS for sample in store.samples(name, start_ns=0, end_ns=2**62)]
    assert {sample.time_ns for sample in found} <= set(times)
    assert beyond([sample for sample in found if sample.time_ns >= worst_ns], plant.says) == []
    assert len({sample.time_ns for sample in found if sample.time_ns >= worst_ns}) >= 3
