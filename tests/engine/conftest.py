"""Set before any test of this room imports torch."""

from engine.threads import calm_openmp

calm_openmp()

from tests.engine.compiling import compiled  # noqa: E402

__all__ = ["compiled"]
