"""Supplies, air and circuits of simulated nodes behave as their physics says."""

from __future__ import annotations

from random import Random

import pytest

from agent.simulator.cooling import Cooling
from agent.simulator.fleet import Fleet
from agent.simulator.settings import SimulatorSettings
from agent.simulator.sku import H100_SXM
from agent.simulator.supply import COUNT, Supply, efficiency

SMALL = SimulatorSettings(nodes=4, gpus_per_node=8, history_s=0)


@pytest.mark.parametrize(("share", "percent"), [(0.1, 90), (0.2, 94), (0.5, 96), (1.0, 91), (1.3, 91)])
def test_supplies_are_as_efficient_as_their_rating_says(share: float, percent: float) -> None:
    assert 100 * efficiency(share) == pytest.approx(percent)


def test_input_power_is_output_power_over_efficiency() -> None:
    supply = Supply(8000, Random(1))
    supply.carry(7000, 0)
    assert supply.input_w == pytest.approx(7000 / efficiency(7000 / (COUNT * supply.capacity_w)))
    assert supply.power_fields(None)["redundancy"] == 2


def test_what_survives_a_loss_is_one_and_a_half_times_the_design_load() -> None:
    for node in Fleet(SMALL).nodes:
        design = 8 * H100_SXM.power_limit_w
        surviving = node.supply.capacity_w * (COUNT - 2)
        assert surviving >= 1.5 * design


def test_the_brake_holds_until_redundancy_is_back_though_the_load_it_caused_would_fit() -> None:
    supply = Supply(8000, Random(1))
    supply.carry(7000, 2)
    assert not supply.braking
    assert supply.power_fields(None)["redundancy"] == 1
    supply.carry(7000, 4)
    assert supply.braking
    assert supply.power_fields(None)["redundancy"] == 0
    supply.carry(4000, 4)  # braked: it would fit now
    assert supply.braking
    supply.carry(4000, 1)
    assert not supply.braking


def test_headroom_with_one_lost_is_smaller_and_may_be_negative() -> None:
    supply = Supply(8000, Random(1))
    supply.carry(7000, 4)
    fields = supply.power_fields(None)
    assert float(fields["headroom_redundant_pct"]) < float(fields["headroom_pct"])
    assert float(fields["headroom_redundant_pct"]) < 0
    assert fields["capacity_w"] == 2 * supply.capacity_w


def test_a_lost_supply_delivers_nothing_and_says_so() -> None:
    supply = Supply(8000, Random(1))
    supply.carry(7000, 1)
    fields = [supply.psu_fields(i) for i in range(COUNT)]
    assert [f["ok"] for f in fields] == [1, 1, 1, 1, 1, 0]
    assert fields[-1]["output_w"] == fields[-1]["voltage_v"] == 0
    assert sum(float(f["output_w"]) for f in fields) == pytest.approx(7000, rel=0.01)


def settled(watts: float, block: float = 1.0, lost: float = 0.0, hottest_c: float = 65) -> Cooling:
    cooling = Cooling()
    for _ in range(600):
        cooling.advance(0.5, 24, hottest_c, watts, block, lost)
    return cooling


def test_exhaust_is_warmer_by_power_over_airflow() -> None:
    light, heavy = settled(4000), settled(8000)
    rise = heavy.exhaust_c - heavy.inlet_c
    assert 8 < rise < 30  # 15 to 20 K at a busy node's airflow
    assert rise == pytest.approx(2 * (light.exhaust_c - light.inlet_c), rel=0.01)


def test_hot_boards_speed_the_fans_up_and_lower_the_resistance() -> None:
    cool, hot = settled(7000, hottest_c=55), settled(7000, hottest_c=85)
    assert hot.speed == pytest.approx(1.0, abs=0.01)
    assert cool.speed < 0.5
    assert hot.resistance(0.04) < cool.resistance(0.04)
    assert hot.fan_w > 5 * cool.fan_w  # with the cube of the speed


def test_blocked_air_and_standing_fans_raise_the_resistance() -> None:
    clean = settled(7000).resistance(0.04)
    assert settled(7000, block=3).resistance(0.04) > 2 * clean
    assert settled(7000, lost=0.9).resistance(0.04) > 2 * clean
    assert settled(7000, lost=0.2).fields()["fan_min_rpm"] == 0


def test_the_top_of_a_rack_breathes_warmer_air() -> None:
    fleet = Fleet(SMALL)
    fleet.step(60)
    inlets = [node.cooling.inlet_c for node in fleet.nodes]
    assert inlets == sorted(inlets)
    assert 0.1 < inlets[-1] - inlets[0] < 3


def test_the_rear_boards_are_warmer_than_the_front_ones() -> None:
    fleet = Fleet(SMALL)
    fleet.step(60)
    for node in fleet.nodes:
        front, rear = node.gpus[:4], node.gpus[4:]
        assert sum(g.die_c for g in rear) / 4 > sum(g.die_c for g in front) / 4 + 1


def test_two_nodes_share_a_circuit_that_carries_them_within_its_rating() -> None:
    fleet = Fleet(SMALL)
    circuits = [s for s in fleet.step(5) if s.measurement == "circuit"]
    assert [s.tags["circuit"] for s in circuits] == ["sim-c1", "sim-c2"]
    for sample in circuits:
        assert 40 < float(sample.fields["load_pct"]) < 100


def test_boards_of_one_model_differ_and_the_group_steps_at_its_slowest() -> None:
    fleet = Fleet(SimulatorSettings(nodes=1, gpus_per_node=4, history_s=0))
    node = fleet.nodes[0]
    assert len({gpu.leak for gpu in node.gpus}) == 4
    fleet.step(30)
    before = node.engines[0].step_s
    node.wrong.gpus[1].clock_limit_mhz = 990
    fleet.step(5)
    slow, quick = node.gpus[1], node.gpus[0]
    assert node.engines[0].step_s > 1.3 * before
    assert quick.clock_mhz > 1.9 * slow.clock_mhz
    assert quick.power_w > slow.power_w
    assert quick.busy == slow.busy == 1.0


def test_a_device_keeps_its_tags_from_second_to_second() -> None:
    fleet = Fleet(SMALL)

    def tags() -> dict[tuple[str, ...], int]:
        samples = [sample for sample in fleet.step(1.0) if sample.measurement in ("gpu", "engine", "rank", "host")]
        return {(sample.measurement, *sorted(sample.tags.values())): id(sample.tags) for sample in samples}

    first = tags()
    assert {key[0] for key in first} == {"gpu", "engine", "rank", "host"}
    assert tags() == first
