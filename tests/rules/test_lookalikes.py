"""Two causes that look alike are told apart by the one number in which they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rules.evidence import EngineEvidence, Evidence, GpuEvidence, HostEvidence, Observation, OutputEvidence
from rules.finding import Finding
from rules.observation.engines import observe_engine
from rules.observation.gpus import observe_gpus
from rules.observation.reader import Reader
from rules.observation.surroundings import observe_host
from rules.priors import Strength, priors
from rules.ranking import weigh
from rules.steps import WALK
from rules.steps.cold_start import cold_start
from rules.steps.contention import contention
from rules.steps.memory import memory_kv
from rules.steps.physical.heat import thermal
from rules.steps.requests import request_mix
from rules.steps.scheduling import scheduling
from rules.steps.storage import storage
from rules.thresholds import Bar
from rules.usual import PeerHabits, Usual
from rules.verdict import Cause, Status
from rules.window import SECOND, Event, Window
from telemetry.sample import Sample

AT = 10**18
BAR = Bar()


def seen(now: float, usual: float, lane: str = "engine.x") -> Observation:
    return Observation(now, lane, "", usual, usual * 0.9, usual * 1.1, "history")


ENGINE = EngineEvidence(
    "e0", 0.0,
    tokens_per_s=seen(700, 1500), running=seen(15, 30), waiting=Observation(40, "engine.requests_waiting", "", 0, 0, 1),
    kv_used=seen(98, 60), kv_per_token=seen(0.0038, 0.0015), prompt_len=seen(2400, 1150), prompt_share=seen(3.4, 1.9),
    prefix_hit=seen(0.64, 0.65), preemptions_per_s=seen(0.4, 0.01), output_len=seen(205, 203), uptime_s=9000.0,
)  # fmt: skip
STARVED = OutputEvidence("history", 700, 1500, 0.01, 0.47, 0.99, 1.0, 0.0, AT - 40 * SECOND)
SLOWER = replace(STARVED, output_ratio=0.7, work_ratio=0.7, work_slow_share=1.0)


def evidence(**parts: object) -> Evidence:
    return Evidence(**{"node": "n", "at_ns": AT, "engine": ENGINE, "output": STARVED, **parts})  # type: ignore[arg-type]


def test_a_full_pool_whose_room_nobodys_tokens_need_is_a_leak_and_no_change_of_the_prompts() -> None:
    leaks = evidence()
    longer = evidence(engine=replace(ENGINE, kv_per_token=seen(0.0016, 0.0015)))
    fewer_shared = evidence(engine=replace(ENGINE, prefix_hit=seen(0.1, 0.65)))
    assert request_mix(leaks, BAR).status is Status.RULED_OUT
    assert any(line.key.endswith("held_by_nobody") for line in memory_kv(leaks, BAR).evidence)
    for other in (longer, fewer_shared):
        assert request_mix(other, BAR).status is Status.CONFIRMED
        assert not any(line.key.endswith("held_by_nobody") for line in memory_kv(other, BAR).evidence)


@pytest.mark.parametrize(("used", "frag", "named"), [(93, 70, True), (60, 25, True), (93, 10, False), (80, 3, False)])
def test_room_that_fragments_hold_can_not_be_used_though_it_does_not_count_as_free(
    used: float, frag: float, named: bool
) -> None:
    engine = replace(
        ENGINE, kv_used=seen(used, 50), kv_fragmentation=seen(frag, 1), preemptions_per_s=None, kv_per_token=None
    )
    assert (memory_kv(evidence(engine=engine), BAR).status is Status.CONFIRMED) is named


def starting(down_s: float, util: float, used_gib: float) -> Evidence:
    gpus = tuple(
        GpuEvidence(
            str(i),
            0.0,
            util=Observation(util, "gpu.util_pct"),
            mem_used_bytes=Observation(used_gib * 2**30, "gpu.mem_used_bytes"),
        )
        for i in range(2)
    )
    engine = EngineEvidence("e0", 0.0, down_s=down_s, away=True, starting=True)
    events = (Event("restart", "n", "e0", "started", 0, AT - int(down_s * SECOND)),)
    return evidence(engine=engine, gpus=gpus, events=events, output=OutputEvidence("history"))


@pytest.mark.parametrize(
    ("down_s", "util", "used_gib", "cause"),
    [
        (30, 100, 0.6, Cause.NETWORK),
        (30, 100, 40.0, Cause.COLD_START),  # it compiles: the weights are there
        (30, 0, 0.6, Cause.COLD_START),  # it reads them
        (10, 100, 0.6, None),
    ],
)
def test_a_start_whose_gpus_spin_over_empty_memory_waits_for_its_group(
    down_s: float, util: float, used_gib: float, cause: Cause | None
) -> None:
    told = starting(down_s, util, used_gib)
    findings: list[Finding] = [f for examine in WALK.values() for f in examine(told, BAR)]
    roots = [entry.finding.cause for entry in weigh(findings, priors()) if entry.symptom_of is None]
    assert roots == ([] if cause is None else [cause])


@pytest.mark.parametrize(("slow_after_s", "named"), [(3, True), (25, True), (50, False)])
def test_what_slows_down_after_a_good_start_is_no_warm_up(slow_after_s: float, named: bool) -> None:
    began = AT - 100 * SECOND
    told = evidence(
        engine=replace(ENGINE, uptime_s=100.0),
        output=replace(SLOWER, since_ns=began + int(slow_after_s * SECOND)),
        events=(Event("restart", "n", "e0", "started", 0, began),),
    )
    assert (cold_start(told, BAR).status is Status.CONFIRMED) is named


def test_a_neighbour_and_a_disk_are_no_cause_where_each_unit_of_work_takes_as_long_as_ever() -> None:
    gpus = (GpuEvidence("0", 0.0, processes=seen(2, 1)),)
    host = HostEvidence(0.0, psi_io=Observation(40, "host.psi_io_pct", "", 0.5))
    for rule in (contention, storage):
        assert rule(evidence(gpus=gpus, host=host, output=SLOWER), BAR).status is Status.CONFIRMED
        assert rule(evidence(gpus=gpus, host=host, output=STARVED), BAR).status is Status.RULED_OUT


@pytest.mark.parametrize(("clock_mhz", "named"), [(1600, True), (1900, False)])
def test_a_small_loss_after_a_start_is_heats_where_the_clock_is_down_as_well(clock_mhz: float, named: bool) -> None:
    gpu = GpuEvidence(
        "0", 0.0, util=Observation(99, "gpu.util_pct"), temp=seen(87, 60), temp_limit=87.0,
        temp_margin=Observation(0, "gpu.temp_margin_c"), sm_clock=seen(clock_mhz, 1980),
        duty={"sw_thermal": Observation(1.0, "gpu.throttle_reasons", "", 0.0)},
    )  # fmt: skip
    young = evidence(
        engine=replace(ENGINE, uptime_s=90.0),
        gpus=(gpu,),
        output=replace(SLOWER, output_ratio=0.93, work_ratio=0.93),
    )
    assert (thermal(young, BAR).status is Status.CONFIRMED) is named


def test_a_clock_that_ran_away_half_a_minute_ago_is_seen_by_its_newest_readings() -> None:
    window, tags = Window(), {"node": "n"}
    for second in range(0, 200, 5):
        offset = 4.0 if second >= 170 else 0.001
        window.add([Sample("host", tags, {"clock_offset_s": offset}, AT + second * SECOND)])
    reader = Reader(Usual(), PeerHabits(), AT + 199 * SECOND)
    found = observe_host(reader, window.devices("n", "host")[0]).clock_offset
    assert found is not None and found.value == 4.0


def test_pages_that_are_swapped_are_no_fault_of_the_disk() -> None:
    swaps = HostEvidence(
        0.0, psi_io=Observation(40, "host.psi_io_pct", "", 0.5), swap=Observation(8e7, "host.swap", "", 0)
    )
    told = evidence(host=swaps, output=SLOWER)
    assert storage(told, BAR).status is Status.RULED_OUT
    assert memory_kv(told, BAR).status is Status.CONFIRMED


@pytest.mark.parametrize(("gap_s", "strong"), [(5, True), (80, False)])
def test_a_neighbour_that_came_long_before_the_work_was_slow_is_a_weak_suspect(gap_s: float, strong: bool) -> None:
    slow_ns = AT - 60 * SECOND
    processes = replace(seen(2, 1), began=lambda: slow_ns - int(gap_s * SECOND))
    told = evidence(gpus=(GpuEvidence("0", 0.0, processes=processes),), output=replace(SLOWER, since_ns=slow_ns))
    assert (contention(told, BAR).strength is Strength.FAIR) is strong


@pytest.mark.parametrize(("states", "hung"), [("000004", False), ("444444", True), ("044444", True)])
def test_one_call_that_overran_is_no_gpu_that_hangs(states: str, hung: bool) -> None:
    window, tags = Window(), {"node": "n", "gpu": "0", "uuid": "U"}
    for second, state in enumerate(states):
        window.add([Sample("gpu", tags, {"state": int(state)}, AT + second * SECOND)])
    reader = Reader(Usual(), PeerHabits(), AT + 5 * SECOND)
    (found,) = observe_gpus(reader, window.devices("n", "gpu"), {})
    assert (found.state == 4) is hung


UNQUEUED = replace(ENGINE, waiting=Observation(0, "engine.requests_waiting", "", 0, 0, 1), kv_used=seen(50, 60))


@pytest.mark.parametrize(
    ("ttft", "itl", "named"), [(0.6, 0.7, False), (1.0, 1.3, True), (1.4, 0.9, True), (None, None, True)]
)
def test_output_that_is_missing_while_nobody_waits_longer_was_not_asked_for(
    ttft: float | None, itl: float | None, named: bool
) -> None:
    engine = replace(
        UNQUEUED, ttft=None if ttft is None else seen(ttft, 1.0), itl=None if itl is None else seen(itl, 1.0)
    )
    assert (request_mix(evidence(engine=engine), BAR).status is Status.CONFIRMED) is named


@pytest.mark.parametrize(("high", "queued", "named"), [
    (1.05, False, True), (1.15, False, True), (1.3, False, False), (1.3, True, True), (1.5, True, False),
])  # fmt: skip
def test_prompts_that_are_uneven_in_health_must_leave_their_own_range_and_farther_where_nobody_waits(
    high: float, queued: bool, named: bool
) -> None:
    share = Observation(2.0, "engine.prompt_tokens_per_s", "share", 1.0, 0.8, high, "history")
    waiting = Observation(9 if queued else 0, "engine.requests_waiting", "", 0, 0, 1)
    engine = replace(UNQUEUED, waiting=waiting, prompt_len=seen(1.0, 1.0), prompt_share=share, itl=seen(1.3, 1.0))
    assert (request_mix(evidence(engine=engine), BAR).status is Status.CONFIRMED) is named


@pytest.mark.parametrize(("high", "named"), [(1.1, True), (1.3, False)])
def test_a_latency_that_is_uneven_in_health_is_not_felt_within_its_own_range(high: float, named: bool) -> None:
    ttft = Observation(1.4, "engine.ttft_p95_s", "", 1.0, 0.9, high, "history")
    engine = replace(UNQUEUED, ttft=ttft, itl=seen(0.9, 1.0))
    assert (request_mix(evidence(engine=engine), BAR).status is Status.CONFIRMED) is named


@pytest.mark.parametrize(
    ("queued_s", "slow_s", "causes"),
    [(5, None, [Cause.GPU_FAULT]), (120, None, [Cause.MEMORY_KV, Cause.GPU_FAULT]), (120, 5, [Cause.MEMORY_KV, Cause.GPU_FAULT])],
)  # fmt: skip
def test_a_pool_that_was_full_before_and_hurt_nobody_does_not_outweigh_the_card_that_slows_down(
    queued_s: float, slow_s: float | None, causes: list[Cause]
) -> None:
    def since(seconds: float | None, now: float, usual: float) -> Observation:
        began = None if seconds is None else AT - int(seconds * SECOND)
        return Observation(now, "engine.x", "", usual, usual * 0.9, usual * 1.1, "history", lambda: began)

    engine = replace(ENGINE, kv_used=since(300, 98, 60), waiting=since(queued_s, 40, 0), kv_per_token=None)
    card = GpuEvidence(
        "1", 0.0, util=Observation(99, "gpu.util_pct"), sm_clock=since(6, 900, 1980), power=since(6, 280, 650)
    )
    slow = replace(SLOWER, since_ns=None if slow_s is None else AT - int(slow_s * SECOND))
    found = [f for examine in WALK.values() for f in examine(evidence(engine=engine, gpus=(card,), output=slow), BAR)]
    roots = [entry.finding.cause for entry in weigh(found, priors()) if entry.symptom_of is None]
    assert [cause for cause in roots if cause in (Cause.MEMORY_KV, Cause.GPU_FAULT)] == causes


def swinging(running: list[int]) -> EngineEvidence:
    window, tags = Window(), {"node": "n", "engine": "e", "model": "m", "gpus": "0"}
    for second, count in enumerate(running):
        fields = {
            "up": 1,
            "requests_running": float(count),
            "requests_waiting": 0.0,
            "requests_finished_total": 40 * second,
        }
        window.add([Sample("engine", tags, fields, AT + second * SECOND)])
    return observe_engine(
        Reader(Usual(), PeerHabits(), AT + (len(running) - 1) * SECOND), window.devices("n", "engine")[0]
    )


@pytest.mark.parametrize(("running", "named"), [
    ([(40, 40, 40, 2, 2, 2)[i % 6] for i in range(61)], True),
    ([(3, 1, 0, 2, 0, 1, 4, 1)[i % 8] for i in range(61)], False),  # few come one by one
    ([2] * 20 + [2 + i for i in range(41)], False),  # a level that moves once
], ids=["gulps", "by chance", "a rise"])  # fmt: skip
def test_a_batch_swings_when_it_fills_and_empties_more_than_chance_makes_it(running: list[int], named: bool) -> None:
    gpu = GpuEvidence("0", 0.0, util=Observation(60, "gpu.util_pct"), util_swing=80.0)
    found = scheduling(evidence(engine=swinging(running), gpus=(gpu,), output=SLOWER), BAR)
    assert any(line.key.endswith("batch_swings") for line in found.evidence) is named
