"""A card that is recorded at several power caps: the cap that costs is named with its loss, and the one that costs nothing is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import triage
from bench.power_sweep import RAMP_S, Row, cells_of, sweep, told

SLOTS, TOKENS, CELL_S = 6, 150, 200
PACE = {640: 1.0, 520: 0.985, 410: 0.93, 330: 0.79}
"""Cap, W -> speed of a request. The draw meets the cap from 520 W down."""


def recorded(folder: Path, paces: dict[int, float] = PACE) -> Path:
    """A sweep of one workload as a recorder writes it: the cells one after the other on one clock."""
    here = folder / "sweep" / "chat-n6"
    here.mkdir(parents=True)
    for place, (cap, pace) in enumerate(paces.items()):
        zero = 1_700_000_000 + 400 * place
        lines, load = [], []
        for t in range(0, CELL_S, 2):
            idle = t == 0  # the card wakes up
            power = 91.5 if idle else min(cap - 1.2, 566.0) + t % 3
            mhz, util = (420, 3) if idle else (round(2610 * pace**2), 99 - t % 2)
            lines.append(f"{zero + t},1, {power:.2f}, {57 + t % 4}, {mhz}, {util}")
        for slot in range(SLOTS):
            end = zero + 0.05 * slot
            while end < zero + CELL_S - 5:
                start, end = end + 0.004, end + 3.1 / pace + 0.01 * slot
                load.append(f"{slot},{start:.9f},{end:.9f},{TOKENS}")
        (here / f"power_{cap}w.csv").write_text("\n".join(lines) + "\n")
        (here / f"load_{cap}w.csv").write_text("\n".join(load) + "\n")
    return here.parent


def test_the_caps_that_cost_are_power_with_their_loss_and_the_others_are_nothing(tmp_path: Path) -> None:
    rows = {row.cap_w: row for row in sweep(recorded(tmp_path))}
    assert {cap: row.called for cap, row in rows.items()} == {640: "", 520: "", 410: "power", 330: "power"}
    for cap, row in rows.items():
        assert abs(row.cost_pct - 100 * (1 - PACE[cap])) < 0.5
        assert row.right, row
    assert "2/2 cells whose cap costs 5 % or more" in list(told(list(rows.values())))[-1]


def test_the_cost_is_read_from_the_requests_and_not_from_the_caps(tmp_path: Path) -> None:
    (cells,) = cells_of(recorded(tmp_path, {640: 1.0, 330: 1.0}))
    assert [cell.cap_w for cell in cells] == [640, 330]
    assert cells[0].tokens_per_s == pytest.approx(SLOTS * TOKENS / 3.14, rel=0.02)
    assert cells[0].running(RAMP_S, cells[0].end_s) == pytest.approx(SLOTS, rel=0.01)
    assert all(row.right and not row.costs for row in sweep(tmp_path / "sweep"))


@pytest.mark.parametrize(
    ("cost", "causes", "called", "loss", "right"),
    [
        (5.1, ("power",), "power", 9.9, True),
        (5.1, ("power",), "power", 10.2, False),
        (12.0, ("power", "thermal"), "power", 12.0, False),
        (12.0, ("thermal",), "thermal", 12.0, False),
        (12.0, ("power", "power before"), "power", 12.0, False),
        (12.0, ("power",), "", 12.0, False),
        (4.9, ("power",), "", 4.9, False),
        (4.9, (), "", None, True),
    ],
)
def test_a_row_is_right_only_when_cause_loss_and_place_are(
    cost: float, causes: tuple[str, ...], called: str, loss: float | None, right: bool
) -> None:
    assert Row("w", 300, cost, causes, called, loss).right is right


@pytest.mark.parametrize("damage", ["", "1,not a time,3,4\n", "0,5\n"], ids=["empty", "words", "short"])
def test_a_recording_that_can_not_be_read_is_named(tmp_path: Path, damage: str) -> None:
    folder = recorded(tmp_path)
    (folder / "chat-n6" / "load_410w.csv").write_text(damage)
    with pytest.raises(ValueError, match="chat-n6, cap 410 W"):
        sweep(folder)
    with pytest.raises(ValueError, match="no folder with power"):
        sweep(tmp_path / "elsewhere")


def test_the_bench_judges_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path, {640: 1.0, 330: PACE[330]})
    monkeypatch.setattr(sys, "argv", ["triage.py", "--power-sweep", str(folder)])
    assert triage.main() == 0
    assert "power sweep: 1/1 cells" in capsys.readouterr().out
