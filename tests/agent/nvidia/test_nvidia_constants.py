"""The numbers of NVML that stand in the code are those of NVIDIA's own binding, by name: nothing else would show a shifted one."""

from __future__ import annotations

import pynvml
import pytest

from agent.nvml import activity, codes, faults, link, mig, power, session, temperature
from telemetry.pairs import THROTTLE_REASONS

FIELDS = {
    "MEMORY_TEMP": temperature.MEMORY_TEMPERATURE,
    "TEMPERATURE_SLOWDOWN_TLIMIT": temperature.SLOWDOWN_OFFSET,
    "TEMPERATURE_MEM_MAX_TLIMIT": temperature.MEM_MAX_OFFSET,
    "TEMPERATURE_GPU_MAX_TLIMIT": temperature.GPU_MAX_OFFSET,
    "TOTAL_ENERGY_CONSUMPTION": power.ENERGY,
    "POWER_AVERAGE": power.AVERAGE,
    "POWER_INSTANT": power.INSTANT,
    "POWER_DEFAULT_LIMIT": power.DEFAULT_LIMIT,
    "POWER_CURRENT_LIMIT": power.CURRENT_LIMIT,
    "POWER_REQUESTED_LIMIT": power.REQUESTED_LIMIT,
    "PCIE_COUNT_TX_BYTES": link.TX_BYTES,
    "PCIE_COUNT_RX_BYTES": link.RX_BYTES,
    "GET_GPU_RECOVERY_ACTION": faults.RECOVERY_ACTION,
}

THROTTLE_FIELDS = {
    "PERF_POLICY_POWER": "throttle_sw_power_s",
    "PERF_POLICY_SYNC_BOOST": "throttle_sync_boost_s",
    "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": "throttle_sw_thermal_s",
    "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": "throttle_hw_thermal_s",
    "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": "throttle_hw_power_brake_s",
}

REASONS = {
    "gpu_idle": "GpuIdle",
    "application_clocks": "ApplicationsClocksSetting",
    "sw_power_cap": "SwPowerCap",
    "hw_slowdown": "HwSlowdown",
    "sync_boost": "SyncBoost",
    "sw_thermal": "SwThermalSlowdown",
    "hw_thermal": "HwThermalSlowdown",
    "hw_power_brake": "HwPowerBrakeSlowdown",
    "display_clocks": "DisplayClockSetting",
}

OTHERS = {
    "NVML_CLOCK_SM": activity.SM_CLOCK,
    "NVML_CLOCK_MEM": activity.MEM_CLOCK,
    "NVML_PSTATE_UNKNOWN": activity.PSTATE_UNKNOWN,
    "NVML_TEMPERATURE_GPU": temperature.GPU_SENSOR,
    "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": temperature.SLOWDOWN_THRESHOLD,
    "NVML_TEMPERATURE_THRESHOLD_MEM_MAX": temperature.MEM_MAX_THRESHOLD,
    "NVML_TEMPERATURE_THRESHOLD_GPU_MAX": temperature.GPU_MAX_THRESHOLD,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": faults.CORRECTED,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": faults.UNCORRECTED,
    "NVML_VOLATILE_ECC": faults.SINCE_RESET,
    "NVML_PCIE_UTIL_TX_BYTES": link.TX_COUNTER,
    "NVML_PCIE_UTIL_RX_BYTES": link.RX_COUNTER,
    "NVML_POWER_SCOPE_MODULE": power.MODULE,
    "NVML_DEVICE_MIG_ENABLE": mig.ENABLED,
    "nvmlEventTypeXidCriticalError": session.XID_EVENT,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_id_is_the_bindings(name: str) -> None:
    assert getattr(pynvml, f"NVML_FI_DEV_{name}") == FIELDS[name]


def test_each_throttle_time_is_read_from_the_field_of_its_name() -> None:
    named = {getattr(pynvml, f"NVML_FI_DEV_{name}"): field for name, field in THROTTLE_FIELDS.items()}
    assert named == activity.THROTTLE_FIELDS


def test_a_throttle_bit_has_the_bindings_name() -> None:
    for bit, name in THROTTLE_REASONS:
        spelt = (f"nvmlClocks{word}Reason{REASONS[name]}" for word in ("Event", "Throttle"))  # both are in use
        assert {getattr(pynvml, one) for one in spelt if hasattr(pynvml, one)} == {bit}, name
    assert len(THROTTLE_REASONS) == len(REASONS)


@pytest.mark.parametrize("name", OTHERS)
def test_a_kind_of_value_is_the_bindings(name: str) -> None:
    assert getattr(pynvml, name) == OTHERS[name]


def test_a_return_code_is_the_bindings() -> None:
    ours = {name: value for name, value in vars(codes).items() if name.isupper() and type(value) is int}
    states = {"OK", "LOST", "HUNG", "DRIVER_MISMATCH", "ABSENT"}
    spelt = {"SUCCESS": "NVML_SUCCESS"}
    assert {name: getattr(pynvml, spelt.get(name, f"NVML_ERROR_{name}")) for name in ours.keys() - states} == {
        name: value for name, value in ours.items() if name not in states
    }


def test_consumer_brands_are_the_bindings() -> None:
    names = ("GEFORCE", "TITAN", "GEFORCE_RTX", "TITAN_RTX")
    assert {getattr(pynvml, f"NVML_BRAND_{name}") for name in names} == faults.CONSUMER_BRANDS
