"""What every test may use. A missing server or browser skips with its reason, or fails under PAIRSCOPE_STRICT_TESTS."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable

import pytest

pytest_plugins = ["tests.browser"]

STRICT = os.environ.get("PAIRSCOPE_STRICT_TESTS", "") not in ("", "0")


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
def free_port() -> Callable[[], int]:
    """A loopback TCP port that was free a moment ago."""

    def pick() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return pick
