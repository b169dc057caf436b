"""What a fault is: the change it makes to a node, its true cause, and its null twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.simulator.conditions import Conditions


@dataclass(frozen=True, slots=True)
class Target:
    """Where on the node a fault strikes: one GPU, and the engine that runs on it, by index."""

    gpu: int
    engine: int
    engines: int  # the node has this many
    gpus: int


Effect = Callable[[Conditions, float, float, Target], None]
"""effect(conditions, strength 0..1, seconds since the strike, target): change fresh conditions."""


@dataclass(frozen=True, slots=True)
class Happening:
    """An `event` sample that goes with a fault. `about`: node, engine (the struck one), engines (each) or gpu."""

    kind: str
    about: str
    text: str
    detail: str = ""
    code: int = 0
    after_s: float = 0.0

    def subjects(self, node: str, target: Target) -> list[str]:
        """The value of the event's `subject` tag, one for each event."""
        if self.about == "engines":
            return [f"{node}-e{i}" for i in range(target.engines)]
        if self.about == "engine":
            return [f"{node}-e{target.engine}"]
        return [str(target.gpu) if self.about == "gpu" else node]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault. `twin` looks alike at a glance and costs nothing: whoever alarms on it is wrong."""

    name: str
    cause: str  # as in rules.verdict.Cause
    scope: str  # gpu, engine, node, rack, circuit, cluster
    onset_s: float  # 0: sudden; else it grows evenly over this long
    effect: Effect
    twin: Effect
    events: tuple[Happening, ...] = ()
    twin_events: tuple[Happening, ...] = ()

    @property
    def description(self) -> str:
        """Key of the sentence that describes the fault."""
        return f"simulator.fault.{self.name.replace('-', '_')}"


def nothing(wrong: Conditions, strength: float, age_s: float, target: Target) -> None:
    """The twin of a fault that has only its events: they come, and nothing changes."""
