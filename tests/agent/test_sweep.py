"""A sweep waits for what needs time, not for ever, and says of each source how it is, also of one that says nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from agent import sweep as sweeping
from agent.collectors.interface import Finding, Tick
from agent.settings import AgentSettings
from agent.sweep import sweep
from telemetry.sample import Sample

TAGS = {"node": "n1"}


class Plain:
    """Says nothing of itself; delivers what it is told to."""

    def __init__(self, name: str, fields: Sequence[dict[str, float | int]], raises: bool = False) -> None:
        self.name = name
        self.errors = 0
        self.closed = False
        self._fields = list(fields)
        self._raises = raises

    def collect(self, tick: Tick) -> Sequence[Sample]:
        if self._raises:
            raise OSError("gone")
        fields = self._fields.pop(0) if self._fields else None
        own = {"gpu": {"gpu": "0", "uuid": "GPU-1"}, "engine": {"engine": "chat"}}
        tags = {**TAGS, **own.get(self.name, {})}
        return [Sample(self.name, tags, fields, tick.time_ns)] if fields else []

    def close(self) -> None:
        self.closed = True


class Slow(Plain):
    """Answers at its n-th tick."""

    def __init__(self, name: str, at: int, defect: bool = False) -> None:
        super().__init__(name, [])
        self._left = at
        self._defect = defect

    def collect(self, tick: Tick) -> Sequence[Sample]:
        self._left -= 1
        return [Sample("thermal", TAGS, {"inlet_c": 21.5}, tick.time_ns)] if self._left == 0 else []

    @property
    def pending(self) -> bool:
        return self._left > 0

    def findings(self, language: str) -> Sequence[Finding]:
        if self._defect:
            raise KeyError("defect")
        return [Finding(self.name, "ok", f"answers in {language}")]


def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *sources: Plain, wait_s: float = 15.0) -> sweeping.Sweep:
    monkeypatch.setattr(sweeping, "collectors", lambda _settings, _memory: list(sources))
    settings = AgentSettings(state_dir=tmp_path, store_url="sqlite:///x", node="n1", interval_s=0.05)
    found = sweep(settings, wait_s=wait_s)
    assert all(source.closed for source in sources)
    return found


def test_a_slow_source_is_waited_for_and_its_reading_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = swept(tmp_path, monkeypatch, Slow("bmc", 5))
    assert [sample.fields for sample in found.samples if sample.measurement == "thermal"] == [{"inlet_c": 21.5}]
    assert found.findings == [Finding("bmc", "ok", "answers in en")]
    assert found.waiting == []


def test_a_source_that_never_answers_is_given_up_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = swept(tmp_path, monkeypatch, Slow("bmc", 10**6), Slow("pdu", 1), wait_s=0.3)
    assert found.waiting == ["bmc"]
    assert [(finding.source, finding.level) for finding in found.findings] == [
        ("bmc", "ok"),
        ("pdu", "ok"),
        ("bmc", "warning"),
    ]


def test_a_source_that_says_nothing_of_itself_is_judged_by_what_it_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "SETTLE_S", 0.2)
    sources = (Plain("host", [{"load1": 1.0}]), Plain("dcgm", []), Plain("amd", [], raises=True), Slow("x", 1, True))
    found = swept(tmp_path, monkeypatch, *sources)
    levels = {finding.source: finding.level for finding in found.findings}
    assert levels == {"host": "ok", "dcgm": "absent", "amd": "error", "x": "error"}


def test_what_is_not_read_at_every_tick_stands_unless_the_device_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: dict[str, float | int] = {"util_pct": 40.0, "mem_used_bytes": 5e9, "state": 0}
    well = swept(tmp_path, monkeypatch, Plain("gpu", [full, {"util_pct": 41.0, "state": 0}]))
    (gpu,) = (sample for sample in well.samples if sample.measurement == "gpu")
    assert gpu.fields == {"util_pct": 41.0, "mem_used_bytes": 5e9, "state": 0}
    lost = swept(tmp_path, monkeypatch, Plain("gpu", [full, {"state": 1}]))
    (gpu,) = (sample for sample in lost.samples if sample.measurement == "gpu")
    assert gpu.fields == {"state": 1}


def test_what_an_engine_told_in_the_first_tick_is_shown_though_it_is_not_asked_in_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, float | int] = {"up": 1, "requests_running": 3.0, "stats_age_s": 0.1}
    well = swept(tmp_path, monkeypatch, Plain("engine", [told, {"up": 1, "stats_age_s": 1.1}]))
    (engine,) = (sample for sample in well.samples if sample.measurement == "engine")
    assert engine.fields == {"up": 1, "requests_running": 3.0, "stats_age_s": 1.1}
    down = swept(tmp_path, monkeypatch, Plain("engine", [told, {"up": 0, "starting": 0}]))
    (engine,) = (sample for sample in down.samples if sample.measurement == "engine")
    assert engine.fields == {"up": 0, "starting": 0}
