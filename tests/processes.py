"""Processes as tests see them; each may end at the very moment it is looked at."""

from __future__ import annotations

import contextlib
import time

import psutil


def has_ended(pid: int) -> bool:
    """Whether the process runs no more; a zombie has ended, though nobody has waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually_ended(pid: int, within_s: float = 60.0) -> bool:
    """Whether the process ends by itself by then."""
    give_up_s = time.monotonic() + within_s
    while not has_ended(pid) and time.monotonic() < give_up_s:
        time.sleep(0.01)
    return has_ended(pid)


def children_named(name: str) -> list[psutil.Process]:
    """Descendants of this process with that name, zombies too."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name:
                found.append(child)
    return found


def zombies() -> list[psutil.Process]:
    """Children of this process that ended and were not waited for."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child)
    return found
