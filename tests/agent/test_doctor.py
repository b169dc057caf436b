"""The doctor's questions: each says what is so on a host of the test's making, with a remedy where there is one, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agent.collectors.interface import Finding
from agent.doctor import container, devices, examination, installed, kernel_log, running, secret_files, service
from agent.doctor import state_folder as state
from agent.doctor import store as store_question
from agent.doctor.examination import Patient, examine, worst
from agent.settings import AgentSettings, EngineTarget
from telemetry.sample import Sample
from telemetry.store import open_store


def levels(findings: Sequence[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


class Healthz:
    """Something that listens where an agent would."""

    def __init__(self, body: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def answering() -> Iterator[Callable[[object], int]]:
    """answering(what /healthz says) -> its port."""
    made: list[Healthz] = []

    def listen(said: object) -> int:
        made.append(Healthz(said if isinstance(said, bytes) else json.dumps(said).encode()))
        return made[-1].port

    yield listen
    for one in made:
        one.close()


def health(**more: object) -> dict[str, object]:
    return {
        "status": "ok",
        "node": "n7",
        "ticks": 41,
        "ticks_missed": 3,
        "tick_age_s": 0.5,
        "spool_bytes": 3 << 20,
        "delivery": {"lag_s": 1.5, "connected": True, "error": ""},
        **more,
    }


def of_port(tmp_path: Path, port: int, **more: Any) -> AgentSettings:
    return AgentSettings(state_dir=tmp_path / "state", store_url="sqlite:///x.db", port=port, **more)


def test_a_running_agent_is_told_with_its_ticks_and_its_delivery(
    tmp_path: Path, answering: Callable[[object], int]
) -> None:
    ticks, delivery = running.findings(of_port(tmp_path, answering(health())))
    assert (ticks.level, delivery.level) == ("ok", "ok")
    assert "n7" in ticks.text and "41 ticks" in ticks.text and "0.5 s" in ticks.text and "3 missed" in ticks.text
    assert "1.5 s" in delivery.text and "3.0 MiB" in delivery.text


@pytest.mark.parametrize(
    ("said", "level", "word"),
    [
        (health(status="stalled", tick_age_s=99.0), "error", "99 s"),
        (health(status="starting", ticks=0, tick_age_s=None), "warning", "starting"),
        (health(collectors={"gpu": {"answered_age_s": 61.0}, "host": {"answered_age_s": 0.4}}), "error", "gpu has not"),
        (health(collectors={"gpu": {"answered_age_s": 61.0}}, interval_s=60.0), "ok", "41 ticks"),
        (health(collectors={"gpu": None, "x": {"answered_age_s": None}, "y": {"answered_age_s": "z"}}), "ok", "n7"),
        (health(ticks_missed_of_late=40, ticks_due_of_late=300), "warning", "40 of the 300 ticks"),
        (health(ticks_missed_of_late=2, ticks_due_of_late=300), "ok", "41 ticks"),
        (health(ticks_missed_of_late="x", ticks_due_of_late=[]), "ok", "41 ticks"),
        (health(state_dir="/var/lib/other"), "warning", "/var/lib/other"),
        (health(paused_until="2026-11-29T10:00:00Z"), "warning", "10:00:00"),
        (health(delivery={"lag_s": 77.0, "connected": True, "error": ""}), "warning", "77.0 s"),
        (health(delivery={"lag_s": 5.0, "connected": False, "error": "no route"}), "error", "no route"),
        ({"hello": "world"}, "error", "no agent"),
        (["no", "table"], "error", "no agent"),
        (b"<html>", "error", "no agent"),
        (b'"\xff', "error", "no agent"),
        (health(ticks="many", delivery="none", spool_bytes=None, node="a\nb"), "ok", "a b"),
    ],
)
def test_an_agent_that_is_not_well_says_how(
    tmp_path: Path, answering: Callable[[object], int], said: object, level: str, word: str
) -> None:
    found = running.findings(of_port(tmp_path, answering(said)))
    assert worst(found) == level
    assert any(word in finding.text for finding in found), found


def test_an_agent_of_the_same_state_folder_is_the_one_that_is_examined(
    tmp_path: Path, answering: Callable[[object], int]
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "state")
    found = running.findings(of_port(tmp_path, answering(health(state_dir=str(tmp_path / "link")))))
    assert levels(found) == ["ok", "ok"]


def test_a_port_that_somebody_silent_holds_is_an_error_and_a_free_one_is_not(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    port = free_port()
    (free,) = running.findings(of_port(tmp_path, port))
    assert (free.level, str(port) in free.text) == ("absent", True)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))  # bound, and nobody listens: connections are refused
        (taken,) = running.findings(of_port(tmp_path, port))
    assert taken.level == "error"
    assert str(port) in taken.text


def test_who_starts_a_hosted_engine_is_said_while_no_agent_runs(tmp_path: Path, free_port: Callable[[], int]) -> None:
    engine = EngineTarget("chat-a", "http://127.0.0.1:1", command=("vllm",))
    (found,) = running.findings(of_port(tmp_path, free_port(), engines=(engine,)))
    assert "chat-a" in found.remedy


def test_a_paused_agents_devices_are_left_alone(tmp_path: Path, answering: Callable[[object], int]) -> None:
    paused = running.without_paused(of_port(tmp_path, answering(health(paused_until="soon"))))
    assert (paused.nvml, paused.amd, paused.ascend) == (False, False, False)
    awake = running.without_paused(of_port(tmp_path, answering(health())))
    assert (awake.nvml, awake.amd, awake.ascend) == (True, True, True)


def test_a_state_folder_that_can_be_used_is_told_with_its_room(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    assert levels(state.findings(folder, "en")) == ["ok", "ok"]
    assert levels(state.findings(tmp_path / "not" / "yet", "en")) == ["ok", "ok"]
    assert not (tmp_path / "not").exists()


def test_a_state_folder_below_a_file_or_that_may_not_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "state"):
        (found,) = state.findings(path, "en")
        assert (found.level, str(path) in found.text, bool(found.remedy)) == ("error", True, True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    (found,) = state.findings(tmp_path, "en")
    assert found.level == "error"


def test_a_state_folder_that_others_may_read_and_a_full_disk_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    usage = shutil._ntuple_diskusage(1000 << 30, 999 << 30, 1 << 29)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    usable, readable, full = state.findings(tmp_path, "en")
    assert levels((usable, readable, full)) == ["ok", "warning", "warning"]
    assert "0755" in readable.text
    assert "0.5 GiB" in full.text


def test_a_secret_that_others_may_read_is_named_with_its_mode(tmp_path: Path) -> None:
    kept, leaked = tmp_path / "kept", tmp_path / "leaked"
    for path, mode in ((kept, 0o600), (leaked, 0o644)):
        path.write_text("secret")
        path.chmod(mode)
    (warning,) = secret_files.findings([kept, leaked, tmp_path / "gone"], "en")
    assert (warning.level, warning.remedy) == ("warning", f"chmod 600 {leaked}")
    assert "0644" in warning.text
    assert levels(secret_files.findings([kept], "en")) == ["ok"]
    assert levels(secret_files.findings([], "en")) == ["absent"]


def test_an_embedded_store_is_looked_at_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    url = f"sqlite://{path}"
    (absent,) = store_question.findings(url, "en")
    assert (absent.level, path.exists()) == ("ok", False)
    store = open_store(url)
    store.write([Sample("host", {"node": "n"}, {"load1": 1.0}, 1)])
    (busy,) = store_question.findings(url, "en")
    store.close()
    before = snapshot(tmp_path)
    (idle,) = store_question.findings(url, "en")
    assert (busy.level, idle.level) == ("ok", "ok")
    assert snapshot(tmp_path) == before


def test_a_store_that_is_none_or_is_down_or_of_no_known_kind_is_an_error_with_a_remedy(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    broken = tmp_path / "store.db"
    broken.write_bytes(b"this is a letter, not a database" * 99)
    for url in (f"sqlite://{broken}", f"sqlite://{tmp_path}", f"influxdb://127.0.0.1:{free_port()}/db", "nosuch://x"):
        (found,) = store_question.findings(url, "en")
        assert (found.level, bool(found.remedy)) == ("error", True), url


def test_a_stores_password_is_not_printed(free_port: Callable[[], int]) -> None:
    (found,) = store_question.findings(f"influxdb://u:hunter2@127.0.0.1:{free_port()}/db", "en")
    assert "hunter2" not in found.text + found.remedy


@pytest.mark.parametrize(
    ("told", "level", "word"),
    [
        ({"LoadState": "not-found", "ActiveState": "inactive"}, "absent", "not installed"),
        ({"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled", "NRestarts": "4"}, "ok", "4"),
        ({"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "disabled"}, "warning", "start with"),
        ({"LoadState": "loaded", "ActiveState": "failed"}, "error", "failed"),
        ({"LoadState": "loaded", "ActiveState": "inactive"}, "warning", "inactive"),
        ({}, "absent", "not installed"),
    ],
)
def test_the_unit_is_as_systemd_says(told: dict[str, str], level: str, word: str) -> None:
    found = service.judged(told, "en")
    assert found.level == level
    assert word in found.text


def test_without_systemd_no_unit_is_missed(tmp_path: Path) -> None:
    assert levels(service.findings("en", tmp_path / "nothing")) == ["absent"]


def test_a_container_without_the_hosts_processes_is_told_from_the_host(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    (lost,) = container.findings("en", tmp_path)
    assert (lost.level, "hostPID" in lost.remedy) == ("warning", True)
    (here,) = container.findings("en")
    expected = Path("/proc/self/ns/pid").stat().st_ino == container.FIRST_PID_NAMESPACE
    assert (here.level == "ok") == expected


def pci(root: Path, number: int, vendor: str, class_: str) -> None:
    folder = root / "sys/bus/pci/devices" / f"0000:{number:02x}:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(class_ + "\n")


def node(root: Path, name: str) -> None:
    path = root / "dev" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)


def test_a_host_without_accelerators_has_no_device_to_complain_of(tmp_path: Path) -> None:
    pci(tmp_path, 1, "0x10de", "0x040300")  # the sound device of a card that is handed to a guest
    node(tmp_path, "dri/renderD128")  # of the BMC's own graphics
    assert levels(devices.findings("en", tmp_path)) == ["absent"]


def test_a_card_without_driver_and_a_driver_without_nodes_are_different_errors(tmp_path: Path) -> None:
    pci(tmp_path, 1, "0x10de", "0x030200")
    pci(tmp_path, 2, "0x1002", "0x120000")
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    nvidia, amd = devices.findings("en", tmp_path)
    assert (nvidia.level, amd.level) == ("error", "error")
    assert "no driver" in nvidia.text and "NVIDIA" in nvidia.text
    assert "no device nodes" in amd.text and "AMD" in amd.text


def test_a_node_that_may_not_be_opened_is_named_with_the_group_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci(tmp_path, 1, "0x10de", "0x030000")
    for name in ("nvidiactl", "nvidia0", "ipmi0"):
        node(tmp_path, name)
    assert levels(devices.findings("en", tmp_path)) == ["ok", "ok"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(devices, "_group_of", lambda _: "video")
    nvidia, ipmi = devices.findings("en", tmp_path)
    assert (nvidia.level, "video" in nvidia.remedy, "nvidia0" in nvidia.text) == ("error", True, True)
    assert ipmi.level == "absent"


def test_the_kernel_log_is_never_a_warning(tmp_path: Path) -> None:
    assert levels(kernel_log.findings("en", tmp_path / "none")) == ["absent"]
    (tmp_path / "kmsg").touch()
    assert levels(kernel_log.findings("en", tmp_path / "kmsg")) == ["ok"]


def test_a_part_that_is_installed_in_half_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "EXTRAS", {"a": ("json", "nosuch1"), "b": ("nosuch2",), "c": ("json",)})
    assert levels(installed.findings("en")) == ["ok", "warning", "absent", "ok"]


def test_a_question_that_fails_or_hangs_costs_its_own_answer_only(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()

    def hang(_patient: Patient) -> Sequence[Finding]:
        held.wait(60)
        return []

    def fail(_patient: Patient) -> Sequence[Finding]:
        raise RuntimeError("no luck")

    told = [Finding("well", "ok", "fine")]
    monkeypatch.setattr(examination, "QUESTIONS", {"a": hang, "b": fail, "c": lambda _: told})
    settings = of_port(tmp_path, free_port(), nvml=False, amd=False, ascend=False, interval_s=0.1)
    found = {finding.source: finding for finding in examine(Patient(settings), wait_s=1.0)}
    held.set()
    assert (found["a"].level, found["b"].level, found["well"].level) == ("warning", "error", "ok")
    assert "no luck" in found["b"].text
    assert found["host"].level in ("ok", "warning", "absent")


def test_an_examination_speaks_chinese_and_writes_nothing(tmp_path: Path, free_port: Callable[[], int]) -> None:
    settings = AgentSettings(
        state_dir=tmp_path / "state", store_url=f"sqlite://{tmp_path}/s.db", port=free_port(), language="zh"
    )
    found = examine(Patient(settings), wait_s=15.0)
    assert list(tmp_path.iterdir()) == []
    assert all(any("\u4e00" <= c <= "\u9fff" for c in finding.text) for finding in found if finding.source != "install")
    assert {"install", "state", "store", "agent", "host"} <= {finding.source for finding in found}


def test_an_engine_that_the_agent_would_host_is_no_error_while_no_agent_runs(
    tmp_path: Path, free_port: Callable[[], int], answering: Callable[[object], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "QUESTIONS", {})
    watched, hosted = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    engines = (EngineTarget("a", watched), EngineTarget("b", hosted, command=("vllm",)))
    more = {"engines": engines, "nvml": False, "amd": False, "ascend": False, "interval_s": 0.2}
    levels_of = [
        {finding.source: finding.level for finding in examine(Patient(of_port(tmp_path, port, **more)), wait_s=15.0)}
        for port in (free_port(), answering(health()))
    ]
    assert [(found["engine a"], found["engine b"]) for found in levels_of] == [("error", "absent"), ("error", "error")]
