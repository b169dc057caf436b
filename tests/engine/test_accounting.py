"""Operations, bytes and statistics are counted as defined, on numbers worked out by hand and from the public formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.accounting import ModelCost, Peaks, Work, least_s, utilisation
from engine.core import StepResult
from engine.kvstore import bytes_per_token
from engine.metrics import EngineMetrics
from engine.modelconfig import ModelConfig
from engine.request import Request, Sampling
from engine.rope import RopeScaling
from engine.scheduler import Row, StepPlan
from engine.stats import (
    WINDOW_S,
    EngineStats,
    Histogram,
    Occupancy,
    Phase,
    SpeculationStats,
    StepRecord,
    phase_of,
    prompt_len_max,
    recent,
)
from engine.threads import TRY_EVERY, ThreadChooser, usable_cores
from tests.engine.fakes import ask, make, run_out


def shape(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        "llama", layers, heads * head_dim, heads, kv_heads, head_dim, 1, 1, 4096, 1e-5, 1e4, RopeScaling(), True
    )


def row(id: str, total: int, start: int, count: int) -> Row:
    return Row(Request(id, [1] * total, Sampling(), 0.0), start, count)


def test_kv_bytes_are_those_of_known_models() -> None:
    # a 13B with 40 layers, 40 KV heads of 128, FP16: 3.355 GB for 4,096 tokens; Qwen2-7B's 4 KV heads: 57,344 B a token
    assert bytes_per_token(shape(40, 40, 40, 128), torch.float16) * 4096 == 3_355_443_200
    assert bytes_per_token(shape(28, 28, 4, 128), torch.float16) == 57_344
    assert bytes_per_token(shape(30, 9, 3, 64), torch.float32) == 46_080


def test_a_decode_step_reads_all_weights_once_and_each_context_once() -> None:
    cost = ModelCost(1000, 100, 4000, 400, 40, 16, 8)
    work = cost.of([row("a", 10, 9, 1), row("b", 5, 4, 1)])
    assert work.flops == 2 * 1000 * 2 + 2 * 100 * 2 + 4 * 8 * (10 + 5)
    assert work.bytes == 4000 + 400 + 2 * 40 + (10 + 5 + 2) * 16


def test_a_prompt_chunk_attends_causally_and_pays_for_the_head_only_at_its_end() -> None:
    cost = ModelCost(1000, 100, 4000, 400, 40, 16, 8)
    middle = cost.of([row("a", 10, 2, 4)])  # tokens 2..5 attend to 3, 4, 5 and 6 tokens
    assert middle.flops == 2 * 1000 * 4 + 4 * 8 * (3 + 4 + 5 + 6)
    assert middle.bytes == 4000 + 4 * 40 + (6 + 4) * 16
    end = cost.of([row("a", 6, 2, 4)])
    assert end.flops - middle.flops == 2 * 100
    assert end.bytes - middle.bytes == 400


@pytest.mark.parametrize(("start", "count"), [(0, 3), (0, 7), (0, 20), (3, 4), (4, 1), (5, 9), (40, 1), (40, 6)])
def test_layers_with_a_window_attend_to_and_read_what_is_within_it(start: int, count: int) -> None:
    cost = ModelCost(0, 0, 0, 0, 0, 16, attention_width=8, window=5, local_share=0.75)
    seen = range(start + 1, start + count + 1)  # by each token, itself among them
    everywhere, within = sum(seen), sum(min(5, tokens) for tokens in seen)
    read, kept = start + count, min(start + count, count + 4)
    work = cost.of([row("a", 100, start, count)])
    assert work.flops == 4 * 8 * (0.25 * everywhere + 0.75 * within)
    assert work.bytes == (0.25 * read + 0.75 * kept + count) * 16


def test_attention_operations_are_those_of_the_public_example() -> None:
    # one layer, hidden 4,096, four sequences at 2,048 tokens: QK^T and PV together 0.134 GFLOP
    cost = ModelCost(0, 0, 0, 0, 0, 0, attention_width=4096)
    assert cost.of([row(str(n), 2048, 2047, 1) for n in range(4)]).flops == pytest.approx(0.134e9, rel=0.01)


QWEN2_7B = shape(28, 28, 4, 128)
LLAMA2_7B = shape(32, 32, 32, 128)


def half(config: ModelConfig, weights: float) -> ModelCost:
    """What a model of so many weights in FP16 costs, its head counted among them."""
    width = config.num_layers * config.num_heads * config.head_dim
    return ModelCost(int(weights), 0, int(2 * weights), 0, 0, bytes_per_token(config, torch.float16), width)


def decoding(streams: int, context: int) -> list[Row]:
    return [row(str(n), context, context - 1, 1) for n in range(streams)]


@pytest.mark.parametrize(
    ("tflops", "gb_s", "alone", "of_32", "bound", "mbu", "mfu"),
    [(300, 900, 42, 680, 64.3, 65, 3.2), (400, 600, 35, 510, 42.9, 82, 1.8), (200, 1200, 58, 920, 85.7, 68, 6.4)],
)
def test_three_cards_with_a_7b_in_half_precision_are_bound_by_memory_and_hardly_compute(
    tflops: int, gb_s: int, alone: int, of_32: int, bound: float, mbu: int, mfu: float
) -> None:
    peaks = Peaks(tflops * 1e12, gb_s * 1e9)
    weights_only = ModelCost(7_000_000_000, 0, 14_000_000_000, 0, 0, 0, 0)
    one = weights_only.of(decoding(1, 100))
    assert 1 / least_s(one, peaks) == pytest.approx(bound, abs=0.05)  # tokens/s of one stream at most
    assert utilisation(one, 1 / alone, peaks)[1] == pytest.approx(mbu, abs=0.5)
    many = weights_only.of(decoding(32, 100))
    assert utilisation(many, 32 / of_32, peaks)[0] == pytest.approx(mfu, abs=0.05)


def test_a_large_prompt_is_bound_by_operations_and_a_single_token_by_bytes() -> None:
    cost, peaks = half(QWEN2_7B, 7.6e9), Peaks(312e12, 1555e9)
    prompt, token = cost.of([row("p", 4096, 0, 4096)]), cost.of(decoding(1, 4096))
    assert least_s(prompt, peaks) == prompt.flops / peaks.flops_per_s
    assert least_s(token, peaks) == token.bytes / peaks.bytes_per_s


def test_one_layers_work_for_four_streams_is_that_of_the_public_shapes() -> None:
    # 4 streams at 2,048 tokens, hidden 4,096: the cache is 16.8 MB with 4 KV heads of 128 and 134 MB with 32
    for kv_heads, megabytes in ((4, 16.8), (32, 134.2)):
        width = bytes_per_token(shape(1, 32, kv_heads, 128), torch.float16)
        read = ModelCost(0, 0, 0, 0, 0, width, 0).of(decoding(4, 2048)).bytes - 4 * width  # but what is written
        assert read == pytest.approx(megabytes * 1e6, rel=0.005)
    # the MLP of Qwen2-7B, 3 x 3,584 x 18,944 in FP16: 1.63 GFLOP, 407 MB, one operation a byte and stream
    mlp = 3 * 3584 * 18944
    work = ModelCost(mlp, 0, 2 * mlp, 0, 0, 0, 0).of(decoding(4, 2048))
    assert work.flops == pytest.approx(1.63e9, rel=0.005)
    assert work.bytes == pytest.approx(407e6, rel=0.005)
    assert work.flops / work.bytes == 4


def test_eight_long_contexts_read_an_eighth_as_much_cache_as_weights_with_few_kv_heads_and_more_with_many() -> None:
    shares = []
    for config, weights, gigabytes in ((QWEN2_7B, 7.6e9, 1.88), (LLAMA2_7B, 6.74e9, 17.2)):
        cost = half(config, weights)
        rows = decoding(8, 4096)
        read = cost.of(rows).bytes - cost.layer_bytes - 8 * cost.kv_bytes_per_token
        assert read == pytest.approx(gigabytes * 1e9, rel=0.005)
        shares.append(read / cost.layer_bytes)
    assert shares == pytest.approx([0.124, 1.27], abs=0.01)
    # from so many tokens in all contexts on, the cache is more than the weights
    assert half(QWEN2_7B, 7.6e9).layer_bytes / 57_344 == pytest.approx(266_000, rel=0.01)
    assert half(LLAMA2_7B, 6.74e9).layer_bytes / 524_288 == pytest.approx(25_700, rel=0.01)


def test_a_step_whose_end_nobody_has_waited_for_raises_no_peak() -> None:
    stats = EngineStats(started_s=0.0, peaks=Peaks(1000.0, 100.0))
    stats.record_step(StepRecord(1.0, 0.001, 1, Work(50, 20), waited=False))
    assert stats.peaks == Peaks(1000.0, 100.0)


def test_fragmentation_is_the_unwritten_share_of_taken_slots() -> None:
    occupancy = Occupancy(running=2, blocks=10, blocks_taken=4, block_size=16, slots_written=48)
    assert occupancy.kv_used_pct == 40.0
    assert occupancy.kv_fragmentation_pct == 25.0
    assert Occupancy(blocks=10).kv_fragmentation_pct == 0.0


def test_utilisation_is_over_the_time_inside_recent_steps_and_unknown_without_any() -> None:
    stats = EngineStats(started_s=0.0, peaks=Peaks(1000.0, 100.0))
    assert recent(stats, 5.0) is None
    stats.record_step(StepRecord(1.0, 0.5, 3, Work(100, 5)))
    stats.record_step(StepRecord(9.0, 0.25, 1, Work(50, 20)))
    both = recent(stats, 10.0)
    assert both is not None
    assert (both.step_mean_s, both.tokens_per_step) == (0.375, 2.0)
    assert both.mfu_pct == pytest.approx(100 * 150 / (0.75 * 1000))
    assert both.mbu_pct == pytest.approx(100 * 25 / (0.75 * 100))
    later = recent(stats, 1.0 + WINDOW_S + 1)
    assert later is not None
    assert later.tokens_per_step == 1.0
    assert recent(stats, 9.0 + WINDOW_S + 1) is None


def test_each_time_of_an_answer_is_between_the_moments_that_it_is_named_after() -> None:
    engine, runner, clock = make(budget=16)
    run, took = runner.run, iter((3.0, 5.0, 0.5, 0.25, 0.125))

    def timed(plan: StepPlan) -> StepResult:
        clock.now += next(took)
        return run(plan)

    runner.run = timed  # type: ignore[method-assign]
    engine.add(ask("a", 20, 4, clock))  # two chunks of its prompt, then three more tokens
    clock.now += 7.0
    run_out(engine)
    stats = engine.stats
    assert (stats.queue_time.count, stats.queue_time.sum) == (1, 7.0)
    assert (stats.time_to_first_token.count, stats.time_to_first_token.sum) == (1, 7.0 + 3.0 + 5.0)
    assert (stats.inter_token_latency.count, stats.inter_token_latency.sum) == (3, 0.875)
    assert (stats.time_per_output_token.count, stats.time_per_output_token.sum) == (1, pytest.approx(0.875 / 3))
    assert (stats.request_latency.count, stats.request_latency.sum) == (1, 15.875)
    engine.add(ask("b", 1, 1, clock))
    runner.run = run  # type: ignore[method-assign]
    run_out(engine)
    assert stats.request_latency.count == 2
    assert stats.time_per_output_token.count == 1  # a single token has no time per token


def test_a_snapshot_stays_what_it_was_whatever_is_counted_later_and_the_lock_is_free_meanwhile() -> None:
    def count(stats: EngineStats) -> None:
        stats.record_step(StepRecord(1.0, 0.5, 3, Work(100, 5)))
        stats.record_prompt(1.0, 900)
        stats.add_stages([1.0] * 7)
        stats.counters.generation_tokens_total += 1
        stats.time_to_first_token.observe(1.0)
        assert stats.speculation is not None
        stats.speculation.add(1.0, 4, 2)

    stats = EngineStats(0.0, Peaks(1000.0, 100.0), speculation=SpeculationStats(), stage_seconds=[0.0] * 7)
    count(stats)
    kept, told = stats.snapshot(), EngineMetrics("m", "1", "x", 0.0)
    told.watch(kept)
    before = told.text(2.0)
    count(stats)
    assert told.text(2.0) == before
    told.watch(stats)
    assert told.text(2.0) != before
    assert not stats.lock.locked()


def test_prefill_is_judged_by_its_operations_and_decode_by_its_bytes_each_by_its_own_steps() -> None:
    stats = EngineStats(started_s=0.0, peaks=Peaks(1000.0, 100.0))
    stats.record_step(StepRecord(1.0, 0.5, 90, Work(300, 7), phase=Phase.PREFILL))
    stats.record_step(StepRecord(1.5, 0.25, 1, Work(11, 20), phase=Phase.DECODE))
    alone = recent(stats, 2.0)
    stats.record_step(StepRecord(2.0, 0.25, 60, Work(200, 24), phase=Phase.MIXED))
    now = recent(stats, 2.0)
    assert alone is not None and now is not None
    for found in (alone, now):
        assert found.mfu_prefill_pct == pytest.approx(100 * 300 / (0.5 * 1000))
        assert found.mbu_decode_pct == pytest.approx(100 * 20 / (0.25 * 100))
    assert now.mfu_pct == pytest.approx(100 * 511 / (1.0 * 1000))
    assert now.mbu_pct == pytest.approx(100 * 51 / (1.0 * 100))


def test_utilisation_is_unknown_where_a_phase_had_no_step_or_nobody_waited_for_one() -> None:
    stats = EngineStats(started_s=0.0, peaks=Peaks(1000.0, 100.0))
    stats.record_step(StepRecord(1.0, 0.01, 90, Work(300, 7), waited=False, phase=Phase.PREFILL))
    now = recent(stats, 2.0)
    assert now is not None
    assert (now.mfu_pct, now.mbu_pct, now.mfu_prefill_pct, now.mbu_decode_pct) == (None,) * 4
    stats.record_step(StepRecord(1.5, 0.49, 10, Work(30, 7), phase=Phase.PREFILL))  # it has waited for both
    now = recent(stats, 2.0)
    assert now is not None
    assert now.mfu_pct == now.mfu_prefill_pct == pytest.approx(100 * 330 / (0.5 * 1000))
    assert now.mbu_decode_pct is None


def test_a_step_is_decode_only_when_each_row_brings_the_token_that_was_chosen_last() -> None:
    def part(prompt: int, output: int, start: int, count: int) -> Row:
        request = Request("r", [1] * prompt, Sampling(), 0.0)
        request.tokens += [2] * output
        return Row(request, start, count)

    decoding, prompt, one_token_prompt = part(4, 2, 5, 1), part(9, 0, 4, 3), part(5, 0, 4, 1)
    again = part(4, 3, 2, 5)
    assert phase_of([decoding, decoding]) is Phase.DECODE
    assert phase_of([prompt, one_token_prompt, again]) is Phase.PREFILL
    assert phase_of([decoding, one_token_prompt]) is Phase.MIXED


def test_a_step_faster_than_the_probe_raises_the_peak_so_that_utilisation_stays_a_share() -> None:
    stats = EngineStats(started_s=0.0, peaks=Peaks(1000.0, 100.0))
    stats.record_step(StepRecord(1.0, 0.1, 1, Work(50, 20)))
    assert stats.peaks == Peaks(1000.0, 200.0)
    now = recent(stats, 1.0)
    assert now is not None
    assert now.mbu_pct == pytest.approx(100.0)


def test_the_longest_prompt_is_forgotten_after_its_window() -> None:
    stats = EngineStats(started_s=0.0, peaks=Peaks(1.0, 1.0))
    assert prompt_len_max(stats, 0.0) is None
    stats.record_prompt(1.0, 900)
    stats.record_prompt(50.0, 20)
    assert prompt_len_max(stats, 55.0) == 900
    assert prompt_len_max(stats, 62.0) == 20


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.count, histogram.sum) == (5, 7.5)


def steps(chooser: ThreadChooser, tokens: int, seconds: dict[int, float], count: int) -> list[int]:
    used = []
    for _ in range(count):
        threads = chooser.choose(tokens)
        chooser.learn(tokens, threads, seconds[threads])
        used.append(threads)
    return used


def test_the_faster_thread_count_is_used_and_the_other_tried_now_and_then() -> None:
    used = steps(ThreadChooser(2), 8, {1: 0.020, 2: 0.012}, 4 * TRY_EVERY)
    assert 2 + 3 <= used.count(1) <= 2 + 4


def test_when_a_neighbour_gets_busy_the_choice_turns_and_turns_back() -> None:
    chooser = ThreadChooser(2)
    steps(chooser, 8, {1: 0.020, 2: 0.012}, 100)
    busy = steps(chooser, 8, {1: 0.022, 2: 0.060}, 2 * TRY_EVERY)
    assert busy[20:].count(1) > 0.9 * len(busy[20:])
    quiet = steps(
        chooser, 8, {1: 0.020, 2: 0.012}, TRY_EVERY + 20
    )  # the first trial that is faster is followed up at once
    assert quiet[-10:] == [2] * 10


def test_a_slow_first_step_does_not_spoil_a_choice_for_long() -> None:
    chooser = ThreadChooser(2)
    chooser.learn(8, 2, 0.500)
    assert steps(chooser, 8, {1: 0.020, 2: 0.012}, 40)[5:] == [2] * 35


def test_two_threads_that_are_fast_now_and_then_but_slow_on_the_whole_are_not_chosen() -> None:
    chooser = ThreadChooser(2)
    used = []
    for number in range(6 * TRY_EVERY):
        threads = chooser.choose(1)
        chooser.learn(1, threads, 0.020 if threads == 1 else (0.012 if number % 3 == 0 else 0.050))
        used.append(threads)
    assert used[TRY_EVERY:].count(1) > 0.8 * len(used[TRY_EVERY:])


def test_sizes_are_judged_apart_and_one_outlier_does_not_turn_the_choice() -> None:
    chooser = ThreadChooser(2)
    steps(chooser, 1, {1: 0.010, 2: 0.012}, 50)
    steps(chooser, 100, {1: 0.200, 2: 0.110}, 50)
    assert (chooser.choose(1), chooser.choose(100)) == (1, 2)
    chooser.learn(100, 2, 5.0)
    assert chooser.choose(100) == 2


def test_one_core_is_one_thread() -> None:
    assert steps(ThreadChooser(1), 8, {1: 0.02}, 5) == [1] * 5


@pytest.mark.parametrize(
    ("content", "cores"), [("100000 100000", 1), ("150000 100000\n", 2), ("max 100000", 3), ("", 3)]
)
def test_a_containers_cpu_quota_bounds_the_threads(
    content: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    assert usable_cores(quota) == cores
    assert usable_cores(tmp_path / "absent") == 3
