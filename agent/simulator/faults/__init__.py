"""Every fault the simulator knows, by name. To add one: a row in the file of its kind; to add a kind: a file, and its line here."""

from __future__ import annotations

from collections.abc import Mapping

from agent.simulator.faults import gpu, host, memory, network, power, requests, scheduling, software, telemetry, thermal
from agent.simulator.faults.fault import Fault

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for kind in (thermal, power, gpu, memory, requests, scheduling, host, network, software, telemetry)
    for fault in kind.FAULTS
}
