"""What every test may use. A missing server or browser skips with its reason, or fails under PAIRSCOPE_STRICT_TESTS."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import ports

pytest_plugins = ["tests.browser", "tests.store_servers"]

# A busy machine makes no example wrong, and the same examples come at each run: `--hypothesis-profile explore` draws new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True)
settings.load_profile("suite")

STRICT = os.environ.get("PAIRSCOPE_STRICT_TESTS", "") not in ("", "0")


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def need_program() -> Callable[[str], str]:
    """need_program("chromium") -> its path; skips (or, in strict runs, fails) when it is not installed."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            reason = f"{name} is not installed"
            if STRICT:
                pytest.fail(f"{reason}, and PAIRSCOPE_STRICT_TESTS is set")
            pytest.skip(reason)
        return path

    return find


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """small_disk(65_536) -> the folder of a file system of that many bytes; skips (or, in strict runs, fails) where none can be mounted."""
    made: list[Path] = []

    def mount(size_bytes: int) -> Path:
        place = tmp_path / f"small{len(made)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = f"no small file system can be mounted here ({done.stderr.strip()})"
            if STRICT:
                pytest.fail(f"{reason}, and PAIRSCOPE_STRICT_TESTS is set")
            pytest.skip(reason)
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A loopback port that stays free until a server of the test takes it."""
    return ports.free_port
