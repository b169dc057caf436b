"""Headroom and redundancy, against sums worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.power import headroom
from agent.power.headroom import DEGRADED, FULL, LOST, power_fields
from agent.power.reading import BmcReading, Supply
from telemetry.catalogue import check

# Four supplies of an eight-GPU node: 3000 W each, of which the third is on low line and gives 1500 W.
OUTPUTS = (1400.0, 1350.0, 700.0, 1450.0)
SUPPLIES = tuple(
    Supply(f"PSU{i}", True, output * 1.06, output, capacity, 230.0 + i, 0.943)
    for i, (output, capacity) in enumerate(zip(OUTPUTS, (3000.0, 3000.0, 1500.0, 3000.0), strict=True), 1)
)
LOAD_W = 4900.0
NODE = BmcReading(supplies=SUPPLIES, node_w=5300.0)


def of(reading: BmcReading, redundancy: str = "N+1", feed_b: tuple[str, ...] = ()) -> dict[str, object]:
    return dict(power_fields(reading, redundancy, feed_b))


def with_supplies(*supplies: Supply) -> BmcReading:
    return replace(NODE, supplies=supplies)


def test_four_supplies_that_share_the_load() -> None:
    # 1 - 4900/10500 and 1 - 4900/(10500-3000)
    assert of(NODE) == {
        "node_w": 5300.0,
        "capacity_w": 10500.0,
        "headroom_pct": pytest.approx(53.3333, abs=1e-3),
        "headroom_redundant_pct": pytest.approx(34.6667, abs=1e-3),
        "redundancy": FULL,
    }


def test_two_spares_lose_the_two_largest() -> None:
    fields = of(NODE, "N+2")  # 1 - 4900/4500
    assert fields["headroom_redundant_pct"] == pytest.approx(-8.8889, abs=1e-3)
    assert fields["redundancy"] == DEGRADED  # one may still fail: 7500 W carry it


@pytest.mark.parametrize(
    ("feed_b", "redundant_pct", "state"),
    [
        (("PSU2", "PSU4"), 100 * (1 - 4900 / 4500), LOST),  # feed A: 3000 + 1500
        (("PSU3",), 100 * (1 - 4900 / 1500), LOST),
        (("PSU9",), None, None),  # no such supply: not known
    ],
)
def test_of_two_feeds_the_smaller_one_counts(
    feed_b: tuple[str, ...], redundant_pct: float | None, state: int | None
) -> None:
    fields = of(NODE, "A/B", feed_b)
    assert fields.get("headroom_redundant_pct") == (redundant_pct and pytest.approx(redundant_pct))
    assert fields.get("redundancy") == state


def test_either_feed_alone_carries_a_light_load() -> None:
    light = with_supplies(*(replace(supply, output_w=500.0) for supply in SUPPLIES))  # 2000 W
    fields = of(light, "A/B", ("PSU2", "PSU4"))
    assert fields["headroom_redundant_pct"] == pytest.approx(100 * (1 - 2000 / 4500))
    assert fields["redundancy"] == FULL
    hurt = with_supplies(replace(SUPPLIES[0], ok=False, output_w=0.0), *(light.supplies or ())[1:])
    assert of(hurt, "A/B", ("PSU2", "PSU4"))["redundancy"] == DEGRADED  # the 1500 W of feed A just do
    worse = replace(hurt, supplies=(*(hurt.supplies or ())[:3], replace(SUPPLIES[3], output_w=501.0)))
    assert of(worse, "A/B", ("PSU2", "PSU4"))["redundancy"] == LOST


def test_a_failed_supply_gives_no_capacity_and_takes_the_spare() -> None:
    failed = with_supplies(*SUPPLIES[:3], replace(SUPPLIES[3], ok=False, output_w=0.0, input_w=0.0, voltage_v=0.0))
    fields = of(failed)  # load 3450 over 7500, and over 4500 when one more goes
    assert fields["capacity_w"] == 7500.0
    assert fields["headroom_pct"] == pytest.approx(54.0)
    assert fields["headroom_redundant_pct"] == pytest.approx(23.3333, abs=1e-3)
    assert fields["redundancy"] == LOST  # N+1 has no spare left
    assert of(failed, "N+2")["redundancy"] == DEGRADED


def test_the_load_is_what_supplies_give_else_what_they_take_times_efficiency_else_the_nodes_power() -> None:
    from_input = with_supplies(*(replace(supply, output_w=None, input_w=1000.0) for supply in SUPPLIES))
    assert of(from_input)["headroom_pct"] == pytest.approx(100 * (1 - 4000 * 0.943 / 10500))
    unrated = with_supplies(*(replace(supply, output_w=None, input_w=1000.0, efficiency=None) for supply in SUPPLIES))
    assert of(unrated)["headroom_pct"] == pytest.approx(100 * (1 - 4000 * 0.94 / 10500))
    from_node = with_supplies(*(replace(supply, output_w=None, input_w=None) for supply in SUPPLIES))
    assert of(from_node)["headroom_pct"] == pytest.approx(100 * (1 - 5300 * 0.94 / 10500))
    one_silent = with_supplies(replace(SUPPLIES[0], output_w=None, input_w=None), *SUPPLIES[1:])
    assert of(one_silent)["headroom_pct"] == pytest.approx(100 * (1 - 5300 * 0.94 / 10500))
    silent = replace(from_node, node_w=None)
    assert "headroom_pct" not in of(silent)
    assert of(silent)["capacity_w"] == 10500.0


def test_a_supply_that_stands_by_counts_as_zero_and_all_at_zero_as_not_read() -> None:
    standby = with_supplies(replace(SUPPLIES[0], output_w=0.0), *SUPPLIES[1:])
    assert of(standby)["headroom_pct"] == pytest.approx(100 * (1 - 3500 / 10500))
    none = with_supplies(*(replace(supply, output_w=0.0) for supply in SUPPLIES))
    assert of(none)["headroom_pct"] == pytest.approx(100 * (1 - 5300 * 0.94 / 10500))


def test_node_power_is_the_sum_of_inputs_where_the_bmc_names_none() -> None:
    assert of(replace(NODE, node_w=None))["node_w"] == pytest.approx(LOAD_W * 1.06)


@pytest.mark.parametrize("supplies", [None, ()])
def test_without_supplies_nothing_is_said_of_capacity(supplies: tuple[Supply, ...] | None) -> None:
    assert of(BmcReading(supplies=supplies, node_w=812.0, cap_w=900.0)) == {"node_w": 812.0, "cap_w": 900.0}
    assert of(BmcReading(supplies=supplies)) == {}


def test_an_unknown_capacity_leaves_headroom_unknown_and_redundancy_by_count() -> None:
    unrated = with_supplies(replace(SUPPLIES[0], capacity_w=None), *SUPPLIES[1:])
    assert of(unrated) == {"node_w": 5300.0, "redundancy": FULL}


def test_what_is_absent_by_design_is_absent() -> None:
    assert "redundancy" not in of(NODE, "none")
    assert "headroom_redundant_pct" not in of(NODE, "none")
    assert of(replace(NODE, spares=0, redundancy=FULL), "auto").keys() == {"node_w", "capacity_w", "headroom_pct"}
    alone = with_supplies(SUPPLIES[0])
    assert of(alone, "auto").keys() == {"node_w", "capacity_w", "headroom_pct"}


def test_auto_follows_the_bmc_and_where_it_is_silent_tells_what_one_loss_would_mean() -> None:
    said = replace(NODE, spares=2, redundancy=FULL)
    assert of(said, "auto")["headroom_redundant_pct"] == pytest.approx(-8.8889, abs=1e-3)
    assert of(said, "auto")["redundancy"] == FULL  # its own word
    assert of(replace(said, redundancy=None), "auto")["redundancy"] == DEGRADED
    failed = (replace(SUPPLIES[0], ok=False), *SUPPLIES[1:])
    assert of(replace(said, supplies=failed), "auto")["redundancy"] == DEGRADED  # it has not noticed yet
    assert of(replace(said, supplies=failed, redundancy=LOST), "auto")["redundancy"] == LOST
    assert of(said, "N+1")["headroom_redundant_pct"] == pytest.approx(34.6667, abs=1e-3)
    assert of(replace(said, redundancy=LOST), "N+1")["redundancy"] == FULL  # the setting is there to correct the BMC
    assert of(NODE, "auto")["headroom_redundant_pct"] == pytest.approx(34.6667, abs=1e-3)
    assert "redundancy" not in of(NODE, "auto")


def test_a_supply_of_unknown_state_carries_when_power_flows_and_else_leaves_the_sum_unknown() -> None:
    flows = with_supplies(*(replace(supply, ok=None) for supply in SUPPLIES))
    assert of(flows) == of(NODE)
    dark = with_supplies(Supply("PSU1", capacity_w=3000.0), *SUPPLIES[1:])
    assert of(dark) == {"node_w": 5300.0}


def test_the_samples_hold_what_is_known_and_the_catalogue_knows_them() -> None:
    reading = replace(
        NODE, inlet_c=23.5, exhaust_c=41.25, fan_min_rpm=8100.0, fan_pct=62.0, coolant_c=31.0, leak=False, cap_w=9000.0
    )
    made = [check(sample) for sample in headroom.samples(reading, "N+1", (), {"node": "n7", "rack": "r2"}, 17)]
    assert {sample.time_ns for sample in made} == {17}
    assert [(sample.measurement, sample.tags.get("psu")) for sample in made] == [
        *(("psu", f"PSU{i}") for i in range(1, 5)),
        ("power", None),
        ("thermal", None),
    ]
    assert made[1].tags == {"node": "n7", "rack": "r2", "psu": "PSU2"}
    assert made[2].fields == {"input_w": 742.0, "output_w": 700.0, "capacity_w": 1500.0, "voltage_v": 233.0, "ok": 1}
    assert made[4].fields["cap_w"] == 9000.0
    assert made[5].fields == {
        "inlet_c": 23.5,
        "exhaust_c": 41.25,
        "fan_min_rpm": 8100.0,
        "fan_pct": 62.0,
        "coolant_c": 31.0,
        "leak": 0,
    }
    assert headroom.samples(BmcReading(), "auto", (), {"node": "n7"}, 17) == []
