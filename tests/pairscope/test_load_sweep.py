"""`pairscope sweep URL` against endpoints that behave and that don't: what is measured, what is asked, what is told and kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from pairscope.load_sweep.knee import Limits, Point
from pairscope.load_sweep.lengths import Lengths
from pairscope.load_sweep.measuring import Plan, enough, fine_batches, percentile
from tests.doubles.engine_endpoint import EngineEndpoint, nothing_listens
from tests.doubles.streaming_endpoint import TEMPLATE_TOKENS, TOKENS_A_WORD, Behaviour, StreamingEndpoint
from tests.pairscope.command_line import pairscope

Serve = Callable[..., StreamingEndpoint]
SMALL = ("--requests", "6", "--input-tokens", "40", "--output-tokens", "12")


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[StreamingEndpoint] = []

    def start(**behaviour: object) -> StreamingEndpoint:
        made.append(StreamingEndpoint(Behaviour(**behaviour)))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for endpoint in made:
        endpoint.close()


def swept(endpoint: StreamingEndpoint, tmp_path: Path, *arguments: str) -> Result:
    store = f"sqlite://{tmp_path}/none.db"
    return pairscope("sweep", endpoint.url, *SMALL, "--state-dir", str(tmp_path), "--store", store, *arguments)


def test_batches_double_and_each_holds_what_was_measured(serve: Serve, tmp_path: Path) -> None:
    endpoint = serve(kv_a_request_pct=6.0)
    done = swept(endpoint, tmp_path, "--max-batch", "4", "--elasticity", "0", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ended"] == "whole"
    assert told["model"] == "first-model"
    assert {1, 2, 4} <= {point["batch"] for point in told["points"]}
    for point in told["points"]:
        assert (point["requests"], point["errors"], point["preemptions"]) == (6, 0, 0)
        assert 0 < point["ttft_p50_s"] <= point["ttft_p95_s"]
        assert 0 < point["itl_p50_s"] <= point["itl_p95_s"]
        assert 0 <= point["kv_used_pct"] <= 6.0 * point["batch"]
        assert "power_w" not in point
    assert endpoint.behaviour.most_at_once == 4


def test_requests_have_the_wanted_lengths_and_no_two_prompts_begin_alike(serve: Serve, tmp_path: Path) -> None:
    endpoint = serve()
    assert swept(endpoint, tmp_path, "--max-batch", "2", "--model", "second-model").exit_code == 0
    asked = endpoint.behaviour.asked[2:]  # the first two are to learn how tokens are counted
    assert {body["model"] for body in asked} == {"second-model"}
    assert {body["max_tokens"] for body in asked} == {12}
    tokens = {TEMPLATE_TOKENS + TOKENS_A_WORD * len(body["prompt"].split()) for body in asked}
    assert all(abs(count - 40) <= TOKENS_A_WORD for count in tokens)
    beginnings = [" ".join(body["prompt"].split()[:4]) for body in asked]
    assert len(set(beginnings)) == len(beginnings)


def test_an_endpoint_with_chat_alone_and_without_usage_is_measured_and_says_so(serve: Serve, tmp_path: Path) -> None:
    endpoint = serve(completions=False, usage=False)
    done = swept(endpoint, tmp_path, "--max-batch", "2")
    assert done.exit_code == 0, done.stderr
    assert endpoint.behaviour.paths[-1] == "/v1/chat/completions"
    assert "counts no tokens" in done.stderr


def test_an_engine_with_two_slots_gets_no_recommendation_far_beyond_them(serve: Serve, tmp_path: Path) -> None:
    endpoint = serve(slots=2, token_s=0.02)  # so long that what a busy machine adds to a request is little beside it
    done = swept(endpoint, tmp_path, "--max-batch", "8", "--start", "1", "--requests", "8", "--json")
    told = json.loads(done.stdout)
    assert told["knee"] is not None
    assert told["knee"]["above"] <= 4
    assert told["recommended"] <= 6


def test_a_ttft_limit_ends_the_doubling(serve: Serve, tmp_path: Path) -> None:
    endpoint = serve(slots=1, token_s=0.004)
    arguments = ("--max-batch", "64", "--elasticity", "0", "--ttft-limit", "0.5", "--json")
    told = json.loads(swept(endpoint, tmp_path, *arguments, "--start", "1").stdout)
    assert max(point["batch"] for point in told["points"]) <= 4
    assert told["recommended"] is None


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"ignore_eos": False}, "--natural-ends"),
        ({"ends_after": 5}, "after 5 of 8 tokens"),
        ({"breaks_after": 3}, "broke off before its end"),
        ({"fails_above": 0}, "too many at once"),
        ({"key": "secret"}, "--api-key-file"),
        ({"models": ()}, "--model"),
        ({"context": 30}, "does not fit"),
    ],
)
def test_what_an_endpoint_cannot_do_is_one_line_with_the_remedy(
    serve: Serve, tmp_path: Path, behaviour: dict[str, object], words: str
) -> None:
    out = tmp_path / "sweep.svg"
    done = swept(serve(**behaviour), tmp_path, "--max-batch", "2", "--out", str(out))
    assert done.exit_code == 2
    assert words.replace("does not fit", "fits into the model's context of 30") in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not out.exists()


def test_natural_ends_measure_what_ends_early(serve: Serve, tmp_path: Path) -> None:
    assert swept(serve(ignore_eos=False, ends_after=5), tmp_path, "--max-batch", "2", "--natural-ends").exit_code == 0


def test_a_key_is_sent_and_told_nobody(serve: Serve, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-of-mine\n")
    done = swept(serve(key="secret-of-mine"), tmp_path, "--max-batch", "2", "--api-key-file", str(key), "--json")
    assert done.exit_code == 0
    assert "secret-of-mine" not in done.output


def test_errors_at_a_batch_end_the_sweep_and_keep_what_came_before(serve: Serve, tmp_path: Path) -> None:
    out = tmp_path / "sweep.csv"
    arguments = ("--max-batch", "8", "--elasticity", "0", "--out", str(out))
    done = swept(serve(fails_above=2, token_s=0.05), tmp_path, *arguments)
    assert done.exit_code == 2
    assert "at 4 requests at once" in done.stderr
    assert "HTTP 429 too many at once" in done.stderr
    assert [line.split(",")[0] for line in out.read_text().splitlines()] == ["batch", "1", "2"]


def test_an_address_without_an_engine_is_told_by_what_is_there(tmp_path: Path) -> None:
    other = EngineEndpoint()
    try:
        assert "no OpenAI-compatible API" in pairscope("sweep", other.url).stderr
        other.json("/v1/models", {"data": "none"})
        assert pairscope("sweep", other.url).exit_code == 2
    finally:
        other.close()
    assert "nothing listens" in pairscope("sweep", nothing_listens()).stderr
    assert "is no address" in pairscope("sweep", "ftp://here").stderr
    assert "secret" not in pairscope("sweep", "http://user:secret@127.0.0.1:1").output.replace("user:secret@", "", 1)


def test_a_model_that_is_not_served_is_told_with_those_that_are(serve: Serve, tmp_path: Path) -> None:
    done = swept(serve(), tmp_path, "--model", "third")
    assert done.exit_code == 2
    assert "first-model, second-model" in done.stderr


def test_ctrl_c_keeps_what_was_measured(serve: Serve, tmp_path: Path) -> None:
    endpoint, out = serve(token_s=0.002), tmp_path / "sweep.csv"
    command = [sys.executable, "-m", "pairscope", "sweep", endpoint.url, "--output-tokens", "10", "--input-tokens", "9"]
    command += ["--requests", "8", "--start", "1", "--max-batch", "1024", "--elasticity", "0", "--out", str(out)]
    command += ["--state-dir", str(tmp_path), "--lang", "en"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    deadline = time.monotonic() + 240
    while endpoint.behaviour.most_at_once < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 130, told
    assert "what had been measured is kept" in told
    assert len(out.read_text().splitlines()) >= 2
    assert "Traceback" not in told


def plan(most: int = 256) -> Plan:
    return Plan(8, most, None, Limits(), Lengths(((1, 1),), ""))


def test_the_fine_scan_lies_around_what_the_doublings_found() -> None:
    points = [Point(8, 210), Point(16, 380), Point(32, 620), Point(64, 655)]
    assert fine_batches(points, plan()) == [24, 40, 48]
    assert fine_batches([Point(8, 100), Point(16, 200)], plan()) == []
    assert fine_batches([Point(8, 100), Point(16, 101)], plan()) == [4, 6, 10, 12]
    full = [Point(8, 100, kv_used_pct=40), Point(16, 200, kv_used_pct=80), Point(32, 400, kv_used_pct=99)]
    assert fine_batches(full, plan()) == [12, 20, 24]


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ((100, 190), False),
        ((100, 105), True),
        ((100, 115), False),  # it did not pay, but by little: one more doubling tells
        ((100, 115, 125), True),
        ((100, 115, 250), False),
    ],
)
def test_doubling_ends_when_it_clearly_does_not_pay(tokens: tuple[float, ...], ends: bool) -> None:
    points = [Point(8 * 2**place, rate) for place, rate in enumerate(tokens)]
    assert enough(points, Limits()) == ends


def test_a_batch_is_measured_with_four_requests_a_slot_and_at_least_32() -> None:
    assert [plan().requests_of(batch) for batch in (1, 8, 64)] == [32, 32, 256]


def test_a_percentile_is_drawn_between_ranks() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
