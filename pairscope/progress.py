"""How far a long copy is: a bar with rate and remaining time on a terminal, nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Advance = Callable[[float, int], None]
"""Called with how much of the total is done and how many samples that were."""

NUMBERS_WIDTH = 60
"""Columns of the terminal that the bar at its shortest, the percentage, the samples, the rate and the time left take."""


@contextmanager
def shown(what: str, total: float | None, samples_word: str) -> Iterator[Advance]:
    """A bar over `total` (of any unit; None when it isn't known) on stderr, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _samples: None
        return
    room = console.width - NUMBERS_WIDTH
    if cell_len(what) > room:  # the numbers come first
        what = set_cell_size(what, room - 1) + "…" if room >= 12 else ""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10 if room < 40 else 40),
        TaskProgressColumn(),
        TextColumn("{task.fields[samples]:,} {task.fields[word]}"),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(escape(what), total=total, samples=0, word=escape(samples_word), rate=0.0)

        def advance(done: float, samples: int) -> None:
            elapsed_s = progress.tasks[0].elapsed or 0.0
            progress.update(task, completed=done, samples=samples, rate=samples / elapsed_s if elapsed_s else 0.0)

        yield advance
