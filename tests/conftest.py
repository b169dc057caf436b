"""What every test may use. A missing server or browser skips with its reason, or fails under PAIRSCOPE_STRICT_TESTS."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from tests import ports

pytest_plugins = ["tests.browser", "tests.store_servers"]

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
    """A loopback port that stays free until a server of the test takes it."""
    return ports.free_port
