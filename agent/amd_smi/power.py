"""Power, its limits and energy."""

from __future__ import annotations

from agent.amd_smi.calls import Calls, within
from agent.driver import Number

HIGHEST_W = 10_000
MICROWATTS_FROM = 100_000
"""A limit above this is in microwatts, as on the host; below it in watts, as in some guests (amdsmi_power_cap_info_t)."""


def read(calls: Calls, *, limits: bool) -> dict[str, Number]:
    """power_w, power_limit_w and energy_j; with `limits` also the default limit.

    power_w: the present socket power of MI300 and later, else the average that older cards give. 0 W is not believed: it is
    what a chiplet says whose neighbour tells the power of both.
    """
    fields: dict[str, Number] = {}
    power = calls.table("amdsmi_get_power_info")
    for key in ("current_socket_power", "average_socket_power"):
        watts = within(power.get(key), 1, HIGHEST_W)
        if watts is not None:
            fields["power_w"] = watts
            break
    caps = calls.table("amdsmi_get_power_cap_info")
    wanted = [("power_limit_w", "power_cap")] + ([("power_limit_default_w", "default_power_cap")] if limits else [])
    for name, key in wanted:
        watts = _limit_w(caps.get(key))
        if watts is not None:
            fields[name] = watts
    energy = calls.table("amdsmi_get_energy_count")
    counted = within(energy.get("energy_accumulator", energy.get("power")), 1, 2**64 - 2**12)
    microjoules = within(energy.get("counter_resolution"), 1e-6, 1e6)
    if counted is not None and microjoules is not None:
        fields["energy_j"] = counted * microjoules / 1e6
    return fields


def _limit_w(told: object) -> float | None:
    limit = within(told, 1, HIGHEST_W * 1e6)
    if limit is None or limit == 2**32 - 1:
        return None
    return limit / 1e6 if limit >= MICROWATTS_FROM else within(limit, 1, HIGHEST_W)
