"""Ctrl-C in the midst of a bench: what was measured is told, one line says that it was stopped, and nothing is left running."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from bench import engine_ab, engine_peers, engine_rss, stopping
from bench.engine_ab import Line
from bench.engine_peers import Contender, Run, Wanted
from tests.engine.running import ROOT, WAIT_S
from tests.processes import has_ended

DONE = Line("done", "what was done", "s", 1.0, 2.0, 0.5, "none", True)


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("first", [True, False])
def test_comparisons_that_are_done_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: bool
) -> None:
    made: dict[str, Callable[[Any], list[Line]]] = {"one": lambda _: [DONE]} if first else {}
    monkeypatch.setattr(engine_ab, "COMPARISONS", made | {"two": interrupted})
    monkeypatch.setattr(engine_ab, "assemble", lambda *_: SimpleNamespace())
    monkeypatch.setattr(engine_ab, "Bench", lambda *_: None)
    assert engine_ab.report([*made, "two"], "tiny", 1.0, 1, as_json=True) == 130
    told = capsys.readouterr()
    assert "stopped: " in told.err and "Traceback" not in told.err
    assert [line["name"] for line in json.loads(told.out)] == ["done"] if first else not told.out


def test_rows_of_peers_that_are_done_are_told_and_no_server_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = list[str]()

    def run(streams: int, _tokens: int) -> Run:
        return Run(60.0) if streams == 1 else interrupted()

    def peer(_python: Path, _wanted: Wanted) -> Any:
        class Served:
            def __enter__(self) -> Contender:
                return Contender("llama", "in process", "7", run)

            def __exit__(self, *_: object) -> None:
                left.append("llama")

        yield Served()

    monkeypatch.setattr(engine_peers, "llama", peer)
    wanted = Wanted("tiny", tmp_path, tmp_path, [1, 4], 8, 1, ["none"], {"llama": Path("python")})
    mine = Contender("none", "in process", "", lambda *_: Run(90.0))
    assert engine_peers.report(wanted, [mine], {}, "here", True, lambda _: None) == stopping.CODE
    told = capsys.readouterr()
    assert [(row["streams"], row["name"], row["tokens_per_s"]) for row in json.loads(told.out)["rows"]] == [
        (1, "llama", 60.0),
        (1, "none", 90.0),
    ]
    assert "stopped: what follows was measured until then" in told.err and left == ["llama"]


def test_a_slope_of_memory_needs_some_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_rss, "measure", lambda *_: (None, 2.0))
    assert engine_rss.report("tiny", "none", 10.0, 4, as_json=False) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_told_to_end_ends_what_it_has_started(number: signal.Signals) -> None:
    code = (
        "import subprocess, time; from bench import stopping; stopping.as_usual()\n"
        "with stopping.until_stopped(lambda: True):\n"
        "    served = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    try:\n"
        "        print(served.pid, flush=True); time.sleep(600)\n"
        "    finally:\n"
        "        served.kill(); served.wait()\n"
        "raise SystemExit(stopping.CODE)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    served = int(started.stdout.readline())
    started.send_signal(number)
    _, errors = started.communicate(timeout=WAIT_S)
    assert (started.returncode, errors) == (130, "stopped: what follows was measured until then\n")
    assert has_ended(served)


def test_ctrl_c_while_libraries_are_imported_ends_in_one_line() -> None:
    code = "from bench import stopping; stopping.while_imports_run(); print('up', flush=True); import time; time.sleep(600)"
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None and started.stdout.readline() == "up\n"
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=WAIT_S)
    assert (started.returncode, errors) == (130, "stopped: nothing is measured yet\n")
