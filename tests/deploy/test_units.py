"""The systemd units say what systemd understands, and leave the services little to abuse."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


@pytest.mark.server
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_understands_every_line(unit: Path, need_program: Callable[[str], str], tmp_path: Path) -> None:
    # the one complaint that is allowed is that the program is not installed under /opt here, so the copy names one that is
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/pairscope/bin/pairscope", "/bin/true"))
    done = subprocess.run(
        [need_program("systemd-analyze"), "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.server
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_exposure_is_two_of_ten_at_most(unit: Path, need_program: Callable[[str], str]) -> None:
    command = [need_program("systemd-analyze"), "security", "--offline=true", "--threshold=20", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:]


def test_the_agent_unit_waits_for_readiness_and_is_watched() -> None:
    agent = next(path for path in UNITS if path.name == "pairscope-agent.service").read_text()
    assert "Type=notify" in agent.splitlines()
    assert "WatchdogSec=30" in agent.splitlines()


def test_a_reload_of_the_agent_unit_is_the_signal_that_the_agent_takes_for_one() -> None:
    agent = next(path for path in UNITS if path.name == "pairscope-agent.service").read_text()
    assert [line for line in agent.splitlines() if line.startswith("ExecReload=")] == [
        "ExecReload=/bin/kill -HUP $MAINPID"
    ]
