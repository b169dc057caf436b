"""The terminal's judgement: nothing of a hostile recording reaches the terminal as a command, and wrong moments are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.pairscope.command_line import pairscope


def recording(tmp_path: Path, node: str) -> Path:
    path = tmp_path / "night.lp"
    start = 1_700_000_000 * 10**9
    path.write_text("".join(f"host,node={node} cpu_pct=5.0 {start + second * 10**9}\n" for second in range(60)))
    return path


def test_control_characters_of_a_recording_do_not_reach_the_terminal(tmp_path: Path) -> None:
    done = pairscope("triage", str(recording(tmp_path, "a\x1b]0;owned\x07b")), "--state-dir", str(tmp_path / "state"))
    assert "owned" in done.stdout or "owned" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("at", ["nonsense", "9999-12-31", "-5", "1960-01-01"])
def test_a_moment_that_makes_no_sense_is_one_line_and_exit_two(tmp_path: Path, at: str) -> None:
    done = pairscope("triage", str(recording(tmp_path, "n1")), f"--at={at}", "--state-dir", str(tmp_path / "state"))
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "is not a time" in done.stderr


def test_a_recording_is_never_written_over_what_is_not_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = pairscope("simulate", "1x2", "--seconds", "5", "--out", str(pipe), "--state-dir", str(tmp_path / "state"))
    assert done.exit_code == 2
    assert "not a regular file" in done.stderr
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", ["triage", "report"])
def test_a_large_recording_is_told_of_at_once_where_nobody_sees_a_bar_and_a_small_one_is_not(
    tmp_path: Path, command: str
) -> None:
    small = recording(tmp_path, "n1")
    state = ("--state-dir", str(tmp_path / "state"), "--json")
    assert "judging a recording" not in pairscope(command, str(small), *state).stderr
    large = tmp_path / "large.lp"
    large.write_bytes(b"#" * 53_000_000 + b"\n" + small.read_bytes())
    done = pairscope(command, str(large), *state)
    assert done.stderr.splitlines()[0] == "judging a recording of 53.0 MB ..."
    json.loads(done.stdout)


def test_a_recording_that_is_made_says_at_once_how_much_it_will_be(tmp_path: Path) -> None:
    out = tmp_path / "night.lp"
    done = pairscope("simulate", "1x2", "--seconds", "60", "--out", str(out), "--state-dir", str(tmp_path / "state"))
    first, *rest = done.stderr.splitlines()
    assert done.exit_code == 0 and first == "making 31 min of a fleet (nodes: 1, GPUs a node: 2) ..."
    assert rest[0].startswith("wrote ")
