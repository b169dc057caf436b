"""Engine status: what is known of one engine right now, for a person and for /healthz."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "loading", "ready", "down", "restarting"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`stage` and `progress` (0..1) while it loads; `problem` is a sentence for a person, in the agent's language."""

    name: str
    url: str
    state: State
    stage: str = ""
    progress: float | None = None
    pid: int | None = None
    restarts: int = 0
    problem: str = ""
