"""A recording holds the scenario, can be read back, and never appears half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.simulator.recording import record, scenario
from agent.simulator.settings import SimulatorError, SimulatorSettings
from telemetry.lineprotocol import read

SMALL = SimulatorSettings(nodes=1, gpus_per_node=2, history_s=60, fault="power-brake", fault_after_s=10)


@pytest.mark.parametrize("name", ["brake.lp", "brake.lp.gz"])
def test_a_recording_read_back_is_the_scenario(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    written = record(SMALL, 30, path)
    made = [sample for samples in scenario(SMALL, 30) for sample in samples]
    recording = read(path)
    found = list(recording)
    assert recording.bad_lines == 0
    assert len(found) == written == len(made)
    for mine, theirs in zip(made, found, strict=True):
        assert (theirs.measurement, dict(theirs.tags), theirs.time_ns) == (
            mine.measurement,
            dict(mine.tags),
            mine.time_ns,
        )
        assert dict(theirs.fields) == pytest.approx(dict(mine.fields))


def test_the_past_is_coarse_and_the_rest_is_fine(tmp_path: Path) -> None:
    times = sorted(
        {s.time_ns for samples in scenario(SMALL, 30, start_ns=0) for s in samples if s.measurement == "gpu"}
    )
    assert times == [i * 5 * 10**9 for i in range(1, 13)] + [(60 + i) * 10**9 for i in range(1, 31)]
    struck = [s for samples in scenario(SMALL, 30, start_ns=0) for s in samples if s.measurement == "event"]
    assert [s.time_ns for s in struck] == [70 * 10**9]


def test_a_recording_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="absent"):
        record(SMALL, 5, tmp_path / "absent" / "file.lp")
    (tmp_path / "folder.lp").mkdir()
    with pytest.raises(SimulatorError, match=r"folder\.lp"):
        record(SMALL, 5, tmp_path / "folder.lp")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.lp"]
    with pytest.raises(SimulatorError, match="longer than 0"):
        record(SMALL, 0, tmp_path / "file.lp")
