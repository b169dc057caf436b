"""RedfishReader: one BMC's power and cooling over Redfish, from a session that is kept between visits and ended on every exit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from agent.power.fault import BmcFault, Trouble
from agent.power.reading import BmcReading, Supply
from agent.power.redfish.client import LOGOUT_S, Missing, OutOfTime, RedfishClient, Unanswered
from agent.power.redfish.cooling import Cooling, mean, slowest, warmest
from agent.power.redfish.document import Json, is_present, link, rows
from agent.power.redfish.node_power import Redundancy, of_environment, of_power, redundancy_of
from agent.power.redfish.places import ChassisPlaces, Places, find
from agent.power.redfish.supplies import bay_of, named_apart, of_power_entry, of_power_supply
from agent.settings import BmcTarget
from telemetry.messages import say

REDISCOVER_S = 3600.0
REDISCOVER_SPREAD = 0.1
"""The links are followed anew every hour, a tenth sooner or later, so that a fleet doesn't do it at once."""

RETRY_S = 120.0
"""They are followed anew so soon where a document on the way could not be had."""


class RedfishReader:
    """See `agent.power.readers.BmcReader`. A first visit follows the BMC's links; where they are too many for its time, the next
    visits go on from there.
    """

    def __init__(
        self, target: BmcTarget, language: str = "en", monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._target = target
        self._language = language
        self._monotonic = monotonic
        self._client = RedfishClient(target, monotonic)
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._places: Places | None = None
        self._walked: dict[str, Json | None] = {}  # what following links has read so far
        self._rediscover_s = 0.0
        self._answered: set[str] = set()
        self._absent: set[str] = set()  # links that lead nowhere, until the links are followed anew
        self._moved = False
        self._named: dict[str, tuple[Supply, str]] = {}  # supplies by path, with nothing but name and bay
        self._problems: list[str] = []

    def read(self) -> BmcReading:
        with self._turn:
            if self._closed.is_set():
                raise BmcFault(Trouble.UNREACHABLE, "closed")
            self._client.begin(self._target.deadline_s)
            self._problems = []
            try:
                return self._visit()
            except OutOfTime:
                self._client.logout()
                raise BmcFault(Trouble.SLOW) from None
            except Exception:  # a fault of the BMC's among them
                self._client.logout()
                raise
            finally:
                if self._closed.is_set():
                    self._client.close()

    def close(self) -> None:
        self._closed.set()
        self._client.interrupt()
        if self._turn.acquire(timeout=LOGOUT_S):
            try:
                self._client.close()
            finally:
                self._turn.release()

    def _visit(self) -> BmcReading:
        places = self._discovered()
        gathered = Gathered()
        for chassis in places.powered:
            self._power_of(chassis, gathered)
        try:
            for chassis in places.cooled:
                self._cooling_of(chassis, gathered.cooling)
        except OutOfTime:
            self._problem("late")  # what was read of power stands
        return gathered.reading(places.tells_supplies, tuple(self._problems))

    def _discovered(self) -> Places:
        now_s = self._monotonic()
        if self._places is not None and not self._moved and now_s < self._rediscover_s:
            return self._places
        if self._places is not None:
            self._forget()
        places = find(self._walk)
        if places is None:
            self._forget()
            raise BmcFault(Trouble.UNUSABLE, self._problems[0] if self._problems else "no chassis")
        self._places = places
        self._walked = {}
        spread = random.uniform(1 - REDISCOVER_SPREAD, 1 + REDISCOVER_SPREAD)
        self._rediscover_s = now_s + (RETRY_S if self._problems else REDISCOVER_S) * spread
        return places

    def _forget(self) -> None:
        """Follow the links anew from the root."""
        self._walked, self._places, self._moved = {}, None, False
        self._absent.clear()

    def _walk(self, path: str) -> Json | None:
        """While links are followed: each document once, over as many visits as it takes."""
        if self._walked.get(path) is None:
            self._walked[path] = self._get(path)
        return self._walked[path]

    def _get(self, path: str | None) -> Json | None:
        """A document; None where it can't be had, which is a problem unless the BMC has no such thing."""
        if path is None or path in self._absent:
            return None
        try:
            document = self._client.get(path)
        except Missing:
            if path in self._answered:
                self._answered.discard(path)
                self._moved = True
            self._absent.add(path)
            return None
        except Unanswered as error:
            self._problem("unanswered", path=path, reason=error)
            return None
        self._answered.add(path)
        return document

    def _problem(self, key: str, **values: object) -> None:
        self._problems.append(say(f"agent.bmc.redfish.{key}", self._language, **values))

    def _power_of(self, chassis: ChassisPlaces, gathered: Gathered) -> None:
        found: list[tuple[Supply, str]] = []
        for path in chassis.supplies:
            document = self._get(path)
            if document is None:
                if path in self._named and path not in self._absent:  # it is there, and can't be read just now
                    found.append(self._named[path])
                continue
            if gathered.is_known(link(document) or path):
                continue
            supply = of_power_supply(document, self._get(link(document.get("Metrics"))) or {})
            if supply is not None:
                bay = bay_of(document)
                self._named[path] = (Supply(supply.name), bay)
                found.append((supply, bay))
        if chassis.power_subsystem and found:
            subsystem = self._get(chassis.power_subsystem) or {}
            gathered.group(redundancy_of(rows(subsystem.get("PowerSupplyRedundancy")), len(found)))
        if gathered.node_w is None:
            gathered.node(*of_environment(self._get(chassis.environment) or {}))
        if chassis.power and (not _tells_power(found) or gathered.node_w is None):
            found = self._old_power_of(chassis, found, gathered)
        gathered.unread |= chassis.has_supplies and not found
        gathered.supplies += found

    def _old_power_of(
        self, chassis: ChassisPlaces, found: list[tuple[Supply, str]], gathered: Gathered
    ) -> list[tuple[Supply, str]]:
        document = self._get(chassis.power) or {}
        if gathered.node_w is None:
            gathered.node(*of_power(document))
        listed = [
            (supply, bay_of(entry))
            for entry in rows(document.get("PowerSupplies"))
            if is_present(entry) and (supply := of_power_entry(entry, chassis.vendor)) is not None
        ]
        if not listed or (found and (_tells_power(found) or not _tells_power(listed))):
            return found
        gathered.group(redundancy_of(rows(document.get("Redundancy")), len(listed)))
        return listed

    def _cooling_of(self, chassis: ChassisPlaces, cooling: Cooling) -> None:
        if not cooling.inlet_c:
            cooling.thermal_metrics(self._get(chassis.thermal_metrics) or {})
        if not cooling.has_fans:
            for path in chassis.fans:
                cooling.fan(self._get(path) or {})
        if not cooling.inlet_c or not cooling.exhaust_c or not cooling.has_fans:
            cooling.thermal(self._get(chassis.thermal) or {})
        if chassis.leak_detection:
            cooling.leak_detection(self._get(chassis.leak_detection) or {})
        for path in chassis.leak_detectors:
            cooling.leak_detector(self._get(path) or {})
        if not cooling.coolant_c:
            for path in chassis.coolant:
                cooling.coolant_connector(self._get(path) or {})


class Gathered:
    """What a visit has found so far."""

    def __init__(self) -> None:
        self.supplies: list[tuple[Supply, str]] = []
        self.node_w: float | None = None
        self.cap_w: float | None = None
        self.cooling = Cooling()
        self.unread = False  # there are supplies that could not be read in this visit
        self._redundancy = Redundancy()
        self._known: set[str] = set()

    def is_known(self, path: str) -> bool:
        """Whether this supply was met before, under whichever path: some BMCs list one twice."""
        if path in self._known:
            return True
        self._known.add(path)
        return False

    def node(self, node_w: float | None, cap_w: float | None) -> None:
        self.node_w = node_w
        self.cap_w = self.cap_w if cap_w is None else cap_w

    def group(self, redundancy: Redundancy) -> None:
        if self._redundancy == Redundancy():
            self._redundancy = redundancy

    def reading(self, tells_supplies: bool, problems: tuple[str, ...]) -> BmcReading:
        cooling = self.cooling
        return BmcReading(
            supplies=named_apart(self.supplies) if tells_supplies and not self.unread else None,
            spares=self._redundancy.spares,
            redundancy=self._redundancy.state,
            node_w=self.node_w,
            cap_w=self.cap_w,
            inlet_c=warmest(cooling.inlet_c),
            exhaust_c=warmest(cooling.exhaust_c),
            fan_min_rpm=slowest(cooling.fan_rpm),
            fan_pct=mean(cooling.fan_pct),
            coolant_c=warmest(cooling.coolant_c),
            leak=cooling.leak,
            problems=problems,
        )


def _tells_power(supplies: list[tuple[Supply, str]]) -> bool:
    return any(supply.output_w is not None or supply.input_w is not None for supply, _ in supplies)
