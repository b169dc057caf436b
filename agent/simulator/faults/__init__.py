"""Every fault the simulator knows, by name. To add one: a row in the file of its kind; to add a kind: a file, and its line here."""

from __future__ import annotations

from collections.abc import Mapping

from agent.simulator.faults import memory, power, requests, scheduling, software, thermal
from agent.simulator.faults.fault import Fault

FAULTS: Mapping[str, Fault] = {
    fault.name: fault for room in (thermal, power, memory, requests, scheduling, software) for fault in room.FAULTS
}
