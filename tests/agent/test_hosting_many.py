"""Several engines on one host, and engines of others: each by its own command, with its own GPUs, its own start and its own end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agent.collectors.interface import Tick
from agent.engine_start import stage_of
from agent.engine_status import EngineStatus
from agent.hosting import Hosting, HostingTimes
from agent.settings import AgentSettings, EngineTarget
from telemetry.catalogue import check
from tests.doubles.foreign_engine import STEPS
from tests.processes import has_ended

PROGRAM = Path(__file__).parents[1] / "doubles" / "foreign_engine.py"
FAST = HostingTimes(restart_s=(0.0, 0.05, 0.1), look_s=0.05, look_ready_s=0.05, health_deadline_s=2.0)
GIVE_UP_S = 90.0


def until(holds: Callable[[], object], what: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + GIVE_UP_S
    while not holds():
        assert time.monotonic() < give_up_s, f"never came: {what()}"
        time.sleep(0.02)


class Hosts:
    """Engines that wait in each step of their start until a test lets them go on."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder = folder
        self.free_port = free_port
        self.targets: list[EngineTarget] = []
        self.hosting: Hosting | None = None

    def engine(self, name: str, kind: str, *, port: int = 0, gpus: str = "", wrapper: Path | None = None) -> None:
        port = port or self.free_port()
        (self.folder / name).mkdir()
        command = (sys.executable, str(PROGRAM), kind, str(port), str(self.folder / name))
        command = ("sh", str(wrapper), *command) if wrapper else command
        self.targets.append(EngineTarget(name, f"http://127.0.0.1:{port}", command=command, gpus=gpus))

    def start(self) -> None:
        self.hosting = Hosting({"node": "n1"}, self.targets, self.folder / "logs", times=FAST)
        self.hosting.start()

    def status(self, name: str) -> EngineStatus:
        assert self.hosting is not None
        return self.hosting.statuses()[name]

    def until(self, name: str, holds: Callable[[EngineStatus], object]) -> EngineStatus:
        until(lambda: holds(self.status(name)), lambda: self.status(name))
        return self.status(name)

    def ready(self, name: str) -> EngineStatus:
        (self.folder / name / "step").write_text("99")
        return self.until(name, lambda status: status.state == "ready")

    def events(self) -> list[tuple[str, str, int]]:
        assert self.hosting is not None
        found = [check(event) for event in self.hosting.collect(Tick(1, 1, 1.0))]
        return [(event.tags["subject"], event.tags["kind"], int(event.fields["code"])) for event in found]


@pytest.fixture
def hosts(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Hosts]:
    made = Hosts(tmp_path, free_port)
    yield made
    if made.hosting is not None:
        made.hosting.stop(0.5)


def test_two_engines_have_their_own_gpus_and_one_that_dies_leaves_the_other_alone(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/nowhere")
    hosts.engine("a", "vllm", gpus="0+1")
    hosts.engine("b", "llamacpp", gpus="2")
    hosts.start()
    first, other = hosts.ready("a"), hosts.ready("b")
    for name, visible in (("a", "0,1"), ("b", "2")):
        environment = json.loads((hosts.folder / name / "environment").read_text())
        assert environment["CUDA_VISIBLE_DEVICES"] == visible
        assert "NOTIFY_SOCKET" not in environment
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    again = hosts.until("a", lambda status: status.state == "ready" and status.pid != first.pid)
    assert again.restarts == 1
    assert hosts.status("b") == other
    assert hosts.events() == [("a", "restart", -9)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vllm", [("weights", None), ("weights", 0.5), ("graphs", 0.35)]),
        ("llamacpp", [("weights", None), ("warm-up", None)]),
        ("sglang", [("weights", None), ("graphs", 0.25)]),
        ("tgi", [("download", None), ("weights", None)]),
    ],
)
def test_the_start_of_an_engine_of_others_is_followed_step_by_step(
    hosts: Hosts, kind: str, expected: list[tuple[str, float | None]]
) -> None:
    hosts.engine("a", kind)
    hosts.start()
    for number, (stage, progress) in enumerate(expected, 1):
        (hosts.folder / "a" / "step").write_text(str(number))
        seen = hosts.until("a", lambda status, wanted=(stage, progress): (status.stage, status.progress) == wanted)  # type: ignore[misc]
        assert seen.state == "loading"
    assert hosts.ready("a").stage == ""
    assert hosts.events() == []


