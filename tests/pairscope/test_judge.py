"""The terminal's judgement: nothing of a hostile recording reaches the terminal as a command, and wrong moments are refused."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from telemetry.sample import Sample
from telemetry.store import open_store
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


START = 1_700_000_000 * 10**9
NOTHING = {
    "empty.lp": (b"", "is empty", "为空"),
    "events.lp": (
        f'event,node=n1,kind=deploy,subject=chat text="a" {START}\n'.encode(),
        "no reading of a GPU",
        "没有 GPU",
    ),
    "nobody.lp": (f"gpu,gpu=0,uuid=G util_pct=3 {START}\n".encode(), "which node", "所属节点"),
    "letter.lp": (b"Dear Sir\nor Madam\n", "line protocol", "行协议"),
    "cut.lp.gz": (gzip.compress(b"host,node=n1 cpu_pct=5.0 1\n" * 999)[:-20], "cut off", "截断"),
    "plain.lp.gz": (b"host,node=n1 cpu_pct=5.0 1\n", "without .gz", "去掉 .gz"),
    "none.lp": (None, "No such file", "检查文件名"),
}


@pytest.mark.parametrize("command", ["triage", "report"])
@pytest.mark.parametrize("name", NOTHING)
def test_a_recording_with_nothing_to_judge_is_one_line_with_what_to_do(tmp_path: Path, command: str, name: str) -> None:
    content, english, chinese = NOTHING[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for language, said in (("en", english), ("zh", chinese)):
        state = ("--state-dir", str(tmp_path / "state"), "--json", "--lang", language)
        done = pairscope(command, str(path), *state)
        assert done.exit_code == 2 and done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert said in line and str(path) in line and "samples name no node" not in line


@pytest.mark.parametrize("command", ["triage", "report"])
def test_a_moment_before_a_recording_and_a_node_that_it_has_not_are_named(tmp_path: Path, command: str) -> None:
    state = ("--state-dir", str(tmp_path / "state"), "--json")
    early = pairscope(command, str(recording(tmp_path, "n1")), "--at", "2020-01-01", *state)
    assert early.exit_code == 2 and "begins at 2023-11-14T22:13:20Z" in early.stderr


def test_triage_of_one_node_of_a_recording_judges_that_one_and_refuses_one_that_is_not_there(tmp_path: Path) -> None:
    path = recording(tmp_path, "n1")
    path.write_text(path.read_text() + path.read_text().replace("node=n1", "node=n2"))
    done = pairscope("triage", str(path), "--node", "n2", "--state-dir", str(tmp_path / "s"), "--lang", "en")
    assert done.exit_code == 0 and "n2" in done.stdout and "n1" not in done.stdout
    done = pairscope("triage", str(path), "--node", "n9", "--state-dir", str(tmp_path / "s"), "--lang", "en")
    assert done.exit_code == 2 and "n9" in done.stderr and "it has: n1, n2" in done.stderr


def test_a_report_of_two_nodes_names_the_one_that_the_recording_has_not(tmp_path: Path) -> None:
    nodes = ("--node", "n1", "--node", "n9")
    done = pairscope("report", str(recording(tmp_path, "n1")), *nodes, "--state-dir", str(tmp_path / "s"), "--json")
    assert done.exit_code == 2 and "nothing of node n9" in done.stderr and "it has: n1" in done.stderr


def test_a_report_of_a_node_that_a_recording_has_not_names_those_that_it_has(tmp_path: Path) -> None:
    done = pairscope(
        "report", str(recording(tmp_path, "n1")), "--node", "n9", "--state-dir", str(tmp_path / "s"), "--json"
    )
    assert done.exit_code == 2 and "n9" in done.stderr and "it has: n1" in done.stderr


@pytest.mark.parametrize("command", ["triage", "report"])
def test_reading_a_store_is_told_of_at_once_on_stderr_where_no_terminal_shows_it(tmp_path: Path, command: str) -> None:
    url = f"sqlite://{tmp_path}/x.db"
    now = time.time_ns()
    store = open_store(url)
    store.write([Sample("host", {"node": "n1"}, {"cpu_pct": 5.0}, now - second * 10**9) for second in range(60)])
    store.close()
    done = pairscope(command, "--all", "--json", "--store", url, "--state-dir", str(tmp_path / "state"))
    assert done.exit_code == 0
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"reading all nodes from {url}, since 20")
    json.loads(done.stdout)


@pytest.mark.parametrize("command", ["triage", "report"])
def test_a_stray_sample_hours_after_a_recording_is_told_of_in_one_line_and_does_not_end_it(
    tmp_path: Path, command: str
) -> None:
    path = recording(tmp_path, "n1")
    whole = path.read_text()
    path.write_text(whole.replace("host,", f"host,node=n1 cpu_pct=5.0 {4_000_000_000 * 10**9}\nhost,", 1))
    arguments = ["--state-dir", str(tmp_path / "state")] if command == "triage" else ["--json"]
    done = pairscope(command, str(path), *arguments)
    told = [line for line in done.stderr.splitlines() if "are left out" in line]
    assert len(told) == 1 and "1 samples lie hours after all others, the first at 2096-10-02" in told[0]
    assert "ends at 2023-11-14T22:14:19" in told[0]
    assert "2096" not in done.stdout
