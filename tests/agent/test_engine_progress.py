"""A stall is said when a healthy engine would have moved, and never of an idle, a starting or a merely quiet one."""

from __future__ import annotations

import pytest

from agent.collectors.dialects.registry import detect
from agent.collectors.engine_readings import EngineReadings
from agent.exposition import parse
from telemetry.sample import Value
from tests.doubles.engine_texts.llamacpp import llamacpp
from tests.doubles.engine_texts.pairscope import pairscope
from tests.doubles.engine_texts.sglang import sglang
from tests.doubles.engine_texts.text import MODEL, histogram, lines
from tests.doubles.engine_texts.tgi import tgi
from tests.doubles.engine_texts.trtllm import trtllm
from tests.doubles.engine_texts.vllm import vllm

WALL_S = 1_796_000_000.0


def over_time(*scrapes: tuple[float, str]) -> list[dict[str, Value]]:
    """The fields at each of these seconds."""
    dialect = detect(parse(scrapes[-1][1]))
    assert dialect is not None
    readings = EngineReadings(dialect)
    return [readings.read(dialect.plain(parse(text)), second, WALL_S) for second, text in scrapes]


def stalled(*scrapes: tuple[float, str]) -> list[object]:
    return [fields.get("stalled") for fields in over_time(*scrapes)]


def test_requests_that_run_while_nothing_moves_are_a_stall_after_ten_seconds() -> None:
    assert stalled(*((float(second), vllm()) for second in (0, 1, 9, 10, 11))) == [None, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "moved",
    [{"generated": (1_001.0,)}, {"prompts": (5_001.0,)}, {"steps": 500.0}],
    ids=["a token", "a prompt", "a step"],
)
def test_any_counter_of_work_that_moves_is_no_stall(moved: dict[str, object]) -> None:
    assert stalled((0.0, vllm()), (11.0, vllm(**moved)), (20.0, vllm(**moved))) == [None, 0, 0]  # type: ignore[arg-type]
    assert stalled((0.0, vllm()), (11.0, vllm(**moved)), (21.0, vllm(**moved)))[-1] == 1  # type: ignore[arg-type]


def test_an_idle_engine_is_not_stalled_nor_one_that_just_got_a_request() -> None:
    idle = vllm(running=(0.0,))
    assert stalled((0.0, idle), (100.0, idle), (101.0, vllm()), (110.0, vllm()), (111.0, vllm())) == [
        *(None, 0, 0, 0, 1)
    ]


def test_one_hung_engine_of_two_is_a_stall_though_the_other_moves() -> None:
    two = {"ranks": ("0", "1"), "prompts": (3.0, 4.0), "running": (6.0, 2.0), "waiting": (0.0, 0.0), "kv": (0.5, 0.5)}
    steps = 400.0

    def at(tokens: float) -> str:
        return vllm(**two, generated=(1_000.0, tokens), steps=steps)  # type: ignore[arg-type]

    assert stalled((0.0, at(1)), (6.0, at(50)), (12.0, at(100)))[-1] == 1


def test_one_hung_rank_of_sglang_is_a_stall_though_totals_of_all_ranks_move() -> None:
    def at(decoded: float) -> str:
        return sglang(decoded=(decoded, 23_000.0), finished=600.0 + decoded / 100)

    assert stalled(*((float(n), at(40_000.0 + 100 * n)) for n in range(0, 45, 5))) == [None, *[0] * 7, 1]


def test_a_rank_that_never_decoded_is_no_stall_while_the_others_do() -> None:
    def at(decoded: float) -> str:
        quiet = 'dp_rank="1",engine_type="unified",model_name="org/Tiny-1B",moe_ep_rank="0",pp_rank="0",tp_rank="1"'
        text = sglang(decoded=(decoded, 0.0), running=(21.0, 0.0))
        return "\n".join(line for line in text.splitlines() if not (quiet in line and 'mode="decode"' in line))

    assert stalled(*((float(n), at(40_000.0 + n)) for n in range(0, 65, 5)))[1:] == [0] * 12


def test_an_engine_with_long_steps_has_twenty_of_them() -> None:
    def at(count: float, total: float) -> str:
        return pairscope(step_buckets={"2.5": count, "+Inf": count}, step_sum=total, generated=100 + count)

    moving = [(0.0, at(10, 20.0)), (2.0, at(11, 22.0))]
    assert stalled(*moving, (30.0, at(11, 22.0)), (41.9, at(11, 22.0)), (42.0, at(11, 22.0)))[2:] == [0, 0, 1]


