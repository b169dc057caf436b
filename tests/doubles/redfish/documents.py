"""The documents of one node in the new schema, in the old one, or in both, and what vendors make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.doubles.redfish.state import NodeState, PsuState

Documents = dict[str, Any]

CHASSIS = "/redfish/v1/Chassis/1"


def ref(path: str) -> dict[str, str]:
    return {"@odata.id": path}


def collection(path: str, members: list[str]) -> dict[str, Any]:
    return {"@odata.id": path, "Members@odata.count": len(members), "Members": [ref(member) for member in members]}


def status(psu: PsuState) -> dict[str, str]:
    return {"State": psu.state, "Health": psu.health}


def root(vendor: str = "Contoso") -> Documents:
    return {
        "/redfish/v1/": {
            "@odata.id": "/redfish/v1/",
            "RedfishVersion": "1.15.0",
            "Vendor": vendor,
            "Chassis": ref("/redfish/v1/Chassis"),
            "SessionService": ref("/redfish/v1/SessionService"),
            "Links": {"Sessions": ref("/redfish/v1/SessionService/Sessions")},
        },
        "/redfish/v1/Chassis": collection("/redfish/v1/Chassis", [CHASSIS]),
        CHASSIS: {
            "@odata.id": CHASSIS,
            "Id": "1",
            "Name": "Node",
            "ChassisType": "RackMount",
            "Manufacturer": vendor,
        },
    }


def new_schema(node: NodeState) -> Documents:
    """PowerSubsystem, ThermalSubsystem and EnvironmentMetrics."""
    power, thermal = f"{CHASSIS}/PowerSubsystem", f"{CHASSIS}/ThermalSubsystem"
    made = root()
    made[CHASSIS] |= {
        "PowerSubsystem": ref(power),
        "ThermalSubsystem": ref(thermal),
        "EnvironmentMetrics": ref(f"{CHASSIS}/EnvironmentMetrics"),
    }
    supplies = [f"{power}/PowerSupplies/{i}" for i in range(len(node.psus))]
    made[power] = {
        "@odata.id": power,
        "CapacityWatts": 99999,
        "PowerSupplies": ref(f"{power}/PowerSupplies"),
        "PowerSupplyRedundancy": [
            {
                "RedundancyType": "NPlusM",
                "MinNeededInGroup": node.min_needed,
                "MaxSupportedInGroup": 6,
                "RedundancyGroup": [ref(path) for path in supplies],
                "Status": {"State": "Enabled", "Health": node.redundancy_health},
            }
        ],
    }
    made[f"{power}/PowerSupplies"] = collection(f"{power}/PowerSupplies", supplies)
    for path, psu in zip(supplies, node.psus, strict=True):
        made |= new_supply(path, psu)
    made[f"{CHASSIS}/EnvironmentMetrics"] = {
        "PowerWatts": {"Reading": node.node_w, "DataSourceUri": "/redfish/v1/Chassis/1/Sensors/Power"},
        "PowerLimitWatts": {
            "SetPoint": node.cap_w,
            "AllowableMin": 900,
            "AllowableMax": 9000,
            "ControlMode": "Automatic" if node.cap_w else "Disabled",
        },
        "TemperatureCelsius": {"Reading": 77.0},
    }
    made |= new_cooling(thermal, node)
    return made


def new_supply(path: str, psu: PsuState) -> Documents:
    return {
        path: {
            "@odata.id": path,
            "Id": path.rpartition("/")[2],
            "Name": psu.name,
            "Status": status(psu),
            "LineInputStatus": psu.line,
            "PowerCapacityWatts": psu.capacity_w,
            "EfficiencyRatings": [
                {"LoadPercent": 20, "EfficiencyPercent": 89.0},
                {"LoadPercent": 50, "EfficiencyPercent": 100 * psu.efficiency},
            ],
            "InputRanges": [
                {"NominalVoltageType": "AC100To127V", "CapacityWatts": psu.low_line_capacity_w},
                {"NominalVoltageType": "AC200To240V", "CapacityWatts": psu.capacity_w},
            ],
            "Metrics": ref(f"{path}/Metrics"),
        },
        f"{path}/Metrics": {
            "InputVoltage": {"Reading": psu.voltage_v},
            "InputCurrentAmps": {"Reading": 5.5},
            "InputPowerWatts": {"Reading": psu.input_w},
            "OutputPowerWatts": {"Reading": psu.output_w},
            "EnergykWh": {"Reading": 325.0},
        },
    }


def new_cooling(thermal: str, node: NodeState) -> Documents:
    fans = [f"{thermal}/Fans/{i}" for i in range(len(node.fans))]
    leaks = f"{thermal}/LeakDetection"
    coolant = f"{thermal}/CoolantConnectors"
    made: Documents = {
        thermal: {
            "ThermalMetrics": ref(f"{thermal}/ThermalMetrics"),
            "Fans": ref(f"{thermal}/Fans"),
            "LeakDetection": ref(leaks),
            "CoolantConnectors": ref(coolant),
        },
        f"{thermal}/ThermalMetrics": {
            "TemperatureSummaryCelsius": {
                "Intake": {"Reading": node.inlet_c},
                "Ambient": {"Reading": 11.0},
                "Exhaust": {"Reading": node.exhaust_c},
                "Internal": {"Reading": 66.0},
            },
            "TemperatureReadingsCelsius": [
                {"DeviceName": "Intake behind the bezel", "PhysicalContext": "Intake", "Reading": 29.0},
                {"DeviceName": "CPU 1", "PhysicalContext": "CPU", "Reading": 71.0},
            ],
        },
        f"{thermal}/Fans": collection(f"{thermal}/Fans", fans),
        leaks: {"LeakDetectors": ref(f"{leaks}/LeakDetectors"), "Status": {"State": "Enabled"}},
        f"{leaks}/LeakDetectors": collection(f"{leaks}/LeakDetectors", [f"{leaks}/LeakDetectors/tray"]),
        f"{leaks}/LeakDetectors/tray": {
            "DetectorState": "Critical" if node.leak else "OK",
            "Status": {"State": "Enabled", "Health": "OK"},
        },
        coolant: collection(coolant, [f"{coolant}/supply"]),
        f"{coolant}/supply": {"SupplyTemperatureCelsius": {"Reading": node.coolant_c}},
    }
    for path, (rpm, pct) in zip(fans, node.fans, strict=True):
        made[path] = {
            "@odata.id": path,
            "Status": {"State": "Enabled", "Health": "OK"},
            "SpeedPercent": {"Reading": pct, "SpeedRPM": rpm},
        }
    made[fans[0]]["Status"]["State"] = "Enabled"
    return made


def old_schema(node: NodeState) -> Documents:
    """Power and Thermal."""
    made = root()
    made[CHASSIS] |= {"Power": ref(f"{CHASSIS}/Power"), "Thermal": ref(f"{CHASSIS}/Thermal")}
    made[f"{CHASSIS}/Power"] = {
        "@odata.id": f"{CHASSIS}/Power",
        "PowerControl": [
            {
                "MemberId": "0",
                "Name": "System Power Control",
                "PowerConsumedWatts": node.node_w,
                "PowerCapacityWatts": 88888,
                "PowerLimit": {"LimitInWatts": node.cap_w},
                "PowerMetrics": {"AverageConsumedWatts": 3333, "MaxConsumedWatts": 4444, "MinConsumedWatts": 2222},
            }
        ],
        "PowerSupplies": [old_supply(number, psu) for number, psu in enumerate(node.psus)],
        "Redundancy": [
            {
                "Mode": "N+m",
                "MinNumNeeded": node.min_needed,
                "MaxNumSupported": 8,
                "RedundancySet": [ref(f"{CHASSIS}/Power#/PowerSupplies/{i}") for i in range(len(node.psus))],
                "Status": {"State": "Enabled", "Health": node.redundancy_health},
            }
        ],
    }
    made[f"{CHASSIS}/Thermal"] = {
        "Temperatures": [
            {"Name": "CPU1 Temp", "PhysicalContext": "CPU", "ReadingCelsius": 72.0, "Status": {"State": "Enabled"}},
            {"Name": "PSU1 Inlet", "PhysicalContext": "PowerSupply", "ReadingCelsius": 35.0},
            {"Name": "Front air", "PhysicalContext": "Intake", "ReadingCelsius": node.inlet_c},
            {"Name": "Spare", "PhysicalContext": "Intake", "ReadingCelsius": 0, "Status": {"State": "Absent"}},
            {"Name": "Rear air", "PhysicalContext": "Exhaust", "ReadingCelsius": node.exhaust_c},
        ],
        "Fans": [
            {"Name": f"Fan {i}", "Reading": rpm, "ReadingUnits": "RPM", "Status": {"State": "Enabled"}}
            for i, (rpm, _) in enumerate(node.fans)
        ]
        + [{"Name": "Fan 9", "Reading": 0, "ReadingUnits": "RPM", "Status": {"State": "Absent"}}],
    }
    return made


def old_supply(number: int, psu: PsuState) -> dict[str, Any]:
    return {
        "@odata.id": f"{CHASSIS}/Power#/PowerSupplies/{number}",
        "MemberId": str(number),
        "Name": psu.name,
        "FirmwareVersion": "1.07",
        "Status": status(psu),
        "PowerCapacityWatts": psu.capacity_w,
        "PowerInputWatts": psu.input_w,
        "PowerOutputWatts": psu.output_w,
        "LastPowerOutputWatts": 7.0,
        "LineInputVoltage": psu.voltage_v,
        "EfficiencyPercent": 100 * psu.efficiency,
        "InputRanges": [
            {"MinimumVoltage": 90, "MaximumVoltage": 140, "OutputWattage": psu.low_line_capacity_w},
            {"MinimumVoltage": 180, "MaximumVoltage": 264, "OutputWattage": psu.capacity_w},
        ],
    }


def both_schemas(node: NodeState) -> Documents:
    old, new = old_schema(node), new_schema(node)
    return {**old, **new, CHASSIS: {**old[CHASSIS], **new[CHASSIS]}}


def dell(node: NodeState) -> Documents:
    """iDRAC: rated input for a reading, efficiency as a fraction, 32767 for no cap, no redundancy group."""
    made = old_schema(node)
    made["/redfish/v1/"]["Vendor"] = made[CHASSIS]["Manufacturer"] = "Dell"
    power = made[f"{CHASSIS}/Power"]
    for number, (entry, psu) in enumerate(zip(power["PowerSupplies"], node.psus, strict=True)):
        entry |= {
            "Name": f"PS{number + 1} Status",
            "PowerInputWatts": 1.2 * psu.capacity_w,
            "LastPowerOutputWatts": None,
            "EfficiencyPercent": psu.efficiency,
            "InputRanges": [],
        }
    power["PowerSupplies"][2] |= {"PowerCapacityWatts": 0, "PowerInputWatts": 1340}
    power["PowerControl"][0] |= {"MemberId": "PowerControl", "PowerAvailableWatts": 0}
    power["PowerControl"][0]["PowerLimit"]["LimitInWatts"] = 32767
    power["Redundancy"] = []
    made[f"{CHASSIS}/Thermal"]["Temperatures"] = [
        {"Name": "System Board Inlet Temp", "PhysicalContext": "SystemBoard", "ReadingCelsius": node.inlet_c},
        {"Name": "System Board Exhaust Temp", "PhysicalContext": "SystemBoard", "ReadingCelsius": node.exhaust_c},
    ]
    return made


def hpe(node: NodeState) -> Documents:
    """iLO 5: one name for all, bays and averages under Oem, zero output between two updates, 2 of 2 needed in a fail-over pair."""
    made = old_schema(node)
    made["/redfish/v1/"] |= {"Vendor": "HPE", "Oem": {"Hpe": {}}}
    power = made[f"{CHASSIS}/Power"]
    for number, (entry, psu) in enumerate(zip(power["PowerSupplies"], node.psus, strict=True)):
        for gone in ("PowerInputWatts", "PowerOutputWatts", "EfficiencyPercent", "InputRanges"):
            del entry[gone]
        entry |= {"Name": "HpeServerPowerSupply", "LastPowerOutputWatts": psu.output_w}
        entry["Oem"] = {"Hpe": {"BayNumber": number + 1, "AveragePowerOutputWatts": psu.output_w + 4}}
    power["PowerSupplies"][0]["LastPowerOutputWatts"] = 0
    power["PowerSupplies"][1] |= {"LastPowerOutputWatts": 0}
    power["PowerSupplies"][1]["Oem"]["Hpe"]["AveragePowerOutputWatts"] = 0
    power["Redundancy"][0] |= {"Mode": "Failover", "MinNumNeeded": 3}
    return made


def ilo4(node: NodeState) -> Documents:
    """iLO 4: an empty bay is a supply with firmware 0.00, and fans have names of their own for everything."""
    made = hpe(node)
    made["/redfish/v1/"]["Vendor"] = "HP"
    power, thermal = made[f"{CHASSIS}/Power"], made[f"{CHASSIS}/Thermal"]
    for entry in power["PowerSupplies"]:
        entry["Oem"] = {"Hp": entry["Oem"]["Hpe"]}
        entry["LastPowerOutputWatts"] = 1000.0 + entry["Oem"]["Hp"]["BayNumber"]
    power["PowerSupplies"].append(
        {"Name": "HpServerPowerSupply", "FirmwareVersion": "0.00", "PowerCapacityWatts": 0, "LastPowerOutputWatts": 0}
    )
    thermal["Fans"] = [
        {"FanName": f"Fan {i}", "CurrentReading": pct, "Units": "Percent", "Status": {"State": "Enabled"}}
        for i, (_, pct) in enumerate(node.fans)
    ] + [{"FanName": "Fan 7", "CurrentReading": 0, "Units": "Percent", "Status": {"State": "Absent"}}]
    return made


def supermicro(node: NodeState) -> Documents:
    """Numbers as strings, and N/A for what is not known."""
    made = old_schema(node)
    made["/redfish/v1/"]["Vendor"] = "Supermicro"
    power = made[f"{CHASSIS}/Power"]
    for entry in power["PowerSupplies"]:
        for name in ("PowerInputWatts", "PowerOutputWatts", "LineInputVoltage", "PowerCapacityWatts"):
            entry[name] = str(entry[name])
        entry["EfficiencyPercent"] = "N/A"
    power["PowerControl"][0]["PowerConsumedWatts"] = f"{node.node_w}"
    power["PowerControl"][0]["PowerLimit"] = {"LimitInWatts": "N/A"}
    for entry in made[f"{CHASSIS}/Thermal"]["Temperatures"]:
        entry["ReadingCelsius"] = str(entry["ReadingCelsius"])
    return made


def lenovo(node: NodeState) -> Documents:
    """XCC: the processors' and the memory's power stand before and behind the node's."""
    made = old_schema(node)
    made["/redfish/v1/"]["Vendor"] = "Lenovo"
    controls = made[f"{CHASSIS}/Power"]["PowerControl"]
    controls[0]["Name"] = "Server Power Control"
    controls.insert(0, {"Name": "CPU Sub-system Power", "PowerConsumedWatts": 611, "PowerLimit": {"LimitInWatts": 777}})
    controls.append({"Name": "Memory Sub-system Power", "PowerConsumedWatts": 123})
    return made


