"""Pausing: ask the agent of this host to let go of its devices for a while, and see that it did."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import pause as request
from agent.doctor.running import ask_health
from agent.pause import LONGEST_S, moment
from agent.settings import AgentSettings
from telemetry.lineprotocol import printable
from telemetry.messages import say

__all__ = ["LONGEST_S", "CannotPause", "Until", "pause", "resume"]

CONFIRM_WITHIN_S = 5.0
LOOK_EVERY_S = 0.1


class CannotPause(Exception):
    """One line: what stands in the way, and the remedy."""


@dataclass(frozen=True, slots=True)
class Until:
    """The end of a pause that was asked for, and whether the agent says that it has begun; None when no agent answers."""

    moment: str
    is_confirmed: bool | None


def pause(settings: AgentSettings, seconds: float) -> Until:
    """Ask for it, and wait until the agent has let go. CannotPause when it can't be asked for."""
    folder = _folder(settings)
    try:
        until_s = request.ask(folder, seconds)
    except OSError as error:
        raise _refused(settings, folder, error) from None
    if ask_health(settings) is None:
        return Until(moment(until_s), None)
    return Until(moment(until_s), _is_confirmed(settings))


def resume(settings: AgentSettings) -> bool:
    """End a pause early; False when there was none. CannotPause when it can't be ended."""
    folder = _folder(settings)
    try:
        return request.withdraw(folder)
    except OSError as error:
        raise _refused(settings, folder, error) from None


def _folder(settings: AgentSettings) -> Path:
    """The state folder, unless the agent that runs here says that it uses another one."""
    theirs = _text((ask_health(settings) or {}).get("state_dir"))
    if theirs and os.path.realpath(theirs) != os.path.realpath(settings.state_dir):
        raise CannotPause(say("pairscope.pausing.elsewhere", settings.language, path=theirs))
    return settings.state_dir


def _is_confirmed(settings: AgentSettings) -> bool:
    give_up_s = time.monotonic() + CONFIRM_WITHIN_S + 2 * settings.interval_s
    while time.monotonic() < give_up_s:
        if (ask_health(settings) or {}).get("paused_until"):
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def _refused(settings: AgentSettings, folder: Path, error: OSError) -> CannotPause:
    if isinstance(error, FileNotFoundError):
        return CannotPause(say("pairscope.pausing.no_state", settings.language, path=folder))
    reason = error.strerror or str(error)
    return CannotPause(say("pairscope.pausing.refused", settings.language, path=folder, reason=reason))


def _text(value: Any) -> str:
    return printable(value)[:4096] if isinstance(value, str) else ""