def test_a_prompt_that_takes_as_long_as_prompts_do_here_is_no_stall() -> None:
    own = f'model_name="{MODEL}",engine="0"'
    prefills = histogram("vllm:request_prefill_time_seconds", own, {"10.0": 90.0, "30.0": 100.0, "+Inf": 100.0}, 900.0)
    text = vllm() + prefills
    assert stalled((0.0, text), (15.0, text), (29.0, text), (30.0, text))[1:] == [0, 0, 1]


def test_gauges_that_are_refreshed_only_now_and_then_are_given_that_time() -> None:
    text = sglang()
    assert stalled((0.0, text), (30.0, text), (39.0, text), (40.0, text))[1:] == [0, 0, 1]


def test_a_flat_counter_of_finished_requests_is_no_stall_while_steps_are_made() -> None:
    scrapes = [(10.0 * n, llamacpp(decodes=6_900.0 + 40 * n)) for n in range(12)]
    assert stalled(*scrapes)[-1] == 0
    assert stalled(*scrapes, (121.0, llamacpp(decodes=7_340.0)))[-1] == 1
    assert stalled(*((10.0 * n, tgi(decodes=9_000.0 + n)) for n in range(12)))[-1] == 0


def test_where_only_finished_requests_are_counted_three_of_their_times_must_pass() -> None:
    def at(second: float) -> tuple[float, str]:
        return second, trtllm(latency=0.02 + second / 1e6)  # iterations go on; e2e lies under 10 s

    assert stalled(*(at(float(second)) for second in range(0, 35, 5))) == [None, 0, 0, 0, 0, 0, 1]


def test_without_any_finished_request_how_long_one_takes_is_not_known() -> None:
    own = f'model_name="{MODEL}"'
    text = lines({"sglang:num_running_reqs": 3.0, "sglang:generation_tokens_total": 0.0}, own)
    assert stalled((0.0, text), (500.0, text)) == [None, None]


def test_a_restart_ends_a_stall() -> None:
    again = vllm(start_s=1_795_999_000.0)
    assert stalled((0.0, vllm()), (11.0, vllm()), (12.0, again), (13.0, again)) == [None, 1, None, 0]


def test_rates_of_finished_requests_are_over_twice_the_time_that_nearly_all_take() -> None:
    """95 % of these requests end within 80 s, so nothing is told before 160 s."""
    own = 'engine_type="trtllm",model_name="m"'

    def at(second: float) -> tuple[float, str]:
        long = histogram(
            "trtllm_e2e_request_latency_seconds", own, {"40.0": 10.0, "80.0": 100.0, "+Inf": 100.0}, 6_000.0
        )
        return second, lines({"trtllm_generation_tokens_total": 5_000 + 20 * second}, own) + long

    answers = [fields.get("tokens_per_s") for fields in over_time(*(at(10.0 * n) for n in range(18)))]
    assert answers[:16] == [None] * 16
    assert answers[16:] == [20.0, 20.0]


def test_a_quantile_that_is_only_a_bound_is_named_with_its_sign() -> None:
    own = f'model_name="{MODEL}",engine="0"'

    def at(count: float) -> str:
        ttft = histogram(
            "vllm:time_to_first_token_seconds", own, {"0.3": count, "10.0": count, "+Inf": count}, count / 10
        )
        e2e = histogram("vllm:e2e_request_latency_seconds", own, {"1.0": 0.0, "60.0": 0.0, "+Inf": count}, count * 99)
        return lines({"vllm:num_requests_running": 1.0}, own) + ttft + e2e

    fields = over_time((0.0, at(1_000.0)), (5.0, at(1_400.0)))[-1]
    assert (fields["ttft_p95_s"], fields["e2e_p99_s"]) == (0.3, 60.0)
    assert fields["quantile_bounds"] == "ttft_p50_s<= ttft_p95_s<= ttft_p99_s<= e2e_p99_s>="
    assert fields["ttft_mean_s"] == pytest.approx(0.1)
    assert fields["e2e_mean_s"] == pytest.approx(99.0)


def test_too_few_requests_for_a_minutes_quantile_make_one_of_five_minutes() -> None:
    own = f'model_name="{MODEL}",engine="0"'

    def at(count: float) -> str:
        buckets = {"0.1": 0.0, "0.2": count, "+Inf": count}
        return histogram("vllm:time_to_first_token_seconds", own, buckets, count * 0.15)

    answers = over_time(*((10.0 * n, at(100.0 + n)) for n in range(31)))  # 6 a minute
    assert "ttft_p50_s" not in answers[15]
    assert answers[30]["ttft_p50_s"] == pytest.approx(0.15)
    assert "ttft_p95_s" not in answers[30]
