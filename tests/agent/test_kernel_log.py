"""The kernel's log is read from now on, each record once, without ever waiting, and a log that can't be read is no error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kernel_log import RECORD_BYTES, KernelLog, Record


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_bytes(b"6,10,100,-;NVRM: of before\n")
    return path


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_what_was_before_the_opening_is_not_news(log: Path) -> None:
    kernel = KernelLog("NVRM", log)
    assert kernel.read(1.0) == []
    append(log, b"4,11,200,-;NVRM: of now\n")
    assert kernel.read(2.0) == [Record(11, "NVRM: of now")]
    assert kernel.read(3.0) == []
    kernel.close()


def test_two_records_of_one_text_are_two_and_one_that_comes_twice_is_one(log: Path) -> None:
    kernel = KernelLog("NVRM", log)
    kernel.read(1.0)
    append(log, b"4,11,200,-;NVRM: x\n4,12,200,-;NVRM: x\n4,12,200,-;NVRM: x\n4,9,200,-;NVRM: x\n")
    assert [record.sequence for record in kernel.read(2.0)] == [11, 12]
    kernel.close()


def test_a_record_that_arrives_in_pieces_is_one_and_its_further_lines_are_none(log: Path) -> None:
    kernel = KernelLog("NVRM", log)
    kernel.read(1.0)
    append(log, b"4,11,200,-,caller=T1;NVRM: ha")
    assert kernel.read(2.0) == []
    append(log, b"lf\n SUBSYSTEM=pci NVRM\n DEVICE=+pci:0000:01:00.0\n")
    assert kernel.read(3.0) == [Record(11, "NVRM: half")]
    kernel.close()


def test_a_pipe_that_nobody_writes_into_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    kernel = KernelLog("NVRM", path)
    assert kernel.read(1.0) == []
    writer = os.open(path, os.O_WRONLY)
    assert kernel.read(2.0) == []
    os.write(writer, b"6,1234,5678,-;NVRM: news\n")
    assert kernel.read(3.0) == [Record(1234, "NVRM: news")]
    os.close(writer)
    assert kernel.read(4.0) == []
    assert kernel.problem == ""
    kernel.close()


def test_a_log_that_is_not_there_is_looked_for_again_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    kernel = KernelLog("NVRM", path, retry_s=60.0)
    assert kernel.read(1.0) == []
    assert (kernel.problem, kernel.readable) == ("missing", False)
    path.write_bytes(b"")
    assert kernel.read(2.0) == []
    assert not kernel.readable
    kernel.read(62.0)
    append(path, b"6,1,1,-;NVRM: news\n")
    assert kernel.read(63.0) == [Record(1, "NVRM: news")]
    assert kernel.problem == ""
    kernel.close()


def test_a_log_that_may_not_be_read_says_so(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    def forbid(*_arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", forbid)
    kernel = KernelLog("NVRM", log)
    assert kernel.read(1.0) == []
    assert kernel.problem == "forbidden"


def test_records_that_were_overwritten_unread_cost_only_themselves(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    kernel = KernelLog("NVRM", log)
    kernel.read(1.0)
    append(log, b"6,99,1,-;NVRM: after the gap\n")
    real, told = os.read, []

    def read(descriptor: int, length: int) -> bytes:
        if not told:
            told.append(1)
            raise BrokenPipeError(32, "Broken pipe")
        return real(descriptor, length)

    monkeypatch.setattr(os, "read", read)
    assert kernel.read(2.0) == [Record(99, "NVRM: after the gap")]
    monkeypatch.undo()
    kernel.close()


def test_a_flood_is_read_in_turns_and_a_line_without_end_is_dropped(log: Path) -> None:
    kernel = KernelLog("NVRM", log)
    kernel.read(1.0)
    append(log, b"x" * (3 * RECORD_BYTES) + b"\n" + b"6,20,1,-;NVRM: " + b"y" * 5000 + b"\n")
    found = kernel.read(2.0)
    assert [record.sequence for record in found] == [20]
    assert len(found[0].text) == 1000
    kernel.close()


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_junk_is_never_more_than_no_record(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("junk") / "kmsg"
    path.write_bytes(b"")
    kernel = KernelLog("NVRM", path)
    kernel.read(1.0)
    append(path, b"\n".join(line + b"NVRM" for line in lines) + b"\n6,18446744073709551615,1,-;NVRM: last\n")
    assert all(isinstance(record.text, str) for record in kernel.read(2.0))
    kernel.close()
