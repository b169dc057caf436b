"""Does the agent see the host, or a container's view of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent.collectors.interface import Finding
from telemetry.messages import say

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the host's own process namespace (PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h)."""

_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container", "var/run/secrets/kubernetes.io")


def findings(language: str, root: Path = Path("/")) -> Sequence[Finding]:
    contained = any((root / mark).exists() for mark in _MARKS)
    try:
        hosts_pids = (root / "proc/self/ns/pid").stat().st_ino == FIRST_PID_NAMESPACE
    except OSError:
        hosts_pids = not contained
    if not hosts_pids:
        remedy = say("doctor.container.pids_remedy", language)
        return [Finding("container", "warning", say("doctor.container.no_pids", language), remedy)]
    return [Finding("container", "ok", say(f"doctor.container.{'with_pids' if contained else 'host'}", language))]
