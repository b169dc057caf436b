"""Published faults are named and their twins are not; published claims that can't be are contradicted with the true figure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bench import blocked_inlet, triage
from bench.triage_cases import FAULTS, TRAPS, Case, judged, told
from rules.coupling import Coupling
from rules.loss import group_pace
from rules.shape import SHAPES, moved_s
from rules.triage import judge
from rules.verdict import Cause, Diagnosis
from telemetry.catalogue import check
from telemetry.sample import Sample, Value
from tests.rules.plant import SECOND, T0, bend, fleet, scene

AT, END = 180, 260


@pytest.mark.parametrize("case", [*FAULTS, *TRAPS], ids=lambda case: case.name)
def test_the_case_is_named_with_its_reason_and_its_twin_is_silent(case: Case) -> None:
    outcome = judged(case)
    assert outcome.right, outcome


def test_a_case_without_its_words_or_with_a_twin_that_alarms_is_wrong() -> None:
    case = FAULTS[0]
    assert not judged(replace(case, says=("a word that nobody says",))).right
    assert not judged(replace(case, twin=case.told)).right
    assert not judged(replace(case, cause="power")).right
    assert "0/1 faults" not in list(told([judged(case)]))[-1]


def test_sizes_are_those_of_the_published_shapes() -> None:
    qwen, llama = SHAPES["qwen2-7b"], SHAPES["llama-2-13b"]
    assert qwen.kv_bytes_per_token == 57_344
    assert llama.kv_bytes(4096) == 3_355_443_200
    assert moved_s(llama.kv_bytes(4096), 10) == pytest.approx(2.684, abs=0.001)
    assert qwen.mlp_bytes == pytest.approx(407.4e6, rel=1e-3)
    assert qwen.mlp_flop(4) == pytest.approx(1.63e9, rel=2e-3)
    assert qwen.kv_to_weights(8, 4096) == pytest.approx(0.123, abs=0.001)
    with pytest.raises(ValueError, match="carries nothing"):
        moved_s(1e9, 0)


def changed(
    samples: list[Sample], measurement: str, fields: Callable[[int, Sample], dict[str, Value]]
) -> Iterator[Sample]:
    """n2's samples of the measurement with these fields from the strike on, and all nodes' with those of second 0 before."""
    for sample in samples:
        if sample.measurement == measurement:
            t = (sample.time_ns - T0) // SECOND
            struck = t >= AT and sample.tags["node"] == "n2"
            sample = check(
                Sample(
                    measurement, sample.tags, {**sample.fields, **fields(t if struck else -1, sample)}, sample.time_ns
                )
            )
        yield sample


def of_n2(samples: Iterator[Sample]) -> Diagnosis:
    return next(d for d in judge(list(samples)) if d.subject["node"] == "n2")


def test_logs_that_fill_the_disk_are_storage_by_samples_too_and_harmless_ones_nothing() -> None:
    def disk(t: int, _sample: Sample) -> dict[str, Value]:
        return {"psi_io_pct": 38.0, "disk_busy_pct": 99.0} if t >= 0 else {"psi_io_pct": 0.4, "disk_busy_pct": 7.0}

    slow = of_n2(changed(scene(fleet(bend(work=2.3, util=70, power=450), AT), END), "host", disk))
    assert slow.verdicts[0].cause is Cause.STORAGE
    assert slow.verdicts[0].confidence >= 0.6
    assert of_n2(changed(scene(fleet(None, AT), END), "host", disk)).verdicts == ()


def test_a_thread_that_reads_all_texts_is_the_host_cpu_beside_a_busy_gpu() -> None:
    def late(t: int, _sample: Sample) -> dict[str, Value]:
        return (
            {"proc_cpu_max_pct": 100.0, "ttft_p95_s": 2.3} if t >= 0 else {"proc_cpu_max_pct": 61.0, "ttft_p95_s": 0.4}
        )

    def always(t: int, _sample: Sample) -> dict[str, Value]:
        return {"proc_cpu_max_pct": 100.0, "ttft_p95_s": 2.3 if t >= 0 else 0.4}

    busy = of_n2(changed(scene(fleet(None, AT), END), "engine", late))
    assert [verdict.cause for verdict in busy.verdicts] == [Cause.HOST_CPU]
    assert of_n2(changed(scene(fleet(None, AT), END), "engine", always)).verdicts == ()


def saw(t: int) -> bool:
    return t // 8 % 2 == 0


def test_a_batch_that_fills_and_empties_under_even_arrivals_is_scheduling() -> None:
    counted = {"n": 0}

    def engine(t: int, sample: Sample) -> dict[str, Value]:
        counted["n"] += 4
        finished = {"requests_finished_total": counted["n"] // 3}  # three nodes take turns
        if t < 0:
            return finished
        running = {"requests_running": 70.0, "requests_waiting": 2.0, "ttft_p95_s": 1.9}
        if not saw(t):
            running |= {"requests_running": 9.0, "requests_waiting": 63.0}
        return {**finished, **running}

    def gpu(t: int, sample: Sample) -> dict[str, Value]:
        return {"util_pct": 95.0 if saw(t) else 15.0} if t >= 0 else {}

    swinging = changed(list(changed(scene(fleet(None, AT), END), "engine", engine)), "gpu", gpu)
    named = {verdict.cause for verdict in of_n2(swinging).verdicts}
    assert Cause.SCHEDULING in named


def test_of_two_ranks_the_hot_one_is_named_and_the_idle_one_said_to_wait() -> None:
    def ranks(t: int, sample: Sample) -> dict[str, Value]:
        if t < 0:
            return {}
        if sample.tags["gpu"] == "0":
            return {
                "temp_c": 88.0,
                "sm_clock_mhz": 1080.0,
                "throttle_reasons": 0x20,
                "power_w": 390.0,
                "util_pct": 95.0,
            }
        return {"util_pct": 30.0, "power_w": 300.0}

    verdict = of_n2(changed(scene(fleet(bend(work=1.5), AT), END), "gpu", ranks)).verdicts[0]
    assert (verdict.cause, verdict.scope, verdict.gpus) == (Cause.THERMAL, "gpu", ("0",))
    assert any("GPU 1 wait for GPU 0" in entry.text() for entry in verdict.evidence)


def test_six_of_32_cards_in_groups_of_four_hold_up_24() -> None:
    pace = blocked_inlet.PACE
    grouped = Coupling(slow=6, held_up=24, of=32, group=4, lost=24 / 32 * (1 - pace), lost_alone=6 / 32 * (1 - pace))
    assert grouped.gain == pytest.approx(0.204, abs=0.001)
    assert grouped.gain_alone == pytest.approx(0.044, abs=0.001)
    cards = [pace if place in (0, 5, 10, 15, 20, 25) else 1.0 for place in range(32)]
    assert 1 / group_pace(cards, 4) - 1 == pytest.approx(grouped.gain)
    for language in ("en", "zh"):
        assert "20.4" in grouped.line().text(language) and "4.4" in grouped.line().text(language)


@pytest.mark.long
def test_the_blocked_intake_of_the_32_cards_is_one_cause_with_all_six_cards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["triage.py", "--cases"])
    assert triage.main() == 0
    said = capsys.readouterr().out
    assert "6/6 cards named" in said
    assert "6 of 32 GPUs are slow" in said and "24 GPUs are held up" in said