def lenovo_multi_node(node: NodeState) -> Documents:
    """One of the nodes of an enclosure: the supplies are the enclosure's, and none is here."""
    made = lenovo(node)
    del made[f"{CHASSIS}/Power"]["PowerSupplies"], made[f"{CHASSIS}/Power"]["Redundancy"]
    return made


def fujitsu(node: NodeState) -> Documents:
    made = old_schema(node)
    made["/redfish/v1/"]["Vendor"] = "Fujitsu"
    power = made[f"{CHASSIS}/Power"]
    power["PowerControl"][0]["PowerConsumedWatts"] = None
    power["Oem"] = {"ts_fujitsu": {"ChassisPowerConsumption": {"CurrentPowerConsumptionW": node.node_w}}}
    return made


def inspur(node: NodeState) -> Documents:
    made = old_schema(node)
    made["/redfish/v1/"]["Vendor"] = "Inspur"
    power = made[f"{CHASSIS}/Power"]
    del power["PowerControl"]
    power["Oem"] = {"Public": {"TotalPower": node.node_w}}
    return made


def huawei(node: NodeState) -> Documents:
    made = old_schema(node)
    made["/redfish/v1/"]["Vendor"] = "Huawei"
    power = made[f"{CHASSIS}/Power"]
    power["PowerControl"][0] |= {"PowerConsumedWatts": None, "Oem": {"Huawei": {"PowerConsumedWatts": node.node_w}}}
    for entry, psu in zip(power["PowerSupplies"], node.psus, strict=True):
        for gone in ("PowerInputWatts", "PowerOutputWatts", "LastPowerOutputWatts"):
            entry[gone] = None
        entry["Oem"] = {"Huawei": {"PowerInputWatts": psu.input_w, "PowerOutputWatts": psu.output_w}}
    return made


