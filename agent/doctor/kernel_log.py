"""May this user read the kernel log, in which the driver's own words of a fault stand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agent.collectors.interface import Finding
from telemetry.messages import say


def findings(language: str, device: Path = Path("/dev/kmsg")) -> Sequence[Finding]:
    """Never a warning: the driver's library tells of its errors too, and memory kills are counted in /proc."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        reason = error.strerror or str(error)
        text = say("doctor.kernel_log.closed", language, reason=reason)
        return [Finding("kernel_log", "absent", text, say("doctor.kernel_log.remedy", language))]
    return [Finding("kernel_log", "ok", say("doctor.kernel_log.readable", language))]
