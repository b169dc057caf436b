"""The board's physics reproduces what was measured and published, within stated tolerances."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from agent.simulator import roofline
from agent.simulator.conditions import GpuConditions
from agent.simulator.gpu import BRAKE, HW_SLOWDOWN, POWER_CAP, SW_THERMAL, Gpu
from agent.simulator.sku import H100_SXM, SKUS, Sku

SLICE_S = 0.2


@dataclass(frozen=True)
class Held:
    power_w: float
    clock_mhz: float
    step_s: float
    die_c: float
    mask: int


def average_part(sku: Sku = H100_SXM) -> Gpu:
    gpu = Gpu(0, "GPU-test", sku, 0.0, Random(1))
    gpu.leak = gpu.dynamic = gpu.resistance = 1.0
    return gpu


def drive(gpu: Gpu, batch: int, prefill: int = 0) -> float:
    """Put the load of one step of an 8B model on the board; the step's seconds."""
    cost = roofline.cost(roofline.CHAT_8B, gpu.sku, 1)
    memory = roofline.memory_s(cost, batch, batch * 1000)
    compute = roofline.compute_s(cost, batch, prefill) * gpu.sku.clock_max_mhz / gpu.clock_mhz
    kernel = roofline.kernel_s(memory, compute)
    step = kernel + roofline.CHAT_8B.overhead_s
    gpu.busy = 1.0
    gpu.mem_share, gpu.compute_share = memory / step, compute / step
    gpu.activity = roofline.activity(kernel / step, gpu.compute_share)
    return step


def hold(
    batch: int,
    *,
    inlet_c: float = 28,
    resistance: float = 0.040,
    brake: bool = False,
    prefill: int = 0,
    gpu: Gpu | None = None,
) -> Held:
    """The board after ten minutes of one load: means of the last three."""
    gpu = gpu or average_part()
    slices, kept = int(600 / SLICE_S), int(180 / SLICE_S)
    power = clock = step = 0.0
    for i in range(slices):
        now = drive(gpu, batch, prefill)
        gpu.advance(SLICE_S, inlet_c, resistance, brake, GpuConditions())
        if i >= slices - kept:
            power, clock, step = power + gpu.power_w, clock + gpu.clock_mhz, step + now
    return Held(power / kept, clock / kept, step / kept, gpu.die_c, gpu.mask)


@pytest.mark.parametrize(("batch", "watts"), [(8, 486), (32, 560), (64, 610), (128, 669), (256, 691), (512, 688)])
def test_decode_power_is_within_three_percent_of_the_measured_board(batch: int, watts: float) -> None:
    assert hold(batch).power_w == pytest.approx(watts, rel=0.03)


@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(8, 7.3), (32, 8.9), (64, 11.5), (128, 16.5), (256, 26), (512, 47)]
)
def test_decode_step_is_within_six_percent_of_the_measured_inter_token_latency(batch: int, milliseconds: float) -> None:
    assert hold(batch).step_s * 1e3 == pytest.approx(milliseconds, rel=0.06)


def slowdown_pct(healthy: Held, wrong: Held) -> float:
    return 100 * (healthy.step_s / wrong.step_s - 1)


def test_blocked_airflow_with_a_hot_inlet_costs_29_percent_at_1200_mhz_and_377_w() -> None:
    wrong = hold(256, inlet_c=45, resistance=0.040 * 2.2)
    assert slowdown_pct(hold(256), wrong) == pytest.approx(-29, abs=3)
    assert wrong.clock_mhz == pytest.approx(1200, abs=40)
    assert wrong.power_w == pytest.approx(377, rel=0.03)
    assert wrong.die_c == pytest.approx(H100_SXM.temp_limit_c, abs=2)
    assert wrong.mask == SW_THERMAL


def test_blocked_airflow_alone_costs_15_percent_at_1500_mhz_and_498_w() -> None:
    wrong = hold(256, inlet_c=32, resistance=0.040 * 2.2)
    assert slowdown_pct(hold(256), wrong) == pytest.approx(-15, abs=3)
    assert wrong.clock_mhz == pytest.approx(1500, abs=40)
    assert wrong.power_w == pytest.approx(498, rel=0.03)


@pytest.mark.parametrize(("batch", "prefill", "loss"), [(256, 0, -43), (8, 1024, -49), (64, 0, -29), (8, 0, -8)])
def test_power_brake_costs_what_the_mix_of_work_says(batch: int, prefill: int, loss: float) -> None:
    wrong = hold(batch, prefill=prefill, brake=True)
    assert slowdown_pct(hold(batch, prefill=prefill), wrong) == pytest.approx(loss, abs=3)
    assert wrong.mask == BRAKE | HW_SLOWDOWN
    assert wrong.die_c < 60


