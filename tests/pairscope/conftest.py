"""The real servers of the stores' tests, also for the commands that copy between stores."""

from __future__ import annotations

from tests.telemetry.conftest import influxd, victoria

__all__ = ["influxd", "victoria"]
