"""The whole agent as a real process: it ticks, hosts, stores, shows, says when it is ready, and ends when told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agent.daemon import Agent, AgentSettings, CannotStart, EngineTarget
from agent.sweep import sweep
from telemetry.catalogue import check
from telemetry.store import open_store
from tests import loopback
from tests.doubles.engine_endpoint import EngineEndpoint, Page, nothing_listens
from tests.doubles.engine_texts.pairscope import pairscope
from tests.processes import has_ended

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "doubles" / "hosted_engine.py"
START = (
    "import json, sys\n"
    "from pathlib import Path\n"
    "from agent.daemon import AgentSettings, EngineTarget, run\n"
    "given = json.loads(sys.argv[1])\n"
    "given['state_dir'] = Path(given['state_dir'])\n"
    "given['engines'] = tuple(EngineTarget(**{**engine, 'command': tuple(engine['command']) if 'command' in engine else None})"
    " for engine in given.get('engines', []))\n"
    "sys.exit(run(AgentSettings(**given)))\n"
)


class AgentProcess:
    """A started agent, and what it says over its notify socket."""

    def __init__(self, state: Path, free_port: int, *, before: str = "", **more: Any) -> None:
        """`before` is run in the agent's process before it starts."""
        port = more.pop("port", free_port)
        self.url = f"http://127.0.0.1:{port}"
        self.store_url = f"sqlite://{state}/store.db"
        self.heard = ""
        address = state / "notify"
        state.mkdir(parents=True, exist_ok=True)
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(str(address))
        self._channel.settimeout(0.05)
        given = {
            "state_dir": str(state),
            "store_url": self.store_url,
            "node": "n1",
            "rack": "r1",
            "port": port,
            "interval_s": 0.2,
            **more,
        }
        environment = {**os.environ, "NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "30000000"}
        environment.pop("WATCHDOG_PID", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + START, json.dumps(given)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def listen(self) -> str:
        with contextlib.suppress(TimeoutError):
            while True:
                self.heard += self._channel.recv(4096).decode() + "\n"
        return self.heard

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        give_up_s = time.monotonic() + 90
        while time.monotonic() < give_up_s:
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            self.listen()
            with contextlib.suppress(httpx.TransportError):
                found = holds()
                if found:
                    return found
        raise AssertionError(f"never came: {what}; heard {self.heard!r}")

    def ready(self) -> None:
        self.until(lambda: "READY=1" in self.heard, "READY")

    def health(self) -> dict[str, Any]:
        return dict(loopback.get(f"{self.url}/healthz").json())

    def engine(self) -> dict[str, Any]:
        return dict(self.health()["engines"][0])

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)

    def stored(self, measurement: str) -> list[Any]:
        store = open_store(self.store_url)
        try:
            return [check(s) for s in store.samples(measurement, start_ns=0, end_ns=2**62)]
        finally:
            store.close()


@pytest.fixture
def agents(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., AgentProcess]]:
    made: list[AgentProcess] = []

    def start(**more: Any) -> AgentProcess:
        made.append(AgentProcess(tmp_path / "state", free_port(), **more))
        return made[-1]

    yield start
    for agent in made:
        agent.process.kill()
        agent.process.communicate()
        agent._channel.close()


def hosted(port: int, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), str(port), *arguments]
    return {"name": "chat", "url": f"http://127.0.0.1:{port}", "command": command}


SLOW_TICKS = (
    "import time, agent.sampler as sampler\n"
    "tick = sampler.Sampler.tick\n"
    "sampler.Sampler.tick = lambda self: (time.sleep(0.5), tick(self))[1]\n"
)


def test_an_agent_that_misses_many_ticks_calls_itself_degraded_with_the_figure(
    agents: Callable[..., AgentProcess],
) -> None:
    agent = agents(before=SLOW_TICKS)
    agent.ready()
    agent.until(lambda: agent.health()["ticks_missed_of_late"] >= 10, "missed ticks")
    answer = loopback.get(f"{agent.url}/healthz")
    health = answer.json()
    assert answer.status_code == 200 and health["status"] == "degraded"
    said = next(text for text in health["degraded"] if "missed" in text)
    assert f"{health['ticks_missed_of_late']} of the {health['ticks_due_of_late']} ticks" in said
    assert agent.end() == 0