def test_full_load_settles_at_71_c_in_air_and_47_c_on_a_cold_plate() -> None:
    assert hold(256).die_c == pytest.approx(71, abs=1.5)
    liquid = SKUS["h100-sxm-liquid"]
    cold = hold(256, inlet_c=30, resistance=liquid.sink_to_air_k_w, gpu=average_part(liquid))
    assert cold.die_c == pytest.approx(47, abs=1.5)


@pytest.mark.parametrize("limit", [300.0, 400.0, 550.0, 650.0])
def test_power_stays_at_its_limit_and_says_so(limit: float) -> None:
    gpu = average_part()
    gpu.limit_w = limit
    held = hold(256, gpu=gpu)
    assert limit - 8 < held.power_w <= limit + 1
    assert held.mask == POWER_CAP


def test_a_lower_power_limit_never_gives_a_higher_clock_or_a_shorter_step() -> None:
    clocks, steps = [], []
    for limit in (700.0, 600.0, 500.0, 400.0, 300.0):
        gpu = average_part()
        gpu.limit_w = limit
        held = hold(256, gpu=gpu)
        clocks.append(held.clock_mhz)
        steps.append(held.step_s)
    assert clocks == sorted(clocks, reverse=True)
    assert steps == sorted(steps)


def test_heat_costs_clock_at_a_power_limit_long_before_any_thermal_bit() -> None:
    gpu = average_part()
    gpu.limit_w = 500
    cool = hold(256, gpu=gpu, inlet_c=20)
    gpu = average_part()
    gpu.limit_w = 500
    warm = hold(256, gpu=gpu, inlet_c=40)
    assert warm.mask == cool.mask == POWER_CAP
    per_degree = (warm.clock_mhz / cool.clock_mhz - 1) / (warm.die_c - cool.die_c) * 100
    assert -0.5 < per_degree < -0.02


def test_an_idle_board_draws_what_idle_boards_draw() -> None:
    gpu = average_part()
    for _ in range(3000):
        gpu.advance(SLICE_S, 24, 0.040, False, GpuConditions())
    assert 60 < gpu.power_w < 95
    assert gpu.clock_mhz == H100_SXM.clock_idle_mhz
    assert gpu.mask == 1


def test_heat_beyond_what_stepping_down_can_save_trips_the_hardware_slowdown() -> None:
    gpu = average_part()
    seen = 0
    for _ in range(1500):
        drive(gpu, 256)
        gpu.advance(SLICE_S, 60, 0.5, False, GpuConditions())
        seen |= gpu.mask
    assert seen & 0x40 and seen & 0x08
    assert gpu.throttled_s[0x40] > 0


def test_energy_is_the_integral_of_power() -> None:
    gpu = average_part()
    joules = 0.0
    for i in range(600):
        drive(gpu, 64 if i % 50 < 30 else 8)
        gpu.advance(SLICE_S, 28, 0.04, False, GpuConditions())
        if i % 5 == 4:
            joules += float(gpu.fields(700, 1, GpuConditions())["power_w"]) * 1.0
    assert gpu.energy_j == pytest.approx(joules, rel=1e-5)


@pytest.mark.parametrize("name", sorted(SKUS))
def test_every_board_of_the_table_runs_below_its_limits_in_good_air(name: str) -> None:
    sku = SKUS[name]
    gpu = average_part(sku)
    held = hold(64, gpu=gpu, inlet_c=24, resistance=sku.sink_to_air_k_w)
    assert held.power_w <= sku.power_limit_w + 1
    assert held.power_w > 0.6 * sku.power_limit_w
    assert held.die_c < sku.temp_limit_c - 3
    assert held.mask in (0, POWER_CAP)


def test_a_board_without_memory_temperature_leaves_the_field_out() -> None:
    assert "mem_temp_c" not in average_part(SKUS["l40s"]).fields(350, 1, GpuConditions())
    assert "mem_temp_c" in average_part().fields(700, 1, GpuConditions())


def test_a_lost_board_says_only_that() -> None:
    gpu = average_part()
    gpu.advance(SLICE_S, 24, 0.04, False, replace_lost())
    assert gpu.fields(700, 1, GpuConditions()) == {"state": 1}


def replace_lost() -> GpuConditions:
    return replace(GpuConditions(), lost=True)