def test_an_engine_whose_queue_is_full_is_not_taken_for_one_that_loads_or_is_down(hosts: Hosts) -> None:
    hosts.engine("a", "tgi")
    hosts.start()
    pid = hosts.ready("a").pid
    (hosts.folder / "a" / "full").touch()
    seen = set()
    for _ in range(30):
        seen.add(hosts.status("a").state)
        time.sleep(0.02)
    assert seen == {"ready"}
    assert hosts.status("a").pid == pid


@pytest.mark.parametrize("script", ['"$@"\n', '"$@" &\nwait\n', 'exec "$@"\n'])
def test_an_engine_behind_a_shell_script_starts_dies_comes_back_and_is_stopped_whole(hosts: Hosts, script: str) -> None:
    wrapper = hosts.folder / "serve.sh"
    wrapper.write_text(f"# how this host starts its engine\n{script}")
    hosts.engine("a", "vllm", wrapper=wrapper)
    hosts.start()
    first = hosts.ready("a")
    assert first.pid is not None
    family = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    os.kill(family[-1].pid, signal.SIGKILL)  # the engine itself
    assert hosts.until("a", lambda status: status.state == "ready" and status.pid != first.pid).restarts == 1
    ((subject, kind, code),) = hosts.events()
    assert (subject, kind) == ("a", "restart")
    assert code != 0 or script.endswith("wait\n")  # a shell that waits for it all hides how it ended
    pid = hosts.status("a").pid
    assert pid is not None
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert hosts.hosting is not None
    hosts.hosting.stop(10.0)
    assert not [process for process in family if not has_ended(process.pid)]
    assert hosts.events() == []


def test_an_engine_behind_a_script_has_time_to_end_what_it_does(hosts: Hosts) -> None:
    wrapper = hosts.folder / "serve.sh"
    note = hosts.folder / "note"
    wrapper.write_text(
        f"(trap 'sleep 0.5; echo ended > {note}; exit' TERM; echo ready > {note}; while :; do sleep 0.05; done) &\nwait\n"
    )
    hosts.engine("a", "vllm", wrapper=wrapper)
    hosts.start()
    until(lambda: note.exists() and note.read_text() == "ready\n", lambda: hosts.status("a"))
    assert hosts.hosting is not None
    hosts.hosting.stop(10.0)
    assert note.read_text() == "ended\n"


def test_a_port_that_somebody_else_listens_at_is_named_and_the_engine_waits_until_it_is_free(hosts: Hosts) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = int(squatter.getsockname()[1])
        hosts.engine("a", "vllm", port=port)
        hosts.engine("b", "vllm")
        hosts.start()
        down = hosts.until("a", lambda status: status.state == "down")
        assert f":{port}" in down.problem
        assert f"pid {os.getpid()}" in down.problem
        assert hosts.ready("b").problem == ""
        assert not (hosts.folder / "a" / "environment").exists()
    assert hosts.ready("a").problem == ""
    assert hosts.events() == []


def test_two_hosted_engines_with_one_address_are_refused_by_name(tmp_path: Path) -> None:
    def settings(first: str, second: str, command: tuple[str, ...] | None = ("x",)) -> AgentSettings:
        targets = (EngineTarget("a", first, command=("x",)), EngineTarget("b", second, command=command))
        return AgentSettings(tmp_path, "sqlite:x", engines=targets)

    for first, second in (("http://127.0.0.1:8000", "http://localhost:8000/"), ("http://h", "http://H:80/metrics")):
        with pytest.raises(ValueError, match="a and b would both listen"):
            settings(first, second)
    settings("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    settings("http://127.0.0.1:8000", "http://127.0.0.1:8000", None)


def test_the_newest_line_that_names_a_stage_counts() -> None:
    assert stage_of("") is None
    assert stage_of("INFO: listening\nusing 90% of memory") is None
    assert stage_of("\n".join(STEPS["vllm"]).replace("\r", "\n")) == ("graphs", 0.35)
    assert stage_of("Loading weights: 12.5% done\nsomething else") == ("weights", None)
    assert stage_of("Loading weights: 250%") == ("weights", None)
    assert stage_of("torch.compile takes 12 s\nDownloading shards: 100%|##| 2/2") == ("download", 1.0)
