"""Of a split model each rank gets its own series: what it computed and what it waited, over the steps since the last reading."""

from __future__ import annotations

from agent.engine_ranks import RankReadings
from agent.exposition import parse
from telemetry.catalogue import RANK

FAMILIES = ("steps", "compute_seconds", "wait_seconds")


def text(**ranks: tuple[float, float, float]) -> str:
    lines = []
    for family, at in zip(FAMILIES, range(3), strict=True):
        lines.append(f"# TYPE pairscope_rank_{family}_total counter")
        for rank, numbers in ranks.items():
            label = f'model_name="m",rank="{rank.removeprefix("r")}"'
            lines.append(f"pairscope_rank_{family}_total{{{label}}} {numbers[at]}")
    return "\n".join(lines) + "\n"


def test_the_slow_rank_shows_by_its_own_work_while_the_other_shows_by_waiting() -> None:
    readings = RankReadings()
    first = readings.read(parse(text(r0=(100, 2.0, 1.0), r1=(100, 3.0, 0.5))))
    assert first == {
        "0": {"steps_total": 100, "compute_s": 2.0, "wait_s": 1.0},
        "1": {"steps_total": 100, "compute_s": 3.0, "wait_s": 0.5},
    }
    then = readings.read(parse(text(r0=(110, 2.1, 1.4), r1=(110, 3.45, 0.53))))
    assert {rank: round(float(fields["step_compute_mean_s"]), 6) for rank, fields in then.items()} == {
        "0": 0.01,
        "1": 0.045,
    }
    assert {rank: round(float(fields["step_wait_mean_s"]), 6) for rank, fields in then.items()} == {
        "0": 0.04,
        "1": 0.003,
    }
    for fields in then.values():
        assert {name: type(value) for name, value in fields.items()} == {
            name: RANK.fields[name].type for name in RANK.fields
        }


def test_no_mean_is_told_without_a_step_nor_over_a_restart() -> None:
    readings = RankReadings()
    readings.read(parse(text(r0=(100, 2.0, 1.0))))
    assert "step_compute_mean_s" not in readings.read(parse(text(r0=(100, 2.0, 1.0))))["0"]
    assert readings.read(parse(text(r0=(7, 0.2, 0.1))))["0"] == {"steps_total": 7, "compute_s": 0.2, "wait_s": 0.1}
    assert readings.read(None) == {}
    assert "step_compute_mean_s" not in readings.read(parse(text(r0=(9, 0.3, 0.1))))["0"]


def test_what_is_no_rank_is_left_out() -> None:
    lines = text(r0=(1, 1.0, 1.0)) + "".join(
        f'pairscope_rank_steps_total{{rank="{rank}"}} {steps}\n'
        for rank, steps in (("", 1), ("x", 1), ("1234567", 1), ("5", -1), ("6", "NaN"), ("7", 1e300))
    )
    assert set(RankReadings().read(parse(lines))) == {"0"}
