"""How far loading is: who hears of it, and how a terminal shows it."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.status import Status
from rich.text import Text

from telemetry.messages import say

STAGES = (
    "starting",
    "libraries",
    "attention",
    "kernels",
    "weights",
    "quantising",
    "quality",
    "cache",
    "probe",
    "warm-up",
)


class Progress(Protocol):
    """Hears the stage (one of STAGES), how much of it is done (0..1), and which file and layer is at work where that is known."""

    def __call__(self, stage: str, done: float, detail: str = "", /) -> None: ...


def silent(_stage: str, _done: float, _detail: str = "", /) -> None:
    """For loading that nobody watches."""


def words(stage: str, language: str) -> str:
    """A stage as a person reads it."""
    return say(f"engine.stage.{stage}", language) if stage in STAGES else stage


class LoadingLine:
    """One moving line on a terminal, over which what is logged meanwhile goes by; nothing where nobody looks."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def show(self, text: str) -> None:
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(_one_line(text))
            self._status.start()
        else:
            self._status.update(_one_line(text))

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
