"""Parts: the child processes that `pairscope up` runs, each started, watched, restarted and stopped the same way."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESTART_DELAY_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Wait before the n-th restart in a row; the first is at once. A part that stayed up for STEADY_S starts over."""

STEADY_S = 60.0
LOG_LIMIT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What to run. `command` becomes its own session, so that Ctrl-C reaches only us and we stop it in order."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@dataclass(slots=True)
class Part:
    """One running part and what it last said of itself over its notify socket."""

    spec: PartSpec
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket | None = None
    ready: bool = False
    status: str = ""
    started_s: float = 0.0
    failures: int = 0
    restart_at_s: float | None = None
    exits: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None


def start(part: Part, now_s: float) -> None:
    """Start the part's process with a notify socket of its own. OSError when its log can't be written or the command not be run."""
    address = f"@pairscope-{os.getpid()}-{part.spec.name}-{secrets.token_hex(4)}"
    close_channel(part)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    channel.bind("\0" + address[1:])
    environment = {**part.spec.environment, "NOTIFY_SOCKET": address, "PAIRSCOPE_PARENT_PID": str(os.getpid())}
    try:
        part.spec.log.parent.mkdir(parents=True, exist_ok=True)
        if part.spec.log.exists() and part.spec.log.stat().st_size > LOG_LIMIT_BYTES:
            part.spec.log.replace(part.spec.log.with_suffix(".log.1"))
        with part.spec.log.open("ab") as log:
            part.process = subprocess.Popen(
                list(part.spec.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
    except OSError:
        channel.close()
        raise
    part.channel = channel
    part.ready = False
    part.status = ""
    part.started_s = now_s
    part.restart_at_s = None


def close_channel(part: Part) -> None:
    if part.channel is not None:
        part.channel.close()
        part.channel = None


def hear(part: Part) -> bool:
    """Read what the part said since the last call; True when it has just become ready."""
    was_ready = part.ready
    while part.channel is not None:
        try:
            message = part.channel.recv(4096).decode("utf-8", "replace")
        except BlockingIOError:
            break
        for line in message.splitlines():
            name, _, value = line.partition("=")
            if name == "READY" and value == "1":
                part.ready = True
            elif name == "STATUS":
                part.status = value
    return part.ready and not was_ready


def reap(part: Part, now_s: float) -> int | None:
    """The exit code if the part has just died (negative: killed by that signal), with its restart scheduled; else None."""
    if part.process is None:
        return None
    code = part.process.poll()
    if code is None:
        return None
    kill_group(part.process.pid, signal.SIGKILL)  # nothing that it started stays behind
    part.process = None
    part.ready = False
    part.exits.append(code)
    part.failures = 0 if now_s - part.started_s > STEADY_S else part.failures + 1
    part.restart_at_s = now_s + RESTART_DELAY_S[min(part.failures, len(RESTART_DELAY_S) - 1)]
    return code


def kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def stop_all(
    parts: Sequence[Part],
    grace_s: float = 4.0,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """SIGTERM to every part at once, SIGKILL to the groups of those that are still there after `grace_s`; their names."""
    running = [part for part in parts if part.process is not None and part.process.poll() is None]
    for part in running:
        assert part.process is not None
        with contextlib.suppress(ProcessLookupError):
            part.process.terminate()
    deadline = monotonic() + grace_s
    while monotonic() < deadline and any(p.process is not None and p.process.poll() is None for p in running):
        sleep(0.02)
    stubborn = []
    for part in running:
        assert part.process is not None
        if part.process.poll() is None:
            stubborn.append(part.spec.name)
        kill_group(part.process.pid, signal.SIGKILL)
        part.process.wait()
    for part in parts:
        close_channel(part)
    return stubborn


def last_line(log: Path, limit_bytes: int = 4096) -> str:
    """The last non-empty line of a log, for a person; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - limit_bytes))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
