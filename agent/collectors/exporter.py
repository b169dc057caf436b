"""Exporters: what the collectors that scrape one have in common: a scrape beside the ticks, and whether what it brings is new."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import urlsplit

from agent.collectors.engine_scrape import EngineClient, Outcome, Scrape
from agent.collectors.interface import Finding, Tick
from agent.exposition import Exposition
from agent.periodic import Periodic
from telemetry.lineprotocol import printable
from telemetry.messages import say

log = logging.getLogger(__name__)

EVERY_S = 5.0
USUAL_INTERVAL_S = 30.0
"""How often dcgm-exporter reads its GPUs by default; npu-exporter does so every 5 s."""
INTERVALS = 3
KEPT_S = INTERVALS * USUAL_INTERVAL_S
"""For how long the last reading of an exporter stands, seconds."""
LONGEST_INTERVAL_S = 60.0
GAPS = 4
"""So many gaps between readings show an exporter's interval."""
MISSES = 2
"""A device is gone when so many answers in a row don't list it: one may come from an exporter that is just starting."""
DEVICE_LIMIT = 64
TEXT_LIMIT = 120

WORDS = {Outcome.REFUSED: "refused", Outcome.TIMEOUT: "timeout", Outcome.STATUS: "status", Outcome.BAD: "unusable"}


class ExporterScrape:
    """Asks one exporter for its metrics every `every_s` on a thread of its own. `setting` is the key that names its address."""

    def __init__(self, name: str, setting: str, url: str, every_s: float = EVERY_S, deadline_s: float = 4.0) -> None:
        self.last: Scrape | None = None
        self.every_s = every_s
        self._name = name
        self._setting = setting
        self._shown = shown(url)
        self._client = EngineClient(url.rstrip("/").removesuffix("/metrics").rstrip("/"), deadline_s)
        self._periodic = Periodic(f"scrape-{name}", every_s, self._ask)
        self._complained = False
        self._failed = 0
        self._paused = False

    @property
    def errors(self) -> int:
        """Scrapes without an answer since start."""
        return self._failed + self._periodic.failures

    @property
    def pending(self) -> bool:
        """Whether the first answer is under way."""
        return self.last is None and self._periodic.pending

    def take(self, tick: Tick) -> Exposition | None:
        """What an answer that has come since the last call says, once."""
        answer = self._periodic.take(tick)
        if answer is None:
            return None
        asked, self.last = answer
        self._note(self.last)
        is_old = tick.monotonic_s - asked.monotonic_s > INTERVALS * self.every_s + LONGEST_INTERVAL_S
        return None if is_old or self._paused else self.last.exposition

    def pause(self) -> None:
        """Hand out no answers until `resume`: GPUs are being reset, and what an exporter says of them meanwhile is no news."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def close(self) -> None:
        self._periodic.close()
        self._client.close()

    def problem(self, language: str) -> Finding | None:
        """Why there is no answer; None when the last one was an answer."""
        if self.last is None:
            text = say("exporters.finding.unasked", language, url=self._shown)
            return Finding(self._name, "warning", text)
        if self.last.outcome is Outcome.OK:
            return None
        word = WORDS[self.last.outcome]
        text = say(
            f"exporters.finding.{word}",
            language,
            url=self._shown,
            status=self.last.status,
            reason=printable(self.last.reason)[:TEXT_LIMIT],
        )
        remedy = say(f"exporters.remedy.{self._name}_{word}", language, setting=self._setting)
        return Finding(self._name, "error", text, remedy)

    def _ask(self, tick: Tick) -> tuple[Tick, Scrape]:
        return tick, self._client.scrape(tick.time_ns // 1_000_000)

    def _note(self, scrape: Scrape) -> None:
        """Count a failure; log the first one of a row."""
        if scrape.outcome is Outcome.OK:
            self._complained = False
            return
        self._failed += 1
        if not self._complained:
            self._complained = True
            problem = self.problem("en")
            log.warning("%s: %s", self._name, problem.text if problem else scrape.outcome)


class Reading(Enum):
    """What a scrape says of one device."""

    NEW = auto()
    REPEATED = auto()  # the exporter has not read the device again since the last scrape
    FROZEN = auto()  # it has not for longer than three of its intervals


class Freshness:
    """Tells an exporter's readings of one device from their repetitions.

    An exporter reads its devices at an interval of its own and answers from a cache in between, and it goes on answering when the
    library under it hangs. A timestamp that it gives decides; else the values: with an energy counter that must move (`must_move`)
    equal values are one reading. How long its interval is shows in the gaps between readings.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=8)  # s between readings
        self._values: Mapping[str, float] | None = None
        self._stamp_ms: float | None = None
        self._changed_s = 0.0

    @property
    def interval_s(self) -> float:
        """The exporter's own interval; the usual one until enough gaps have shown a shorter one."""
        longest_s = max(self._gaps, default=0.0)
        return min(LONGEST_INTERVAL_S, longest_s if len(self._gaps) >= GAPS else max(longest_s, USUAL_INTERVAL_S))

    def judge(
        self, tick: Tick, values: Mapping[str, float], *, must_move: bool, stamp_ms: float | None = None
    ) -> Reading:
        since_s, kept_s = tick.monotonic_s - self._changed_s, INTERVALS * self.interval_s
        is_first = self._values is None
        can_tell = must_move or stamp_ms is not None
        is_same = can_tell and (values == self._values if stamp_ms is None else stamp_ms == self._stamp_ms)
        self._values, self._stamp_ms = dict(values), stamp_ms
        if stamp_ms is not None and tick.time_ns / 1e6 - stamp_ms > kept_s * 1000:
            return Reading.FROZEN
        if is_same and not is_first:
            return Reading.FROZEN if since_s > kept_s else Reading.REPEATED
        if can_tell and not is_first and since_s <= kept_s:
            self._gaps.append(since_s)
        self._changed_s = tick.monotonic_s
        return Reading.NEW


@dataclass(slots=True)
class Device:
    """One device that an exporter has listed."""

    key: str
    index: str
    uuid: str
    freshness: Freshness
    missed: int = 0  # answers in a row that don't list it
    frozen: bool = False

    @property
    def lost(self) -> bool:
        return self.missed >= MISSES

    @property
    def subject(self) -> str:
        """How events name it."""
        return f"gpu{self.index}"


class Presence:
    """The devices that an exporter has ever listed, so that one whose series just end is reported and not forgotten."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}

    def seen(self, key: str, index: str, uuid: str) -> Device | None:
        """The device of this key, listed now; None when there are too many."""
        device = self.devices.get(key)
        if device is None:
            if len(self.devices) >= DEVICE_LIMIT:
                return None
            device = self.devices[key] = Device(key, index, uuid, Freshness())
        device.index, device.missed = index, 0
        return device

    def forget(self) -> None:
        """Begin afresh: what is not listed from now on is no loss."""
        self.devices = {}

    def missing(self, listed: Mapping[str, object], exposition: Exposition) -> list[Device]:
        """The devices that are gone. An answer with none at all, or one that could not be read in full, says nothing of any."""
        if not listed or exposition.outdated or exposition.bad_lines or exposition.over_limit:
            return []
        for key, device in self.devices.items():
            if key not in listed:
                device.missed += 1
        return [device for device in self.devices.values() if device.lost]


def shown(url: str) -> str:
    """An address as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    return printable(f"{parts.scheme}://{host}{port}{parts.path}")[:TEXT_LIMIT]
