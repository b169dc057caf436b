"""What is read from either schema and from each vendor's, against the state that the double shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.power.headroom import DEGRADED, FULL, LOST, power_fields
from agent.power.plausible import plausible
from agent.power.reading import BmcReading
from agent.power.redfish.node_power import Redundancy, redundancy_of
from tests.agent.power.conftest import Read, Serve
from tests.doubles.redfish.documents import CHASSIS, PROFILES, collection, ref
from tests.doubles.redfish.server import status
from tests.doubles.redfish.state import NodeState

NODE = NodeState()


def supplies_of(reading: BmcReading) -> list[tuple[object, ...]]:
    return [
        (s.name, s.ok, s.input_w, s.output_w, s.capacity_w, s.voltage_v, s.efficiency) for s in reading.supplies or ()
    ]


EXPECTED = [
    (p.name, True, p.input_w, p.output_w, p.capacity_w, p.voltage_v, pytest.approx(p.efficiency)) for p in NODE.psus
]


def test_everything_that_the_new_schema_tells(serve: Serve, reader: Read) -> None:
    reading = reader(serve("new")).read()
    assert supplies_of(reading) == EXPECTED
    assert replace(reading, supplies=None) == BmcReading(
        spares=1,
        redundancy=FULL,
        node_w=3815.0,
        cap_w=5200.0,
        inlet_c=24.5,
        exhaust_c=47.25,
        fan_min_rpm=8870.0,
        fan_pct=61.0,
        coolant_c=33.5,
        leak=False,
    )


def test_everything_that_the_old_schema_tells(serve: Serve, reader: Read) -> None:
    reading = reader(serve("old")).read()
    assert supplies_of(reading) == EXPECTED
    assert replace(reading, supplies=None) == BmcReading(
        spares=1,
        redundancy=FULL,
        node_w=3815.0,
        cap_w=5200.0,
        inlet_c=24.5,
        exhaust_c=47.25,
        fan_min_rpm=8870.0,
    )


def test_where_both_are_there_the_new_one_is_read_and_the_old_one_left_alone(serve: Serve, reader: Read) -> None:
    bmc = serve("both")
    one = reader(bmc)
    assert one.read() == one.read()
    bmc.asked.clear()
    reading = one.read()
    assert supplies_of(reading) == EXPECTED and reading.leak is False
    assert not {f"{CHASSIS}/Power", f"{CHASSIS}/Thermal", CHASSIS, "/redfish/v1/Chassis"} & set(bmc.paths())


@pytest.mark.parametrize("missing", ["PowerSubsystem", "EnvironmentMetrics", "ThermalSubsystem"])
def test_a_part_of_the_new_schema_that_is_not_there_is_read_from_the_old(
    serve: Serve, reader: Read, missing: str
) -> None:
    bmc = serve("both")
    bmc.faults[f"{CHASSIS}/{missing}"] = status(404)
    reading = reader(bmc).read()
    assert supplies_of(reading) == EXPECTED
    assert (reading.node_w, reading.cap_w, reading.inlet_c, reading.fan_min_rpm) == (3815.0, 5200.0, 24.5, 8870.0)
    assert reading.problems == ()


@pytest.mark.parametrize("missing", ["Power", "Thermal"])
def test_a_part_of_the_old_schema_that_is_not_there_leaves_the_rest(serve: Serve, reader: Read, missing: str) -> None:
    bmc = serve("old")
    del bmc.documents[f"{CHASSIS}/{missing}"]
    reading = reader(bmc).read()
    if missing == "Power":
        assert (reading.supplies, reading.node_w, reading.inlet_c) == (None, None, 24.5)
    else:
        assert (reading.node_w, reading.inlet_c, reading.fan_min_rpm) == (3815.0, None, None)


@pytest.mark.parametrize("profile", ["new", "old"])
def test_on_low_line_a_supply_has_the_capacity_of_low_line(serve: Serve, reader: Read, profile: str) -> None:
    node = NodeState()
    node.psus[1].voltage_v = 117.0
    reading = reader(serve(profile, node)).read()
    assert [supply.capacity_w for supply in reading.supplies or ()] == [3000.0, 1450.0, 2900.0]


@pytest.mark.parametrize("profile", ["new", "old"])
@pytest.mark.parametrize(
    ("state", "health", "line", "voltage_v", "ok"),
    [
        ("Enabled", "Warning", "Normal", 230.0, True),
        ("StandbySpare", "OK", "Normal", 230.0, True),
        ("Enabled", "Critical", "Normal", 230.0, False),
        ("UnavailableOffline", "OK", "Normal", 230.0, False),
        ("Disabled", "OK", "Normal", 230.0, False),
        ("Enabled", "OK", "LossOfInput", 0.0, False),
    ],
)
def test_a_supply_is_in_order_when_enabled_healthy_and_with_line_power(
    serve: Serve, reader: Read, profile: str, state: str, health: str, line: str, voltage_v: float, ok: bool
) -> None:
    node = NodeState()
    node.psus[2].state, node.psus[2].health, node.psus[2].line, node.psus[2].voltage_v = state, health, line, voltage_v
    reading = reader(serve(profile, node)).read()
    assert [supply.ok for supply in reading.supplies or ()] == [True, True, ok]


@pytest.mark.parametrize("profile", ["new", "old"])
def test_an_absent_supply_is_not_there(serve: Serve, reader: Read, profile: str) -> None:
    node = NodeState()
    node.psus[0].state = "Absent"
    assert [s.name for s in reader(serve(profile, node)).read().supplies or ()] == ["PSU2", "PSU3"]


@pytest.mark.parametrize("profile", ["new", "old"])
def test_redundancy_is_the_groups_health(serve: Serve, reader: Read, profile: str) -> None:
    for health, state in (("OK", FULL), ("Warning", DEGRADED), ("Critical", LOST)):
        node = NodeState(redundancy_health=health, min_needed=1)
        reading = reader(serve(profile, node)).read()
        assert (reading.spares, reading.redundancy) == (2, state)


def test_redundancy_groups_of_all_kinds() -> None:
    def group(**fields: object) -> dict[str, object]:
        return {"Mode": "N+m", "MinNumNeeded": 3, "RedundancySet": [{}] * 4, "Status": {"Health": "OK"}, **fields}

    assert redundancy_of([group()], 9) == Redundancy(1, FULL)
    assert redundancy_of([group(RedundancySet=[])], 5) == Redundancy(2, FULL)  # of those that are there
    assert redundancy_of([group(Mode="NotRedundant")], 4) == Redundancy(0, None)
    assert redundancy_of([group(Status={"State": "Disabled"})], 4) == Redundancy(0, None)
    assert redundancy_of([group(MinNumNeeded=None)], 4) == Redundancy(None, FULL)
    assert redundancy_of([group(MinNumNeeded=40)], 4) == Redundancy(None, FULL)
    assert redundancy_of([group(MinNumNeeded=0)], 4) == Redundancy(3, FULL)
    assert redundancy_of([group(MinNumNeeded=4)], 4) == Redundancy(0, None)
    assert redundancy_of([group(), group(MinNumNeeded=2, Status={"Health": "Critical"})], 4) == Redundancy(1, LOST)
    assert redundancy_of([], 4) == Redundancy(None, None)


def test_dell_gives_a_rating_for_input_a_fraction_for_efficiency_and_a_number_for_no_cap(
    serve: Serve, reader: Read
) -> None:
    reading = reader(serve("dell")).read()
    assert supplies_of(reading) == [
        ("PS1 Status", True, None, 1210.0, 3000.0, 229.5, 0.94),
        ("PS2 Status", True, None, 1180.0, 3100.0, 231.25, 0.93),
        ("PS3 Status", True, 1340.0, 1195.0, None, 230.75, 0.95),  # within 0.85 to 1.2 of 1195/0.95
    ]
    assert (reading.node_w, reading.cap_w, reading.spares, reading.redundancy) == (3815.0, None, None, None)
    assert (reading.inlet_c, reading.exhaust_c) == (24.5, 47.25)
    assert "capacity_w" not in power_fields(plausible(reading), "auto", ())


def test_dell_without_output_has_no_input_either(serve: Serve, reader: Read) -> None:
    documents = PROFILES["dell"](NODE)
    for entry in documents[f"{CHASSIS}/Power"]["PowerSupplies"]:
        entry["PowerOutputWatts"] = None
    reading = reader(serve(documents=documents)).read()
    assert [(supply.input_w, supply.output_w) for supply in reading.supplies or ()] == [(None, None)] * 3


def test_hpe_tells_supplies_apart_by_bay_and_a_zero_by_its_average(serve: Serve, reader: Read) -> None:
    reading = reader(serve("hpe")).read()
    assert [(s.name, s.ok, s.output_w) for s in reading.supplies or ()] == [
        ("HpeServerPowerSupply 1", True, 1214.0),  # the average, as the last value is 0
        ("HpeServerPowerSupply 2", True, 0.0),  # stands by
        ("HpeServerPowerSupply 3", True, 1195.0),
    ]
    assert (reading.spares, reading.redundancy) == (1, FULL)  # "3 of 3 needed", of a group that fails over
    assert power_fields(reading, "auto", ())["headroom_pct"] == pytest.approx(100 * (1 - 2409 / 9000))


def test_hpe_keeps_a_supplys_name_when_another_is_pulled(serve: Serve, reader: Read) -> None:
    documents = PROFILES["hpe"](NODE)
    del documents[f"{CHASSIS}/Power"]["PowerSupplies"][:2]
    assert [s.name for s in reader(serve(documents=documents)).read().supplies or ()] == ["HpeServerPowerSupply 3"]


def test_ilo4_lists_an_empty_bay_and_fans_in_words_of_its_own(serve: Serve, reader: Read) -> None:
    reading = reader(serve("ilo4")).read()
    assert [(s.name, s.output_w) for s in reading.supplies or ()] == [
        (f"HpeServerPowerSupply {bay}", 1000.0 + bay) for bay in (1, 2, 3)
    ]
    assert (reading.fan_pct, reading.fan_min_rpm) == (61.0, None)


def test_supermicro_writes_numbers_as_strings(serve: Serve, reader: Read) -> None:
    reading = reader(serve("supermicro")).read()
    assert supplies_of(reading) == [(*row[:6], None) for row in EXPECTED]
    assert (reading.node_w, reading.cap_w, reading.inlet_c) == (3815.0, None, 24.5)


def test_lenovo_lists_parts_besides_the_node(serve: Serve, reader: Read) -> None:
    reading = reader(serve("lenovo")).read()
    assert (reading.node_w, reading.cap_w) == (3815.0, 5200.0)


def test_a_node_of_an_enclosure_has_no_supplies_of_its_own(serve: Serve, reader: Read) -> None:
    reading = reader(serve("lenovo_multi_node")).read()
    assert (reading.supplies, reading.node_w, reading.inlet_c) == ((), 3815.0, 24.5)
    assert power_fields(reading, "auto", ()) == {"node_w": 3815.0, "cap_w": 5200.0}


@pytest.mark.parametrize("profile", ["fujitsu", "inspur", "huawei"])
def test_node_power_that_stands_only_under_oem_is_found(serve: Serve, reader: Read, profile: str) -> None:
    reading = reader(serve(profile)).read()
    assert reading.node_w == 3815.0
    assert supplies_of(reading) == EXPECTED


def test_gigabytes_supplies_without_status_carry_when_power_flows(serve: Serve, reader: Read) -> None:
    reading = reader(serve("gigabyte")).read()
    assert [supply.ok for supply in reading.supplies or ()] == [None, None, None]
    assert power_fields(reading, "auto", ())["capacity_w"] == 9000.0


def test_a_gpu_baseboards_own_powers_are_not_the_nodes(serve: Serve, reader: Read) -> None:
    reading = reader(serve("hgx")).read()
    assert (reading.node_w, reading.inlet_c) == (3815.0, 24.5)
    assert supplies_of(reading) == EXPECTED


def test_supplies_of_several_chassis_come_together_and_each_once(serve: Serve, reader: Read) -> None:
    documents = PROFILES["new"](NODE)
    other = "/redfish/v1/Chassis/PowerShelf"
    documents["/redfish/v1/Chassis"] = collection("/redfish/v1/Chassis", [CHASSIS, other, CHASSIS])
    documents[other] = {
        "@odata.id": other,
        "ChassisType": "Enclosure",
        "PowerSubsystem": ref(f"{other}/PowerSubsystem"),
    }
    documents[f"{other}/PowerSubsystem"] = {"PowerSupplies": ref(f"{other}/PowerSupplies")}
    shared = f"{CHASSIS}/PowerSubsystem/PowerSupplies/0"
    documents[f"{other}/PowerSupplies"] = collection(f"{other}/PowerSupplies", [shared, shared, f"{other}/own"])
    documents[f"{other}/own"] = {"@odata.id": f"{other}/own", "Name": "Shelf 1", "Status": {"State": "Enabled"}}
    reading = reader(serve(documents=documents)).read()
    assert [supply.name for supply in reading.supplies or ()] == ["PSU1", "PSU2", "PSU3", "Shelf 1"]


@pytest.mark.parametrize("word", ["null", "NaN", '"N/A"', "true", "[]", '{"Reading": {}}', "-1e999", '""', '"12 W"'])
def test_what_is_no_number_is_absent(serve: Serve, reader: Read, word: str) -> None:
    bmc = serve("new")
    metrics = f'{{"PowerWatts": {{"Reading": {word}}}, "PowerLimitWatts": {{"SetPoint": {word}}}}}'
    bmc.faults[f"{CHASSIS}/EnvironmentMetrics"] = lambda bmc: type(status(200)(bmc))(body=metrics.encode())
    reading = reader(bmc).read()
    assert (reading.node_w, reading.cap_w) == (None, None)


def test_temperatures_without_a_summary_are_told_by_place_or_by_name(serve: Serve, reader: Read) -> None:
    bmc = serve("new")
    sensors = "/redfish/v1/Chassis/1/Sensors/temperature_"
    bmc.documents[f"{CHASSIS}/ThermalSubsystem/ThermalMetrics"] = {
        "TemperatureReadingsCelsius": [
            {"DataSourceUri": f"{sensors}psu0_inlet", "Reading": 41.0},
            {"DataSourceUri": f"{sensors}inlet", "Reading": 22.5},
            {"DeviceName": "Ambient front", "Reading": 23.5},
            {"DeviceName": "Board", "PhysicalContext": "Exhaust", "Reading": 44.5},
            {"DeviceName": "GPU 3 outlet", "Reading": 61.0},
            {"DeviceName": "Manifold", "PhysicalContext": "LiquidInlet", "Reading": 32.25},
        ]
    }
    reading = reader(bmc).read()
    assert (reading.inlet_c, reading.exhaust_c, reading.coolant_c) == (23.5, 44.5, 32.25)


def test_a_leak_is_a_leak(serve: Serve, reader: Read) -> None:
    assert reader(serve("new", NodeState(leak=True))).read().leak is True
