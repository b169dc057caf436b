"""A simulated scenario as a recording: the same samples that a live fleet writes, as line protocol in a file."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from agent.simulator.fleet import Fleet
from agent.simulator.settings import SimulatorError, SimulatorSettings
from telemetry.lineprotocol import encode_many
from telemetry.messages import say
from telemetry.sample import Sample

START_NS = 1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z: a recording is the same whenever it is made
PAST_STEP_S = 5.0


def scenario(settings: SimulatorSettings, seconds: float, start_ns: int = START_NS) -> Iterator[Sequence[Sample]]:
    """The past of `history_s` in steps of 5 s, then `seconds` in steps of `interval_s`, one sequence of samples a step."""
    fleet = Fleet(settings, start_ns)
    while fleet.elapsed_s < settings.history_s - 1e-6:
        yield fleet.step(min(PAST_STEP_S, settings.history_s - fleet.elapsed_s))
    for _ in range(round(seconds / settings.interval_s)):
        yield fleet.step(settings.interval_s)


def record(settings: SimulatorSettings, seconds: float, path: Path, *, start_ns: int = START_NS) -> int:
    """Write the scenario to `path` (`.gz` packs it); how many samples. The file appears whole or not at all.

    SimulatorError if it can't be written.
    """
    if not 0 < seconds <= 366 * 86_400:
        raise SimulatorError(say("simulator.mistake.seconds", settings.language, value=seconds))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    written = 0
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        with _open(unfinished, packed=path.suffix == ".gz") as file:
            for samples in scenario(settings, seconds, start_ns):
                file.write(encode_many(samples))
                written += len(samples)
        unfinished.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SimulatorError(say("simulator.mistake.unwritable", settings.language, path=path, reason=reason)) from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return written


def _open(path: Path, *, packed: bool) -> IO[str]:
    return gzip.open(path, "wt", encoding="utf-8") if packed else path.open("w", encoding="utf-8")