def gigabyte(node: NodeState) -> Documents:
    """AMI: supplies without a status."""
    made = old_schema(node)
    made["/redfish/v1/"]["Vendor"] = "GIGABYTE"
    for entry in made[f"{CHASSIS}/Power"]["PowerSupplies"]:
        del entry["Status"]
    return made


def hgx(node: NodeState) -> Documents:
    """A GPU baseboard whose own controller is passed on: many chassis with powers of their own, none of them the node's."""
    made = both_schemas(node)
    names = ["HGX_Baseboard_0", "HGX_GPU_SXM_1", "HGX_GPU_SXM_2", "HGX_NVSwitch_0", "HGX_ERoT_BMC_0"]
    paths = [f"/redfish/v1/Chassis/{name}" for name in names]
    made["/redfish/v1/Chassis"] = collection("/redfish/v1/Chassis", [*paths[:3], CHASSIS, *paths[3:]])
    for number, path in enumerate(paths):
        made[path] = {
            "@odata.id": path,
            "ChassisType": "Module",
            "EnvironmentMetrics": ref(f"{path}/EnvironmentMetrics"),
            "ThermalSubsystem": ref(f"{path}/ThermalSubsystem"),
        }
        made[f"{path}/EnvironmentMetrics"] = {"PowerWatts": {"Reading": 511.0 + number}}
        made[f"{path}/ThermalSubsystem"] = {"ThermalMetrics": ref(f"{path}/ThermalSubsystem/ThermalMetrics")}
        made[f"{path}/ThermalSubsystem/ThermalMetrics"] = {
            "TemperatureReadingsCelsius": [{"DeviceName": "Inlet", "Reading": 50.0 + number}]
        }
    return made


PROFILES: dict[str, Callable[[NodeState], Documents]] = {
    "new": new_schema,
    "old": old_schema,
    "both": both_schemas,
    "dell": dell,
    "hpe": hpe,
    "ilo4": ilo4,
    "supermicro": supermicro,
    "lenovo": lenovo,
    "lenovo_multi_node": lenovo_multi_node,
    "fujitsu": fujitsu,
    "inspur": inspur,
    "huawei": huawei,
    "gigabyte": gigabyte,
    "hgx": hgx,
}
