"""Hosted engines are real processes: they load, serve, die, come back, and never outlive who wants them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.collectors.interface import Tick
from agent.engine_log import EngineLog
from agent.engine_status import EngineStatus
from agent.hosting import HostedEngine, Hosting, HostingTimes, engine_environment
from agent.oom import OomKills, says_out_of_memory
from agent.settings import EngineTarget
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.processes import has_ended

PROGRAM = Path(__file__).parents[1] / "doubles" / "hosted_engine.py"
FAST = HostingTimes(restart_s=(0.0, 0.05, 0.1), look_s=0.05, look_ready_s=0.1, health_deadline_s=0.5)
TICK = Tick(1, 10**18, 5.0)
GIVE_UP_S = 90.0


def until(holds: Callable[[], object], what: str) -> None:
    give_up_s = time.monotonic() + GIVE_UP_S
    while not holds():
        assert time.monotonic() < give_up_s, f"never came: {what}"
        time.sleep(0.02)


class Host:
    """Hosting of one engine, with what it reported so far."""

    def __init__(self, folder: Path, port: int, *arguments: str, command: tuple[str, ...] | None = None) -> None:
        command = command or (sys.executable, str(PROGRAM), str(port), *arguments)
        target = EngineTarget("chat", f"http://127.0.0.1:{port}", command=command)
        self.hosting = Hosting({"node": "n1"}, [target], folder, times=FAST)
        self.log = folder / "chat.log"
        self._events: list[Sample] = []
        self.hosting.start()

    @property
    def status(self) -> EngineStatus:
        return self.hosting.statuses()["chat"]

    def events(self) -> list[Sample]:
        self._events += [check(event) for event in self.hosting.collect(TICK)]
        return self._events

    def until(self, *states: str) -> EngineStatus:
        until(lambda: self.status.state in states, f"{states}, it is {self.status}")
        return self.status


@pytest.fixture
def hosts(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(*arguments: str, **how: object) -> Host:
        host = Host(tmp_path, free_port(), *arguments, **how)  # type: ignore[arg-type]
        made.append(host)
        return host

    yield make
    for host in made:
        host.hosting.stop(0.5)


def test_an_engine_is_seen_loading_with_its_progress_and_then_ready(hosts: Callable[..., Host], tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    host = hosts("--load-until", str(loaded))
    loading = host.until("loading")
    assert (loading.stage, loading.progress) == ("weights", 0.25)
    loaded.touch()
    ready = host.until("ready")
    assert (ready.stage, ready.progress, ready.problem, ready.restarts) == ("", None, "", 0)
    assert ready.pid is not None
    assert Path(f"/proc/{ready.pid}/cmdline").read_bytes().split(b"\0")[1].endswith(b"hosted_engine.py")
    assert os.getpgid(ready.pid) == ready.pid != os.getpgid(0)
    assert host.events() == []


def test_a_killed_engine_is_an_event_with_its_signal_and_is_back_without_help(hosts: Callable[..., Host]) -> None:
    host = hosts("--say", "the last words")
    pid = host.until("ready").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: host.status.state == "ready" and host.status.pid != pid, "ready again")
    (event,) = host.events()
    assert (event.tags["kind"], event.tags["subject"]) == ("restart", "chat")
    assert event.fields["code"] == -9
    assert "SIGKILL" in str(event.fields["text"])
    assert "the last words" in str(event.fields["detail"])
    assert host.status.restarts == 1
    assert abs(event.time_ns - time.time_ns()) < 60 * 10**9


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.long)])
def test_however_often_and_whenever_an_engine_is_killed_it_comes_back_and_every_death_is_told(
    hosts: Callable[..., Host], kills: int
) -> None:
    host = hosts("--load", "0.05")
    dice = random.Random(kills)
    for number in range(kills):
        pid = host.until("ready", "loading", "starting").pid
        if pid is not None and dice.random() < 0.7:
            pid = host.until("ready").pid
        until(lambda: host.status.pid is not None, "a process")
        victim = host.status.pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(host.events()) == number + 1, "its event")  # noqa: B023 - asked within this turn
        until(lambda: host.status.pid not in (None, victim), "another process")  # noqa: B023
    host.until("ready")
    assert [event.fields["code"] for event in host.events()] == [-9] * kills
    assert host.status.restarts == kills


def test_an_engine_that_keeps_failing_is_tried_again_and_again_with_its_exit_code(hosts: Callable[..., Host]) -> None:
    host = hosts("--exit", "3", "--say", "no such model")
    until(lambda: len(host.events()) >= 3, "three deaths")
    assert {event.tags["kind"] for event in host.events()} == {"restart"}
    assert {event.fields["code"] for event in host.events()} == {3}
    assert all(str(event.fields["detail"]).count("no such model") == 1 for event in host.events())


def test_waiting_grows_with_failures_in_a_row_and_a_steady_engine_starts_afresh(tmp_path: Path) -> None:
    target = EngineTarget("chat", "http://127.0.0.1:1", command=("true",))
    engine = HostedEngine(target, tmp_path, lambda *_: None, times=HostingTimes(), language="en")
    waits = []
    for engine._failures in range(1, 10):
        waits.append(engine._delay_s())
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_an_engine_that_was_steady_is_restarted_at_once_when_it_dies(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts()
    engine = host.hosting._engines["chat"]
    host.until("ready")
    engine._failures = 6
    engine._ready_since_s = time.monotonic() - 61
    os.kill(host.status.pid or 0, signal.SIGKILL)
    until(lambda: host.events(), "its death")
    assert engine._failures == 1


def test_a_program_that_does_not_exist_is_named_and_does_not_spin(hosts: Callable[..., Host]) -> None:
    host = hosts(command=("/no/such/engine", "--serve"))
    down = host.until("down")
    assert "/no/such/engine" in down.problem
    assert host.events() == []


def test_what_an_engine_started_goes_with_it(hosts: Callable[..., Host], tmp_path: Path) -> None:
    note = tmp_path / "child"
    host = hosts("--child", str(note))
    pid = host.until("ready").pid
    child = int(note.read_text())
    assert not has_ended(child)
    os.kill(pid or 0, signal.SIGKILL)
    until(lambda: has_ended(child), "the child's end")


def test_stopping_is_asked_for_gently_and_is_no_event(hosts: Callable[..., Host]) -> None:
    host = hosts()
    pid = host.until("ready").pid
    host.hosting.stop(10.0)
    assert has_ended(pid or 0)
    assert host.events() == []


def test_an_engine_that_will_not_stop_is_killed(hosts: Callable[..., Host]) -> None:
    host = hosts("--ignore-term")
    pid = host.until("ready").pid
    host.hosting.stop(0.3)
    assert has_ended(pid or 0)
    assert host.events() == []


def test_an_engine_that_waits_for_its_restart_can_be_stopped(tmp_path: Path, free_port: Callable[[], int]) -> None:
    host = Host(tmp_path, free_port(), "--exit", "1")
    until(lambda: len(host.events()) >= 2, "deaths")
    host.hosting.stop(10.0)
    assert not host.hosting._engines["chat"]._thread.is_alive()


def test_a_ready_engine_that_stops_answering_is_down_though_it_lives(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    host = hosts("--state", str(stuck))
    pid = host.until("ready").pid
    stuck.touch()
    down = host.until("down")
    assert down.pid == pid
    assert "stopped answering" in down.problem
    stuck.unlink()
    assert host.until("ready").pid == pid
    assert host.events() == []


def test_an_engine_does_not_outlive_an_agent_that_is_killed(tmp_path: Path, free_port: Callable[[], int]) -> None:
    port = free_port()
    note = tmp_path / "pid"
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time, pathlib\n"
            "from agent.hosting import Hosting\n"
            "from agent.settings import EngineTarget\n"
            "folder, port, program, note = sys.argv[1:]\n"
            "target = EngineTarget('chat', f'http://127.0.0.1:{port}', command=(sys.executable, program, port))\n"
            "hosting = Hosting({'node': 'n'}, [target], pathlib.Path(folder))\n"
            "hosting.start()\n"
            "while hosting.statuses()['chat'].state != 'ready': time.sleep(0.02)\n"
            "pathlib.Path(note).write_text(str(hosting.statuses()['chat'].pid))\n"
            "time.sleep(600)\n",
            str(tmp_path),
            str(port),
            str(PROGRAM),
            str(note),
        ],
        cwd=Path(__file__).parents[2],
    )
    try:
        until(lambda: note.exists() and note.read_text(), "the engine")
        pid = int(note.read_text())
        assert not has_ended(pid)
        agent.kill()
        agent.wait()
        until(lambda: has_ended(pid), "the engine's end")
    finally:
        agent.kill()
        agent.wait()


def test_an_engine_hears_nothing_of_the_agents_supervisor_and_sees_only_its_gpus(
    hosts: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/nowhere")
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    seen = tmp_path / "environment.json"
    hosts("--env", str(seen)).until("ready")
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & json.loads(seen.read_text()).keys()
    target = EngineTarget("chat", "http://127.0.0.1:1", command=("x",), gpus="2+3")
    environment = engine_environment(target, {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/h"})
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == ("2,3", "PCI_BUS_ID")
    assert environment["HOME"] == "/h"


def test_an_engine_learns_nothing_of_our_configuration_but_what_concerns_an_engine(
    hosts: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("PAIRSCOPE_STORE_TOKEN", "PAIRSCOPE_STORE", "PAIRSCOPE_AGENT__BMC__PASSWORD", "pairscope_triage")
    for name in secrets:
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("PAIRSCOPE_ENGINE__PORT", "8611")
    monkeypatch.setenv("PAIRSCOPE_LANG", "zh")
    seen = tmp_path / "environment.json"
    hosts("--env", str(seen)).until("ready")
    environment = json.loads(seen.read_text())
    assert "s3cret" not in environment.values()
    assert (environment["PAIRSCOPE_ENGINE__PORT"], environment["PAIRSCOPE_LANG"]) == ("8611", "zh")


def test_a_kernel_kill_for_memory_is_told_apart_from_any_other(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgpgin 5\noom_kill 7\n")
    kills = OomKills(vmstat)
    for second in range(30):
        kills.look(float(second))
    assert not kills.happened()
    vmstat.write_text("pgpgin 5\noom_kill 8\n")
    assert kills.happened()
    for second in range(30, 60):
        kills.look(float(second))
    assert not kills.happened()  # long ago by now
    assert not OomKills(tmp_path / "absent").happened()


def test_a_death_by_the_oom_killer_is_an_event_of_its_own(tmp_path: Path, free_port: Callable[[], int]) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 0\n")
    reports: list[tuple[str, int, str, str]] = []
    port = free_port()
    target = EngineTarget("chat", f"http://127.0.0.1:{port}", command=(sys.executable, str(PROGRAM), str(port)))
    engine = HostedEngine(
        target, tmp_path, lambda *report: reports.append(report), times=FAST, language="en", oom_kills=OomKills(vmstat)
    )
    engine.start()
    try:
        until(lambda: engine.status.state == "ready", "ready")
        vmstat.write_text("oom_kill 1\n")
        os.kill(engine.status.pid or 0, signal.SIGKILL)
        until(lambda: len(reports) >= 2, "two events")
        assert [(kind, code) for kind, code, _, _ in reports] == [("restart", -9), ("oom", -9)]
        assert "kernel" in reports[1][2]
    finally:
        engine.ask_to_stop()
        engine.stop(time.monotonic() + 1)


def test_running_out_of_device_memory_is_known_from_the_log(hosts: Callable[..., Host]) -> None:
    host = hosts("--exit", "1", "--say", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    until(lambda: len(host.events()) >= 2, "two events")
    assert [event.tags["kind"] for event in host.events()][:2] == ["restart", "oom"]
    assert not says_out_of_memory("memory profiling takes 3 s; out of 80 GiB")


def test_a_log_is_kept_small_and_its_end_is_readable(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "logs" / "chat.log", limit_bytes=10_000)
    with log.open() as file:
        for number in range(3000):
            file.write(b"line %d\n" % number)
            if number % 100 == 0:
                log.rotate()
            assert log.size() < 12_000
    assert log.tail().splitlines()[-1] == "line 2999"
    assert len(log.tail().splitlines()) == 20
    assert (tmp_path / "logs" / "chat.log.1").exists()
    assert (tmp_path / "logs" / "chat.log").stat().st_mode & 0o077 == 0


def test_the_end_of_a_log_has_no_control_characters_and_no_secrets(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "chat.log")
    with log.open() as file:
        file.write(
            b"\x1b[31mred\x1b[0m\x00\r\nargs: --api-key sk-verysecret123 password='hunter22x' n_tokens=512\xff\n"
        )
        file.write(b'{"hf_token": "hf_abcdefgh"} Authorization: Bearer abcdefghijk\n')
    tail = log.tail()
    assert "red" in tail
    assert "n_tokens=512" in tail
    assert not any(
        secret in tail for secret in ("verysecret", "hunter22x", "hf_abcdefgh", "abcdefghijk", "\x1b", "\x00")
    )


def test_the_end_of_a_log_is_that_of_this_run_only(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "chat.log")
    with log.open() as file:
        file.write(b"of the run before\n")
        start = log.size()
        file.write(b"of this run\n")
    assert log.tail(start) == "of this run"
    assert EngineLog(tmp_path / "absent.log").tail() == ""


def test_a_pipe_in_the_place_of_an_engines_log_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat.log")
    with pytest.raises(OSError, match=r"chat\.log"):
        EngineLog(tmp_path / "chat.log").open()
    reader = os.open(tmp_path / "chat.log", os.O_RDONLY | os.O_NONBLOCK)  # then it could be opened
    with pytest.raises(OSError, match=r"chat\.log"):
        EngineLog(tmp_path / "chat.log").open()
    os.close(reader)


def test_a_log_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked.log"
    blocked.mkdir()
    with pytest.raises(OSError, match=r"blocked\.log"):
        EngineLog(blocked).open()
