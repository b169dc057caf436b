"""Up: what a person sees when parts start, die, refuse or are in the way; and that nothing is left running."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pairscope.parts import PartSpec
from pairscope.up import Board, CannotStart, Plan, claim, run
from tests.pairscope.command_line import pairscope
from tests.processes import has_ended

READY = """
import os, pathlib, socket, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", "\\0" + os.environ["NOTIFY_SOCKET"][1:])
time.sleep(600)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(**codes: str) -> Plan:
        return Plan(
            parts=[
                PartSpec(
                    name,
                    [sys.executable, "-c", code, str(tmp_path / f"{name}.pid")],
                    dict(os.environ),
                    tmp_path / f"{name}.log",
                )
                for name, code in codes.items()
            ],
            addresses={},
            ports={},
            state_dir=tmp_path / "state",
            effective="{}",
            open_url="http://127.0.0.1:1",
            engine=None,
            simulated="",
            language="en",
            version="0",
        )

    return make


def run_until(plan: Plan, happened: Callable[[str], bool], limit_s: float = 90.0) -> tuple[int, str]:
    """Run the plan in this (main) thread; a watcher sends SIGINT as Ctrl-C does once `happened(what was printed)`."""
    screen = io.StringIO()

    def watch() -> None:
        deadline = time.monotonic() + limit_s
        try:
            while time.monotonic() < deadline and not happened(screen.getvalue()):
                time.sleep(0.05)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code = run(plan, Console(file=screen, soft_wrap=True))
    finally:
        watcher.join()
    return code, screen.getvalue()


def test_parts_become_ready_and_ctrl_c_stops_them_all(plan: Callable[..., Plan], tmp_path: Path) -> None:
    code, screen = run_until(plan(one=READY, two=READY), lambda text: "Open http" in text)
    assert code == 0
    assert screen.index("one") < screen.index("Open http://127.0.0.1:1")
    assert screen.rstrip().endswith("stopped")
    for name in ("one", "two"):
        assert has_ended(int((tmp_path / f"{name}.pid").read_text()))


def test_a_part_that_is_killed_comes_back_and_the_page_of_news_says_so(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    killed: list[int] = []

    def happened(text: str) -> bool:
        if "Open http" in text and not killed:
            killed.append(int((tmp_path / "one.pid").read_text()))
            os.kill(killed[0], signal.SIGKILL)
        return text.count("ready") == 2

    code, screen = run_until(plan(one=READY), happened)
    assert code == 0
    assert "killed by SIGKILL" in screen
    assert int((tmp_path / "one.pid").read_text()) != killed[0]


def test_a_port_in_use_is_named_with_its_option_and_nothing_is_started(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=f"port {port} on 127.0.0.1 .engine. .*--engine-port"):
            run(replace(plan(one=READY), ports={"engine": ("127.0.0.1", port)}), Console(file=io.StringIO()))
    assert not (tmp_path / "one.pid").exists()


def test_a_state_folder_that_cant_be_made_is_named(plan: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotStart, match=r"state folder .*/file/state can't be used: Not a directory"):
        run(replace(plan(one=READY), state_dir=tmp_path / "file" / "state"), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "taken", ["log", "log/two.log/"], ids=["a file where the folder should be", "a folder for a file"]
)
def test_a_log_that_cant_be_written_is_named_in_one_line_and_nothing_is_left_running(
    plan: Callable[..., Plan], tmp_path: Path, taken: str
) -> None:
    made = plan(one=READY, two=READY)
    parts = [replace(part, log=tmp_path / "log" / f"{part.name}.log") for part in made.parts]
    if taken.endswith("/"):
        (tmp_path / taken).mkdir(parents=True)
    else:
        (tmp_path / taken).write_text("")
    with pytest.raises(
        CannotStart, match=rf"can't be started with the log {tmp_path}/log/\w+\.log: .*--state-dir"
    ) as told:
        run(replace(made, parts=parts), Console(file=io.StringIO()))
    assert "\n" not in str(told.value)
    assert not (tmp_path / "two.pid").exists()
    started = tmp_path / "one.pid"
    assert not started.exists() or has_ended(int(started.read_text()))


def test_a_second_up_on_the_same_state_folder_is_refused(plan: Callable[..., Plan]) -> None:
    refused: list[str] = []

    def happened(text: str) -> bool:
        if "Open http" in text and not refused:
            try:
                run(plan(one=READY), Console(file=io.StringIO()))
            except (CannotStart, ValueError) as error:  # ValueError: signal handlers can't be set off the main thread
                refused.append(str(error))
        return bool(refused)

    run_until(plan(one=READY), happened)
    assert "another `pairscope up` uses the state folder" in refused[0]


def test_a_part_that_refuses_its_settings_ends_the_run_with_its_own_words(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    refusing = "import sys; print('model x: no such folder', file=sys.stderr); sys.exit(2)"
    with pytest.raises(CannotStart, match="model x: no such folder"):
        run(plan(one=READY, two=refusing), Console(file=io.StringIO()))
    started = tmp_path / "one.pid"
    pid = started.read_text() if started.exists() else ""  # it may have been stopped before it wrote what it is
    assert not pid or has_ended(int(pid))


def test_a_port_that_does_not_say_of_what_is_refused_with_the_options_that_do() -> None:
    refused = pairscope("up", "--port", "8000")
    assert refused.exit_code == 2 and "--dashboard-port" in refused.stderr and refused.stderr.count("\n") == 1
    assert "--port " not in pairscope("up", "--help").stdout


@pytest.mark.parametrize("language", ["en", "zh"])
def test_two_triage_services_never_share_a_state_folder(tmp_path: Path, language: str) -> None:
    held = claim(tmp_path, "triage.lock", "triage.already_running", "en")
    arguments = ["triage", "--serve", "--state-dir", str(tmp_path), "--store", f"sqlite://{tmp_path}/x.db"]
    refused = pairscope(*arguments, "--lang", language)
    os.close(held)
    assert refused.exit_code == 2
    (line,) = refused.stderr.strip().splitlines()
    assert str(tmp_path) in line and "--state-dir" in line and ("诊断服务" in line) is (language == "zh")
    assert not (tmp_path / "x.db").exists()


def test_how_far_the_engine_is_moves_on_a_terminal_and_is_one_line_a_stage_in_a_file() -> None:
    for terminal in (True, False):
        screen = io.StringIO()
        board = Board(Console(file=screen, force_terminal=terminal, width=100), "en")
        for layer in (1, 2):
            board.progress("quantising", layer / 2, f"tiny, layer {layer}/2")
        board.progress("warm-up", 0.0)
        board.end_progress()
        if terminal:
            assert "warming up" in screen.getvalue()
        else:
            assert [line.split()[-1] for line in screen.getvalue().splitlines()] == ["quantising", "up"]
