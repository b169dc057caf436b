"""NVML and dcgm-exporter on one host: one sample a GPU, NVML's word where both speak, and DCGM's fields beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from agent.collectors.dcgm import DcgmCollector
from agent.collectors.gpu import Patience
from agent.nvml import codes
from agent.sampler import Sampler
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.agent.nvidia.conftest import EVERY_TICK, Host
from tests.doubles.exporter_endpoint import FIRST, SECOND, ExporterEndpoint

TAGS = {"node": "n07", "rack": "r2"}
UUIDS = {FIRST.uuid, SECOND.uuid}


class Both:
    """A sampler over the two sources, ticking by the real clock. The exporter numbers the GPUs the other way round."""

    def __init__(self, host: Host) -> None:
        self.server = ExporterEndpoint(devices=(replace(SECOND, index=0), replace(FIRST, index=1)))
        nvml = host.collector(EVERY_TICK, Patience(answer_s=0.7, hung_s=1.0))
        dcgm = DcgmCollector(TAGS, self.server.url, every_s=0.1)
        dcgm.beside([nvml, dcgm])
        self.sampler = Sampler([nvml, dcgm], TAGS, lambda _samples: None)

    def until(self, met: Callable[[Mapping[str, Sample]], bool]) -> Mapping[str, Sample]:
        """Tick until the GPU samples of one tick, by uuid, meet the condition."""
        give_up_s = time.monotonic() + 90
        while time.monotonic() < give_up_s:
            self.server.run(1)
            gpus = [check(sample) for sample in self.sampler.tick() if sample.measurement == "gpu"]
            for moment in {sample.time_ns for sample in gpus}:
                seen = [sample.tags["uuid"] for sample in gpus if sample.time_ns == moment]
                assert len(seen) == len(set(seen))
            found = {sample.tags["uuid"]: sample for sample in gpus}
            assert found.keys() <= UUIDS
            if met(found):
                return found
            time.sleep(0.05)
        raise AssertionError(f"never seen; last: {found}")


@pytest.fixture
def both(host: Host) -> Iterator[Both]:
    made = Both(host)
    yield made
    host.scenario.release()
    made.sampler.close()
    made.server.close()


def has_both(found: Mapping[str, Sample]) -> bool:
    return found.keys() == UUIDS and all(
        {"gr_active_pct", "pstate"} <= sample.fields.keys() for sample in found.values()
    )


def test_two_sources_make_one_sample_a_gpu_in_which_nvmls_word_stands(host: Host, both: Both) -> None:
    found = both.until(has_both)
    for sample, device, index in ((found[FIRST.uuid], FIRST, 0), (found[SECOND.uuid], SECOND, 1)):
        state = host.scenario.gpu(index)
        assert sample.tags["gpu"] == str(index)
        assert sample.fields["gr_active_pct"] == pytest.approx(device.gr * 100)
        assert sample.fields["temp_c"] == state.temperature != device.temp
        assert sample.fields["state"] == codes.OK
        assert sample.fields.get("source", "nvml") == "nvml"


def test_a_gpu_that_hangs_in_nvml_is_hung_whatever_an_exporter_repeats_of_it(host: Host, both: Both) -> None:
    both.until(has_both)
    host.scenario.hang(0)
    found = both.until(lambda found: FIRST.uuid in found and found[FIRST.uuid].fields.get("state") == codes.HUNG)
    for _ in range(3):
        found = both.until(lambda found: FIRST.uuid in found and "gr_active_pct" in found[FIRST.uuid].fields)
        assert found[FIRST.uuid].fields["state"] == codes.HUNG
