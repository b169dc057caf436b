"""A pause: a file's time of change ends it, nobody but the owner or root may ask, and a clock that steps does not matter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.pause import FILE, LONGEST_S, Pause, ask, withdraw


class Times:
    def __init__(self) -> None:
        self.wall = 1_795_960_000.0
        self.monotonic = 50.0

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def pause(tmp_path: Path, times: Times) -> Pause:
    return Pause(tmp_path, lambda: times.wall, lambda: times.monotonic)


def write(folder: Path, until_s: float) -> Path:
    path = folder / FILE
    path.touch()
    os.utime(path, (until_s, until_s))
    return path


def test_it_lasts_until_the_files_time_and_the_file_is_gone_after_it(
    tmp_path: Path, pause: Pause, times: Times
) -> None:
    assert not pause.look()
    path = write(tmp_path, times.wall + 60)
    assert pause.look()
    assert pause.until_s == times.wall + 60
    assert not pause.look()
    times.pass_(59.9)
    assert not pause.look()
    times.pass_(0.2)
    assert pause.look()
    assert pause.until_s is None
    assert not path.exists()


def test_a_step_of_the_clock_neither_ends_nor_prolongs_it(tmp_path: Path, pause: Pause, times: Times) -> None:
    write(tmp_path, times.wall + 60)
    pause.look()
    times.wall += 3600
    assert not pause.look()
    times.wall -= 7200
    times.monotonic += 61
    assert pause.look()
    assert pause.until_s is None


def test_it_can_be_prolonged_and_ended_early(tmp_path: Path, pause: Pause, times: Times) -> None:
    write(tmp_path, times.wall + 60)
    pause.look()
    write(tmp_path, times.wall + 90)
    assert pause.look()
    assert pause.until_s == times.wall + 90
    assert withdraw(tmp_path)
    assert pause.look()
    assert pause.until_s is None
    assert not withdraw(tmp_path)


def test_what_was_over_before_it_was_seen_is_none(tmp_path: Path, pause: Pause, times: Times) -> None:
    write(tmp_path, times.wall - 1)
    assert not pause.look()
    assert pause.until_s is None


def test_no_pause_is_longer_than_a_day(tmp_path: Path, pause: Pause, times: Times) -> None:
    write(tmp_path, times.wall + 365 * 86400)
    pause.look()
    assert pause.until_s == times.wall + LONGEST_S
    times.pass_(LONGEST_S + 1)
    assert pause.look()


def test_a_link_a_folder_and_a_strangers_file_ask_for_nothing(
    tmp_path: Path, pause: Pause, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).mkdir()
    os.utime(tmp_path / FILE, (times.wall + 60, times.wall + 60))
    assert not pause.look()
    (tmp_path / FILE).rmdir()
    target = write(tmp_path, times.wall + 60).rename(tmp_path / "elsewhere")
    (tmp_path / FILE).symlink_to(target)
    os.utime(tmp_path / FILE, (times.wall + 60, times.wall + 60), follow_symlinks=False)
    assert not pause.look()
    (tmp_path / FILE).unlink()
    path = write(tmp_path, times.wall + 60)
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert not pause.look()


def test_asking_leaves_one_private_file_and_nothing_else(tmp_path: Path) -> None:
    until_s = ask(tmp_path, 600.0)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    fresh = Pause(tmp_path)
    assert fresh.look()
    assert fresh.until_s == pytest.approx(until_s, abs=1.0)
