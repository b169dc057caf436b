"""What stands in the place of a file of the state folder never holds up the agent, and never ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.collectors.engine_identity import Identities
from agent.remembered import RememberedFile, remembered
from agent.spool.disk import Disk


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, "ü"]}', "utf-8")
    assert remembered(path) == {"a": [1, "ü"]}
    with pytest.raises(FileNotFoundError):
        remembered(tmp_path / "b.json")


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "itself", "deep", "binary", "large"])
def test_anything_else_is_told_in_one_line_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "itself":
            path.symlink_to(path)
        case "deep":
            path.write_bytes(b"[" * 200_000)
        case "binary":
            path.write_bytes(bytes(range(256)))
        case _:
            path.write_bytes(b" " * (1 << 21))
    with pytest.raises((OSError, ValueError)) as told:
        remembered(path)
    assert "\n" not in str(told.value)
    assert not isinstance(told.value, FileNotFoundError)
    assert Identities(path).update("chat", {"version": "1"}, 1) == []


def test_it_is_written_when_the_tick_that_tells_of_it_is_safe_and_not_sooner(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    file = RememberedFile(path)
    file.put("before", -3)  # of a reading that was no tick
    file.put("fifth", 5)
    file.put("sixth", 6)
    file.put("later in the sixth", 6)
    file.keep(0)
    assert remembered(path) == "before"
    file.keep(5)
    assert remembered(path) == "fifth"
    path.unlink()
    file.keep(5)
    assert not path.exists()
    path.mkdir()  # something stands in its place
    file.keep(9)
    path.rmdir()
    file.keep(10)
    assert remembered(path) == "later in the sixth"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    RememberedFile(None).put("nowhere", 1)
    RememberedFile(None).keep(1)


def test_the_spool_waits_for_no_pipe(tmp_path: Path) -> None:
    path = tmp_path / "delivered"
    os.mkfifo(path)
    with pytest.raises(OSError, match="no ordinary file"):
        Disk().read(path)