def test_a_host_without_a_gpu_is_sampled_stored_and_shown(agents: Callable[..., AgentProcess]) -> None:
    agent = agents()
    agent.ready()
    agent.until(lambda: agent.health()["ticks"] >= 4, "ticks")
    health = agent.health()
    assert (health["node"], health["engines"]) == ("n1", [])
    assert health["status"] == ("degraded" if health["degraded"] else "ok")  # a busy machine may miss ticks
    assert health["tick_age_s"] < 60
    text = loopback.get(f"{agent.url}/metrics").text
    assert 'pairscope_host_cpu_pct{node="n1",rack="r1"}' in text
    assert "pairscope_agent_tick_ms" in text
    assert agent.end() == 0
    hosts, reports = agent.stored("host"), agent.stored("agent")
    assert len(hosts) >= 4
    assert [sample.time_ns for sample in hosts] == [sample.time_ns for sample in reports]
    assert all(sample.tags == {"node": "n1", "rack": "r1"} for sample in hosts)
    assert agent.process.stderr is not None
    assert agent.process.stderr.read() == ""


def test_the_watchdog_is_pinged_by_completed_ticks(agents: Callable[..., AgentProcess]) -> None:
    agent = agents()
    agent.ready()
    agent.until(lambda: agent.heard.count("WATCHDOG=1") >= 3, "pings")
    assert agent.heard.index("READY=1") < agent.heard.index("WATCHDOG=1")
    agent.listen()
    before = agent.heard.count("WATCHDOG=1")
    assert before <= agent.health()["ticks"]
    agent.process.send_signal(signal.SIGSTOP)
    agent.until(lambda: psutil.Process(agent.process.pid).status() == psutil.STATUS_STOPPED, "the stop")
    before = agent.listen().count("WATCHDOG=1")
    time.sleep(0.5)
    agent.listen()
    assert agent.heard.count("WATCHDOG=1") == before
    agent.process.send_signal(signal.SIGCONT)
    agent.until(lambda: agent.heard.count("WATCHDOG=1") > before, "pings again")


KILLED_BEFORE_AN_EVENT_IS_ON_DISK = """
import os, signal
from agent.spool.disk import Disk
def sync(self, descriptor, real=Disk.sync):
    if "keep-" in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.ftruncate(descriptor, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, descriptor)
Disk.sync = sync
"""


def test_another_version_is_told_also_where_a_kill_came_before_it_was_on_disk(
    agents: Callable[..., AgentProcess], tmp_path: Path
) -> None:
    server = EngineEndpoint()
    server.metrics(pairscope(version="0.2.0"))
    memory = tmp_path / "state" / "engines.json"
    memory.parent.mkdir()
    memory.write_text('{"chat": {"version": "0.1.0"}}')
    engines = [{"name": "chat", "url": server.url}]
    killed = agents(engines=engines, before=KILLED_BEFORE_AN_EVENT_IS_ON_DISK)
    assert killed.process.wait(120) == -signal.SIGKILL
    assert json.loads(memory.read_text())["chat"]["version"] == "0.1.0"
    (tmp_path / "state" / "notify").unlink()
    agent = agents(engines=engines)
    agent.until(lambda: "0.2.0" in memory.read_text(), "the new version is remembered")
    told = agent.until(
        lambda: [event for event in agent.stored("event") if event.tags["kind"] == "deploy"], "the event"
    )
    texts = {event.fields["text"] for event in told}  # it is there twice where it had been delivered before the kill
    assert texts == {"pairscope 0.1.0 -> 0.2.0"}
    server.close()


