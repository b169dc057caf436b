"""Launch: the first thing that runs in a hosted engine's process. It ties the process to the agent and becomes the engine.

A step of its own rather than code between fork and exec: the agent has threads, and there a lock that another thread held
would hang the child for ever.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from telemetry.process import die_with_parent

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from agent.launch import main; main(sys.argv[2:])"


def launch_command(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` as a child which gets SIGTERM when this process dies, however it dies."""
    root = str(Path(__file__).parents[1])
    return [sys.executable, "-I", "-c", _BOOT, root, str(os.getpid()), *command]


def main(arguments: Sequence[str]) -> None:
    """[parent's pid, program, arguments...]: never returns. Exit code 127 when the program can't be run."""
    parent, program = int(arguments[0]), arguments[1]
    die_with_parent()
    if os.getppid() != parent:  # it died before we were tied to it
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(program, list(arguments[1:]))  # noqa: S606 - no shell is the point
    except OSError as error:
        print(f"{program}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
