"""Set before any test of this room imports torch."""

from engine.threads import calm_openmp

calm_openmp()