def test_a_hosted_engine_is_shown_from_loading_to_ready_and_killed_and_back(
    agents: Callable[..., AgentProcess], free_port: Callable[[], int], tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    agent = agents(engines=[hosted(free_port(), "--load-until", str(loaded))])
    agent.ready()
    loading = agent.until(lambda: e if (e := agent.engine())["state"] == "loading" else None, "loading")
    assert (loading["stage"], loading["progress"]) == ("weights", 0.25)
    agent.until(lambda: "STATUS=chat: loading, weights 25%" in agent.heard, "status")
    loaded.touch()
    first = agent.until(lambda: e if (e := agent.engine())["state"] == "ready" else None, "ready")
    os.kill(first["pid"], signal.SIGKILL)
    agent.until(lambda: (e := agent.engine())["state"] == "ready" and e["pid"] != first["pid"], "ready again")
    assert agent.engine()["restarts"] == 1
    last = agent.engine()["pid"]
    assert agent.end() == 0
    assert has_ended(last)
    (death,) = agent.stored("event")
    assert (death.tags["kind"], death.tags["subject"], death.fields["code"]) == ("restart", "chat", -9)
    assert any(sample.time_ns > death.time_ns for sample in agent.stored("host"))  # telemetry went on


def test_an_agent_ends_in_time_with_an_engine_that_will_not(
    agents: Callable[..., AgentProcess], free_port: Callable[[], int]
) -> None:
    agent = agents(engines=[hosted(free_port(), "--ignore-term")])
    pid = agent.until(lambda: e["pid"] if (e := agent.engine())["state"] == "ready" else None, "ready")
    assert agent.end(signal.SIGINT) == 0
    assert has_ended(pid)


def test_a_watched_engine_that_hangs_does_not_hold_up_the_ticks(agents: Callable[..., AgentProcess]) -> None:
    engine = EngineEndpoint()
    engine.metrics(pairscope())
    try:
        agent = agents(engines=[{"name": "chat", "url": engine.url}])
        agent.ready()
        agent.until(lambda: "pairscope_engine_requests_running" in loopback.get(f"{agent.url}/metrics").text, "numbers")
        engine.hang("/metrics")
        engine.hang("/health")
        agent.until(lambda: agent.engine()["state"] == "down", "down")
        ticks = agent.health()["ticks"]
        agent.until(lambda: agent.health()["ticks"] >= ticks + 5, "more ticks")
        text = loopback.get(f"{agent.url}/metrics").text
        assert "pairscope_engine_requests_running" not in text
        assert 'pairscope_engine_up{engine="chat",kind="pairscope",model="org/Tiny-1B",node="n1",rack="r1"} 0' in text
        assert agent.end() == 0
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"host": "0.0.0.0"}, "allow_remote"),
        ({"store_url": "nosuch://x"}, "nosuch"),
        ({"state_dir": Path("/proc/nowhere")}, "/proc/nowhere"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(tmp_path: Path, wrong: dict[str, Any], named: str) -> None:
    given = {"state_dir": tmp_path / "state", "store_url": f"sqlite://{tmp_path}/store.db", "port": 0, **wrong}
    with pytest.raises(CannotStart) as refused:
        Agent(AgentSettings(**given))
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_port_in_use_is_one_line_and_exit_code_2(agents: Callable[..., AgentProcess]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        agent = agents(port=port)
        _, said = agent.process.communicate(timeout=120)
    assert agent.process.returncode == 2
    assert str(port) in said
    assert said.count("\n") == 1


def test_two_agents_never_share_a_spool(tmp_path: Path) -> None:
    settings = AgentSettings(state_dir=tmp_path, store_url=f"sqlite://{tmp_path}/store.db", port=0)
    first = Agent(settings)
    try:
        with pytest.raises(CannotStart, match="spool"):
            Agent(settings)
    finally:
        first.close()


def test_one_sweep_has_rates_and_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = EngineEndpoint()
    generated = iter(range(100, 100_000, 50))
    engine.pages["/metrics"] = lambda: Page(pairscope(generated=float(next(generated))).encode())
    state = tmp_path / "state"
    settings = AgentSettings(
        state_dir=state,
        store_url="sqlite:///nowhere/store.db",
        node="n1",
        interval_s=0.2,
        engines=(
            EngineTarget("chat", engine.url),
            EngineTarget("gone", nothing_listens(), command=("/no/such/program",)),
        ),
    )
    try:
        samples = {(s.measurement, s.tags.get("engine", "")): check(s) for s in sweep(settings, wait_s=15.0).samples}
    finally:
        engine.close()
    assert samples["engine", "chat"].fields["tokens_per_s"] > 0  # type: ignore[operator]
    assert samples["engine", "gone"].fields == {"up": 0, "starting": 0}
    assert "cpu_pct" in samples["host", ""].fields
    assert len({sample.time_ns for sample in samples.values()}) == 1
    assert not state.exists()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"name": "a b", "url": "http://h"}, "a b"),
        ({"name": "a", "url": "ftp://h"}, "ftp://h"),
        ({"name": "a", "url": "http://"}, "http://"),
        ({"name": "a", "url": "http://h:99999"}, "99999"),
        ({"name": "a", "url": "http://h", "command": ()}, "command"),
        ({"name": "a", "url": "http://h", "gpus": "0,1"}, "0,1"),
    ],
)
def test_a_wrong_engine_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineTarget(**wrong)


@pytest.mark.parametrize("wrong", [{"interval_s": 0.0}, {"interval_s": 1e9}, {"port": -1}])
def test_a_wrong_setting_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AgentSettings(state_dir=tmp_path, store_url="sqlite:///x", **wrong)


def test_two_engines_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = (EngineTarget("a", "http://h:1"), EngineTarget("a", "http://h:2"))
    with pytest.raises(ValueError, match="'a'"):
        AgentSettings(state_dir=tmp_path, store_url="sqlite:///x", engines=twice)


def test_the_node_is_the_hostname_unless_given(tmp_path: Path) -> None:
    settings = AgentSettings(state_dir=tmp_path, store_url="sqlite:///x", rack="r1")
    assert settings.tags == {"node": socket.gethostname(), "rack": "r1"}
