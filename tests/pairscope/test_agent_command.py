"""A running `pairscope agent`: SIGHUP takes over a new configuration, and `pairscope pause` makes it let go of its devices."""

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
import pytest
from typer.testing import CliRunner, Result

from agent import sweep
from pairscope import cli
from pairscope.cli_host import duration_s
from pairscope.options import Refused
from telemetry.sample import Sample
from telemetry.store import open_store
from tests import loopback
from tests.processes import has_ended

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "doubles" / "hosted_engine.py"


class Running:
    """An agent with a configuration file, as systemd would start it."""

    def __init__(self, folder: Path, port: int, **agent: Any) -> None:
        self.folder, self.port = folder, port
        self.state = folder / "state"
        self.config = folder / "pairscope.json"
        self.heard = ""
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(str(folder / "notify"))
        self._channel.settimeout(0.05)
        self._said = (folder / "stderr").open("w")
        self.write(**agent)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pairscope", "agent", "--config", str(self.config), "--lang", "en"],
            cwd=ROOT,
            env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify")},
            stderr=self._said,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def write(self, node: dict[str, str] | None = None, **agent: Any) -> None:
        """The configuration that the next reload reads."""
        section = {"port": self.port, "interval_s": 0.2, **agent}
        document = {"state_dir": str(self.state), "node": {"name": "n1", **(node or {})}, "agent": section}
        self.config.write_text(json.dumps(document))

    def reload(self) -> None:
        """SIGHUP, and wait until the agent says that it is ready again."""
        self.listen()
        times = self.heard.count("READY=1")
        self.process.send_signal(signal.SIGHUP)
        self.until(lambda: self.heard.count("READY=1") > times, "READY after the reload")

    def listen(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                self.heard += self._channel.recv(4096).decode() + "\n"

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        give_up_s = time.monotonic() + 90
        while time.monotonic() < give_up_s:
            assert self.process.poll() is None, self.said()
            self.listen()
            with contextlib.suppress(httpx.TransportError):
                found = holds()
                if found:
                    return found
        raise AssertionError(f"never came: {what}; heard {self.heard!r}; said {self.said()!r}")

    def health(self) -> dict[str, Any]:
        return dict(loopback.get(f"http://127.0.0.1:{self.port}/healthz").json())

    def engines(self) -> dict[str, dict[str, Any]]:
        return {engine["name"]: engine for engine in self.health()["engines"]}

    def all_ready(self) -> bool:
        return all(engine["state"] == "ready" for engine in self.engines().values())

    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def stored(self, measurement: str) -> list[Sample]:
        store = open_store(f"sqlite://{self.state}/store.db")
        try:
            return store.samples(measurement, start_ns=0, end_ns=2**62)
        finally:
            store.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._channel.close()
        self._said.close()


@pytest.fixture
def running(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def start(**agent: Any) -> Running:
        made.append(Running(tmp_path, free_port(), **agent))
        made[-1].until(lambda: "READY=1" in made[-1].heard, "READY")
        return made[-1]

    yield start
    for one in made:
        one.close()


def hosted(name: str, port: int, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), str(port), *arguments]
    return {"name": name, "url": f"http://127.0.0.1:{port}", "command": command}


def test_a_reload_starts_stops_and_leaves_alone_while_the_ticks_go_on(
    running: Callable[..., Running], free_port: Callable[[], int]
) -> None:
    steady, changing, coming = (hosted(name, free_port()) for name in ("steady", "changing", "coming"))
    agent = running(engines=[steady, changing])
    agent.until(agent.all_ready, "both ready")
    before = agent.engines()
    agent.write(node={"rack": "r7"}, engines=[steady, {**changing, "gpus": "0"}, coming], port=agent.port + 1)
    agent.reload()
    agent.until(lambda: len(agent.engines()) == 3 and agent.all_ready(), "all ready")
    after = agent.engines()
    assert after["steady"]["pid"] == before["steady"]["pid"]
    assert after["steady"]["restarts"] == 0
    assert after["changing"]["pid"] != before["changing"]["pid"]
    assert has_ended(before["changing"]["pid"])
    assert "RELOADING=1\nMONOTONIC_USEC=" in agent.heard
    agent.write(node={"rack": "r7"}, engines=[steady])
    agent.reload()
    agent.until(lambda: set(agent.engines()) == {"steady"}, "the others' end")
    assert agent.engines()["steady"]["pid"] == before["steady"]["pid"]
    assert all(has_ended(after[name]["pid"]) for name in ("changing", "coming"))
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(120) == 0
    assert agent.said().count("port can't be changed while the agent runs") == 1
    told = [(event.tags["kind"], event.tags["subject"], str(event.fields["text"])) for event in agent.stored("event")]
    assert [(kind, subject) for kind, subject, _ in told] == [
        ("config", "agent"),
        ("config", "changing"),
        ("config", "agent"),
    ]
    assert all(word in told[0][2] for word in ("rack", "engine coming added", "engine changing changed"))
    assert "engine changing removed" in told[2][2]
    hosts = agent.stored("host")
    assert "rack" not in hosts[0].tags and hosts[-1].tags["rack"] == "r7"


def test_a_configuration_with_a_mistake_is_refused_as_a_whole(running: Callable[..., Running]) -> None:
    agent = running()
    ticks = agent.health()["ticks"]
    for mistake in ("{ not json", '{"agent": {"prot": 1}}', '{"agent": {"interval_s": 0}}'):
        agent.config.write_text(mistake)
        agent.reload()
    agent.config.unlink()
    agent.reload()
    agent.until(lambda: agent.health()["ticks"] > ticks + 3, "ticks")
    assert agent.health()["interval_s"] == 0.2
    lines = [line for line in agent.said().splitlines() if "refused" in line]
    assert len(lines) == 4
    for line, named in zip(lines, ("pairscope.json", "prot", "interval_s", "pairscope.json"), strict=True):
        assert named in line
    assert "Traceback" not in agent.said()


def test_a_new_interval_is_ticked_from_the_next_tick_on(running: Callable[..., Running]) -> None:
    agent = running(interval_s=1.0)
    agent.write(interval_s=0.1)
    agent.reload()
    ticks = agent.until(lambda: agent.health()["interval_s"] == 0.1 and agent.health()["ticks"], "the new interval")
    agent.until(lambda: agent.health()["ticks"] >= ticks + 20, "twenty ticks")
    agent.write(interval_s=0.1)
    agent.reload()  # nothing changed: no event
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(120) == 0
    (event,) = agent.stored("event")
    assert "interval_s" in str(event.fields["text"])


def command(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, [*arguments, "--lang", "en"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_pause_is_confirmed_shown_and_over_when_asked(
    running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SETTLE_S", 0.2)
    agent = running()
    assert agent.health()["paused_until"] is None
    asked = command("pause", "1h", "--config", str(agent.config))
    assert asked.exit_code == 0, asked.output
    assert "has released its devices until" in asked.stdout
    until = agent.health()["paused_until"]
    assert until in asked.stdout
    agent.until(lambda: f"paused: the devices are let go until {until}" in agent.heard, "the status")
    examined = json.loads(command("doctor", "--json", "--wait", "5", "--config", str(agent.config)).stdout)
    assert any(until in finding["text"] and finding["remedy"] for finding in examined["findings"])
    assert "over" in command("resume", "--config", str(agent.config)).stdout
    agent.until(lambda: agent.health()["paused_until"] is None, "its end")
    assert "no pause" in command("resume", "--config", str(agent.config)).stdout
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(120) == 0
    assert [event.tags["kind"] for event in agent.stored("event")] == ["pause", "pause"]


def test_a_pause_ends_by_itself_and_one_in_the_wrong_folder_is_refused(
    running: Callable[..., Running], tmp_path: Path
) -> None:
    agent = running()
    elsewhere = command("pause", "--config", str(agent.config), "--state-dir", str(tmp_path))
    assert elsewhere.exit_code == 2
    assert str(agent.state) in elsewhere.stderr
    assert command("pause", "2s", "--config", str(agent.config)).exit_code == 0
    agent.until(lambda: agent.health()["paused_until"] is None, "its end")
    assert not (agent.state / "pause").exists()


@pytest.mark.parametrize("wrong", ["", "0", "-5", "25h", "ten", "10x", "m", "1e9", "1h 5m"])
def test_a_duration_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(Refused):
        duration_s(wrong)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("24h", 86400)])
def test_a_duration_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


def test_a_pause_without_an_agent_says_so_and_one_that_can_not_be_asked_for_is_refused(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAIRSCOPE_AGENT__PORT", str(free_port()))
    asked = command("pause", "--state-dir", str(tmp_path))
    assert (asked.exit_code, "no agent answers" in asked.stdout) == (0, True)
    refused = command("pause", "ten", "--state-dir", str(tmp_path / "none"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    refused = command("pause", "--state-dir", str(tmp_path / "none"))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_each_collector_s_progress_is_shown(running: Callable[..., Running]) -> None:
    agent = running()
    agent.until(lambda: agent.health()["ticks"] >= 3, "ticks")
    progress = agent.health()["collectors"]
    assert progress["host"]["answered_age_s"] < 20
    assert progress["host"]["samples_age_s"] < 20
    assert {"gpu", "host", "engine"} <= set(progress)


def test_a_pause_where_no_agent_keeps_its_state_says_so(tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli.app, ["pause", "1m", "--state-dir", str(tmp_path / "none")])
    assert answer.exit_code == 2
    assert "no agent keeps its state there" in answer.stderr
