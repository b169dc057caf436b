"""Set before any test of this room imports torch."""

from engine.threads import calm_openmp

calm_openmp()

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.engine.compiling import compiled  # noqa: E402

__all__ = ["compiled"]


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The device; a machine that has none skips, in strict runs too: no package would bring one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda")
