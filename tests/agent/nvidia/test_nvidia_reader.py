"""The reader process and the collector's end of it: frames, what is expected beside what is seen, and nonsense."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.collectors.gpu import patience_of
from agent.collectors.interface import Tick
from agent.collectors.nvidia import NvidiaCollector
from agent.frames import LONGEST_BYTES, BadFrame, Message, Unpacker, pack
from agent.reader_process import ReaderProcess
from agent.timing import ReaderTiming, from_argument, to_argument
from telemetry.catalogue import GPU_STATES
from tests.agent.nvidia.conftest import EVERY_TICK, UNHURRIED, Host, events, gpus

STATE = {name: number for number, name in enumerate(GPU_STATES)}
UUIDS = ("GPU-5c0a1e77-0001", "GPU-a9d3f210-0002")


def bind(root: Path, *uuids: str, devices: bool = True) -> None:
    """What the kernel driver shows of its GPUs under /proc and /dev."""
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for number, uuid in enumerate(uuids):
        folder = root / "proc/driver/nvidia/gpus" / f"0000:{number + 1:02x}:00.0"
        folder.mkdir(parents=True)
        lines = ("Model: \t\t NVIDIA", f"GPU UUID: \t {uuid}", "Bus Type: \t PCIe", f"Device Minor: \t {number}", "")
        (folder / "information").write_text("\n".join(lines))
        if devices:
            (root / "dev" / f"nvidia{number}").touch()


def collector_at(host: Host, root: Path) -> NvidiaCollector:
    made = NvidiaCollector({"node": "n07"}, EVERY_TICK, UNHURRIED, root=root)
    host.collectors.append(made)
    return made


def test_a_gpu_that_the_kernel_driver_has_and_nvml_does_not_list_is_absent(host: Host, tmp_path: Path) -> None:
    bind(tmp_path / "root", UUIDS[0], "GPU-00000000-0003", UUIDS[1])
    collector_at(host, tmp_path / "root")
    samples = host.tick()
    assert {name: sample.fields["state"] for name, sample in gpus(samples).items()} == {
        "0001": STATE["ok"],
        "0002": STATE["ok"],
        "0003": STATE["absent"],
    }
    assert [event.fields["detail"] for event in events(samples, "gpu_lost")] == ["GPU-00000000-0003"]


def test_a_gpu_of_another_container_is_not_expected(host: Host, tmp_path: Path) -> None:
    bind(tmp_path / "root", "GPU-00000000-0003", devices=False)
    collector_at(host, tmp_path / "root")
    assert set(gpus(host.tick())) == {"0001", "0002"}


def test_the_gpus_of_a_mismatch_from_the_start_are_known_from_the_kernel_driver(host: Host, tmp_path: Path) -> None:
    bind(tmp_path / "root", *UUIDS)
    host.scenario.state.driver_version = 2
    collector_at(host, tmp_path / "root")
    samples = host.tick()
    assert [(s.tags["gpu"], s.tags["uuid"], s.fields) for s in samples if s.measurement == "gpu"] == [
        ("0", UUIDS[0], {"state": STATE["driver_mismatch"]}),
        ("1", UUIDS[1], {"state": STATE["driver_mismatch"]}),
    ]


def test_unified_memory_is_what_the_host_has_and_has_used(host: Host, tmp_path: Path) -> None:
    meminfo = tmp_path / "root/proc/meminfo"
    meminfo.parent.mkdir(parents=True)
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n")
    host.scenario.refuse(0, "memory", "memory_v2")
    host.scenario.gpu(0).name = b"NVIDIA GB10"
    collector_at(host, tmp_path / "root")
    fields = gpus(host.tick())["0001"].fields
    assert (fields["mem_total_bytes"], fields["mem_used_bytes"]) == (1000 * 1024.0, 600 * 1024.0)
    assert fields["memory_kind"] == "unified"


@pytest.mark.parametrize("name", [b"NVIDIA GB10", b"NVIDIA Something"])
def test_a_driver_that_answers_with_the_hosts_totals_has_unified_memory(
    host: Host, tmp_path: Path, name: bytes
) -> None:
    meminfo = tmp_path / "root/proc/meminfo"
    meminfo.parent.mkdir(parents=True)
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n")
    gpu = host.scenario.gpu(0)
    gpu.name, gpu.mem_total, gpu.mem_reserved, gpu.mem_used = name, 1000 * 1024, 0, 300 * 1024
    collector_at(host, tmp_path / "root")
    seen = gpus(host.tick())
    assert (seen["0001"].fields["memory_kind"], seen["0001"].fields["mem_used_bytes"]) == ("unified", 300 * 1024.0)
    assert seen["0002"].fields["memory_kind"] == "device"


def test_an_interval_bounds_how_long_the_collector_waits() -> None:
    for interval_s in (0.1, 0.5, 1.0, 10.0):
        patience = patience_of(interval_s)
        assert patience.answer_s < 0.9 * min(interval_s, 4.0)
        assert patience.hung_s >= interval_s
    assert patience_of(1.0).hung_s < 4.0  # with ticks of one second: told within five


def test_a_closed_collector_says_nothing_and_starts_nothing(host: Host) -> None:
    collector = host.collector()
    host.tick()
    collector.close()
    assert host.tick() == []
    assert collector.reader_pid is None


class Nonsense(ReaderProcess):
    """Says what it was given instead of what a reader says."""

    def __init__(self, *answers: Message | Exception) -> None:
        super().__init__(())
        self.answers = list(answers)
        self.kills = 0
        self.lives = False

    @property
    def pid(self) -> int | None:
        return 4711 if self.lives else None

    def start(self) -> bool:
        self.lives, self.killed = True, False
        return True

    def send(self, message: Message) -> bool:
        return self.lives

    def receive(self, timeout_s: float) -> list[Message]:
        if not self.answers:
            return [{"kind": "done", "tick": 1, "driver": 0}]
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    def reap(self) -> bool:
        if self.killed:
            self.lives = False
        return not self.lives

    def kill(self, timeout_s: float = 0.0) -> None:
        self.kills += 1
        self.killed = True


ROW = {"kind": "inventory", "gpus": [[0, "GPU-1", "n", 0, True, "0000:01:00", "570.1"]]}
READING = {"kind": "gpu", "tick": 1, "uuid": "GPU-1", "state": 0, "code": 0, "fields": {"temp_c": 50}, "errors": 0}


@pytest.mark.parametrize(
    "answers",
    [
        (BadFrame("torn"),),
        ({"no": "kind"},),
        ({"kind": "inventory", "gpus": [[0]]},),
        ({"kind": "inventory", "gpus": 5},),
        (ROW, {**READING, "fields": {"temp_c": "hot"}}),
        (ROW, {**READING, "fields": {"temp_c": True}}),
        (ROW, {**READING, "state": None}),
        (ROW, {"kind": "gpu", "uuid": "GPU-1"}),
        ({"kind": "done", "tick": "x", "driver": 0},),
        ({"kind": "bound", "gpus": [["a", "b"]]},),
    ],
)
def test_a_reader_that_talks_nonsense_is_killed_counted_and_replaced(answers: Sequence[Message | Exception]) -> None:
    process = Nonsense(*answers)
    collector = NvidiaCollector({"node": "n"}, process=process)
    collector.collect(Tick(1, 1, 1.0))
    assert (process.kills, collector.errors >= 1) == (1, True)
    collector.collect(Tick(2, 2, 2.0))
    assert process.lives


def test_a_reader_that_keeps_talking_nonsense_is_started_less_and_less_often() -> None:
    process = Nonsense(*[BadFrame("torn")] * 1000)
    collector = NvidiaCollector({"node": "n"}, process=process)
    for second in range(1, 301):
        collector.collect(Tick(second, second, float(second)))
    assert 10 < process.kills < 20  # after 0, 1, 2, 4, 8, 16 s and then every 30


def test_a_reading_of_an_unknown_field_or_gpu_is_dropped() -> None:
    process = Nonsense(ROW, {**READING, "uuid": "GPU-9"}, {**READING, "fields": {"temp_c": 50, "colour": 3}})
    samples = NvidiaCollector({"node": "n"}, process=process).collect(Tick(1, 1, 1.0))
    assert [dict(sample.fields) for sample in samples if sample.measurement == "gpu"] == [
        {"temp_c": 50.0, "xid_total": 0, "state": 0}
    ]


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none())), st.integers(1, 40))
def test_frames_come_whole_out_of_any_pieces(messages: list[Message], size: int) -> None:
    stream = b"".join(pack(message) for message in messages)
    unpacker = Unpacker()
    seen: list[Message] = []
    for start in range(0, len(stream), size):
        seen += unpacker.feed(stream[start : start + size])
    assert seen == messages


@pytest.mark.parametrize(
    "piece", [struct.pack(">I", LONGEST_BYTES + 1), b"\0\0\0\2[]", b"\0\0\0\1{", b"\0\0\0\2\xff\xff"]
)
def test_a_frame_that_is_too_long_or_no_object_is_refused(piece: bytes) -> None:
    with pytest.raises(BadFrame):
        Unpacker().feed(piece)


def test_what_json_has_no_word_for_is_not_sent() -> None:
    with pytest.raises(ValueError):
        pack({"temp_c": float("nan")})
    with pytest.raises(ValueError):
        pack({"text": "x" * (LONGEST_BYTES + 1)})


def test_timing_survives_the_command_line() -> None:
    timing = ReaderTiming(memory_s=1.5, takeover_s=0.125)
    assert from_argument(to_argument(timing)) == timing


def test_the_reader_knows_nothing_of_our_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAIRSCOPE_STORE_TOKEN", "s3cret")
    monkeypatch.setenv("PAIRSCOPE_AGENT__BMC__PASSWORD", "s3cret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/where/it/finds/its/library")
    reader = ReaderProcess(["nvml", to_argument(EVERY_TICK)])
    assert reader.start()
    try:
        environment = psutil.Process(reader.pid).environ()
    finally:
        reader.close()
    assert "s3cret" not in environment.values()
    assert environment["LD_LIBRARY_PATH"] == "/where/it/finds/its/library"
