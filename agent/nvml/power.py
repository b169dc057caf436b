"""Power, its limits and the energy counter. NVML speaks milliwatts and millijoules; PairScope watts and joules."""

from __future__ import annotations

from typing import Any

import pynvml

from agent.nvml.calls import Calls, FieldId, Number
from telemetry.sample import Value

ENERGY = 83
AVERAGE = 185  # over 1 s, Ampere and later but GA100
INSTANT = 186
DEFAULT_LIMIT = 189
CURRENT_LIMIT = 190  # the one enforced, out-of-band caps included
REQUESTED_LIMIT = 192

MODULE = 1  # scope: the GPU and the CPU that it is one module with
MODULE_FIELDS: tuple[FieldId, ...] = ((AVERAGE, MODULE), (INSTANT, MODULE))

FIELDS = (ENERGY, AVERAGE, INSTANT, CURRENT_LIMIT)
LIMIT_FIELDS = (DEFAULT_LIMIT, REQUESTED_LIMIT)


def read(calls: Calls, handle: Any, values: dict[FieldId, Number]) -> dict[str, Value]:
    """power_w (the 1-s average where the card has one), power_limit_w as enforced, energy_j since the driver was loaded.

    power_scope says whether power_w is the GPU's alone: a superchip may tell only that of the whole module.
    """
    fields: dict[str, Value] = {}
    # a running card never draws nothing: a zero here is a driver that fills in a blank
    scope = "gpu"
    milliwatts = values.get(AVERAGE) or values.get(INSTANT)
    if not milliwatts:
        milliwatts = calls.ask("power_usage", pynvml.nvmlDeviceGetPowerUsage, handle)
    if not milliwatts:
        scope = "module"
        of_module = calls.fields(handle, MODULE_FIELDS)
        milliwatts = next((of_module[fid] for fid in MODULE_FIELDS if of_module.get(fid)), None)
    if milliwatts:
        fields["power_w"] = milliwatts / 1000
        fields["power_scope"] = scope
    limit = values.get(CURRENT_LIMIT) or calls.ask("enforced_limit", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    if limit:
        fields["power_limit_w"] = limit / 1000
    millijoules = values.get(ENERGY)
    if millijoules is None:
        millijoules = calls.ask("energy", pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    if millijoules is not None:
        fields["energy_j"] = millijoules / 1000
    return fields


def read_limits(calls: Calls, handle: Any) -> dict[str, Number]:
    """The limit the card boots with and the one last asked for, watts. Enforced below requested: someone outside caps."""
    values = calls.fields(handle, LIMIT_FIELDS)
    default = values.get(DEFAULT_LIMIT) or calls.ask(
        "default_limit", pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle
    )
    requested = values.get(REQUESTED_LIMIT) or calls.ask(
        "requested_limit", pynvml.nvmlDeviceGetPowerManagementLimit, handle
    )
    fields: dict[str, Number] = {}
    if default:
        fields["power_limit_default_w"] = default / 1000
    if requested:
        fields["power_limit_requested_w"] = requested / 1000
    return fields
