"""The compiled kernels for tests, where they can be had."""

from __future__ import annotations

import ctypes
import platform

import pytest

from engine.kernels import build
from engine.kernels.native import Kernels
from tests.conftest import STRICT


def built() -> ctypes.CDLL:
    """A machine without a compiler skips, or fails in strict runs; one whose compiler can't build them fails."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the kernels are for x86-64")
    try:
        build.find_compiler()
    except build.NoKernels as reason:
        if STRICT:
            pytest.fail(f"{reason}, and PAIRSCOPE_STRICT_TESTS is set")
        pytest.skip(str(reason))
    return build.load(lambda line: None)


@pytest.fixture(scope="module", params=[1, 2], ids=["AVX2", "AVX-512"])
def compiled(request: pytest.FixtureRequest) -> Kernels:
    """At each level of instructions that this processor has."""
    made = Kernels(built(), request.param)
    if made.level != request.param:
        pytest.skip("this processor has no AVX-512 VNNI")
    return made
