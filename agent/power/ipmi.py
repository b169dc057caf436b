"""IPMI: a BMC read through ipmitool, over the network or through this host's own device; one short-lived child at a time."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from agent.child import Answer, Program
from agent.power import sdr
from agent.power.fault import BmcFault, Trouble
from agent.power.reading import BmcReading
from agent.settings import BmcTarget
from telemetry.messages import say

log = logging.getLogger(__name__)

LAN_PORT = 623
CIPHER_SUITES = ("3", "17")
"""Asked for by number, because asking a BMC which it has costs seconds: SHA-1 and AES-128, which all have, then SHA-256."""

RESEND_S, RESENDS = 1, 2
REFUSED_WITHIN_S = float(RESEND_S * RESENDS)
"""ipmitool says the same of a wrong password and of a host that is silent; the other comes after all resends, the one long before,
though not at once where the BMC is slow or this host is busy.
"""

REFUSALS = 3
PAUSE_S = 3600.0
"""After three refusals in a row one attempt an hour: BMCs lock an account that keeps trying."""

RECORDS_STAND_S = 24 * 3600.0
"""The list of sensors (the SDR repository, the slow part) is read once and kept this long; a firmware update may change it."""

DCMI_AGAIN_S = 3600.0
LEAST_S = 0.3  # with less time left no further child is started


class IpmiReader:
    """Reads one BMC. The password reaches ipmitool through its environment, never its arguments. `memory` is a folder that outlives
    the process, for the list of sensors.
    """

    def __init__(
        self,
        target: BmcTarget,
        language: str = "en",
        memory: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._language = language
        self._monotonic = monotonic
        self._program = Program("ipmitool")
        self._memory = memory
        self._own_folder: Path | None = None
        self._records: Path | None = None
        self._cipher = 0
        self._refusals = 0
        self._paused_until_s = -math.inf
        self._no_dcmi_until_s = -math.inf

    def read(self) -> BmcReading:
        """Sensors, and the power and cap by DCMI where the BMC has it. Returns by the target's deadline; BmcFault for nothing."""
        if self._monotonic() < self._paused_until_s:
            raise BmcFault(Trouble.REFUSED)
        until_s = self._monotonic() + self._target.deadline_s
        sensors, problems = self._sensors(until_s)
        reading = (
            replace(sdr.reading(sensors), problems=tuple(problems)) if sensors else BmcReading(problems=tuple(problems))
        )
        node_w, cap_w = self._dcmi(until_s)
        if not sensors and node_w is None:
            raise BmcFault(Trouble.UNUSABLE, "; ".join(problems))
        return replace(reading, node_w=node_w if node_w is not None else reading.node_w, cap_w=cap_w)

    def close(self) -> None:
        self._program.stop()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _sensors(self, until_s: float) -> tuple[Sequence[sdr.Line], list[str]]:
        """The lines of the listing; none, and why, where the BMC keeps no list of sensors."""
        try:
            records = self._records_file()
            if not _stands(records):
                answer = self._fetch(records, until_s)
                if not answer.well:
                    return (), [say("agent.ipmi.no_sensors", self._language, reason=_last_words(answer))]
            answer = self._ask(["-S", str(records), "sdr", "elist", "all"], until_s)
            found = sdr.lines(answer.out)
            if not found:
                records.unlink(missing_ok=True)  # it may be damaged; the next visit fetches it anew
        except OSError as error:
            return (), [say("agent.ipmi.no_sensors", self._language, reason=error.strerror)]
        return found, [] if found else [say("agent.ipmi.no_sensors", self._language, reason=_last_words(answer))]

    def _records_file(self) -> Path:
        """Where the list of sensors is kept. OSError where there is no room for it."""
        if self._records is None:
            folder = self._memory
            if folder is None:
                folder = self._own_folder = Path(tempfile.mkdtemp(prefix="pairscope-sdr-"))
            name = hashlib.sha256(self._target.url.encode()).hexdigest()[:12]
            self._records = folder / f"sdr-{name}.bin"
        return self._records

    def _fetch(self, records: Path, until_s: float) -> Answer:
        """The slow part; a list that was not fetched as a whole is not kept."""
        new = records.with_suffix(".new")
        try:
            answer = self._ask(["sdr", "dump", str(new)], until_s)
            if answer.well:
                new.replace(records)
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        return answer

    def _dcmi(self, until_s: float) -> tuple[float | None, float | None]:
        """Node power and cap, W. A BMC without DCMI is asked again after an hour."""
        if self._monotonic() < self._no_dcmi_until_s or until_s - self._monotonic() < LEAST_S:
            return None, None
        try:
            answer = self._ask(["dcmi", "power", "reading"], until_s)
            if not answer.well:
                self._no_dcmi_until_s = self._monotonic() + DCMI_AGAIN_S
                return None, None
            if until_s - self._monotonic() < LEAST_S:
                return sdr.dcmi_power_w(answer.out), None
            limit = self._ask(["dcmi", "power", "get_limit"], until_s)
        except BmcFault:
            return None, None  # the sensors are there already, and the next visit tells
        return sdr.dcmi_power_w(answer.out), sdr.dcmi_limit_w(limit.out)

    def _ask(self, command: Sequence[str], until_s: float) -> Answer:
        """One run of ipmitool. BmcFault where the BMC can't be reached; an answer, good or bad, where it can."""
        while True:
            began_s = self._monotonic()
            answer = self._program.run([*self._way(), *command], until_s - began_s, self._environment())
            fault = self._fault(answer, self._monotonic() - began_s)
            if fault is None:
                self._refusals = 0
                return answer
            if "open session response message" in answer.err and self._cipher + 1 < len(CIPHER_SUITES):
                self._cipher += 1
                continue
            if fault.trouble is Trouble.REFUSED:
                self._refusals += 1
                if self._refusals >= REFUSALS:
                    self._paused_until_s = self._monotonic() + PAUSE_S * random.uniform(1.0, 1.1)
            raise fault

    def _way(self) -> list[str]:
        """How to get to the BMC: reading needs no more than the user's privilege."""
        parts = urlsplit(self._target.url)
        if not parts.hostname:
            return ["-I", "open"]
        address = ["-H", parts.hostname, "-p", str(parts.port or LAN_PORT), "-U", self._target.user]
        patience = ["-N", str(RESEND_S), "-R", str(RESENDS)]
        return ["-I", "lanplus", "-C", CIPHER_SUITES[self._cipher], "-L", "USER", "-E", *patience, *address]

    def _environment(self) -> Mapping[str, str]:
        return {"IPMI_PASSWORD": self._target.password} if urlsplit(self._target.url).hostname else {}

    def _fault(self, answer: Answer, took_s: float) -> BmcFault | None:
        match answer.how:
            case "missing":
                return BmcFault(Trouble.UNEQUIPPED, say("agent.ipmi.missing", self._language))
            case "late" | "stuck":
                return BmcFault(Trouble.SLOW)
            case "flood":
                return BmcFault(Trouble.UNUSABLE)
        said = answer.err
        if "Could not open device" in said:
            return BmcFault(Trouble.UNEQUIPPED, say("agent.ipmi.no_device", self._language, reason=_why(said)))
        if "Unable to establish" not in said:
            return None
        if "Address lookup" in said:
            return BmcFault(Trouble.UNREACHABLE, _first_words(answer))
        if "open session response message" in said:
            return BmcFault(Trouble.UNUSABLE, _first_words(answer))
        return BmcFault(Trouble.REFUSED if took_s < REFUSED_WITHIN_S else Trouble.UNREACHABLE)


def _stands(records: Path) -> bool:
    try:
        status = records.stat()
    except OSError:
        return False
    return status.st_size > 0 and 0 <= time.time() - status.st_mtime < RECORDS_STAND_S


def _why(said: str) -> str:
    """The system's own reason at the end of a sentence."""
    return said.strip().rpartition(": ")[2]


def _first_words(answer: Answer) -> str:
    return next((line.strip() for line in answer.err.splitlines() if line.strip()), "")


def _last_words(answer: Answer) -> str:
    said = [line.strip() for line in answer.err.splitlines() if line.strip()]
    return said[-1] if said else os.strerror(5)
