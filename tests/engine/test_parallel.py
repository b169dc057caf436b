"""A model over several processes gives the tokens of one process, says which rank is slow, and ends in one line when a rank is gone."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from engine.assembly import Assembled, assemble
from engine.checkpoints.find import open_checkpoint
from engine.core import Engine, RankLost
from engine.draft import Draft
from engine.modelconfig import ModelConfig
from engine.parallel.messages import packed, unpacked
from engine.parallel.shard import Shard, ShardedCheckpoint, refuse_unfit
from engine.progress import silent
from engine.request import Request, Sampling
from engine.rope import RopeScaling
from engine.scheduler import Row, StepPlan
from engine.settings import EngineSettings, SettingsError
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import WAIT_S, start_process, until

LLAMA = {"num_key_value_heads": 2, "tie_word_embeddings": False, "vocab_size": 265}
QWEN = {"model_type": "qwen2", "num_key_value_heads": 1}  # fewer KV heads than ranks; biases
SMOLLM2 = ModelConfig("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, 1e5, RopeScaling(), True)
PROMPTS = (list(range(5, 60)), [7, 8, 9], [*range(5, 37), 99], list(range(200, 130, -1)))


def settings_for(folder: Path, ranks: int) -> EngineSettings:
    # too few blocks for all, chunked prompts, swapping: the others must follow every kind of plan
    return EngineSettings(
        model=str(folder),
        kv_blocks=9,
        max_seqs=3,
        token_budget=20,
        threads=1,
        preemption="swap",
        tensor_parallel=ranks,
        rank_timeout_s=120.0,  # a busy machine hangs no rank
    )


@contextmanager
def assembled(settings: EngineSettings) -> Iterator[Assembled]:
    made = assemble(settings, silent, lambda line: None)
    try:
        yield made
    finally:
        made.close()


def outputs(
    engine: Engine, mark: str, tokens: int = 40, after_step: Callable[[], None] = lambda: None
) -> list[list[int]]:
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asked = [Request(f"{mark}{number}", prompt, sampling, time.monotonic()) for number, prompt in enumerate(PROMPTS)]
    for request in asked:
        engine.add(request)
    while engine.has_work:
        engine.step()
        after_step()
    return [request.output for request in asked]


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.parallel.worker" in " ".join(child.cmdline())]


def test_two_ranks_that_share_a_kv_head_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **QWEN)
    with assembled(settings_for(folder, 1)) as whole:
        expected = outputs(whole.engine, "a")
    with assembled(settings_for(folder, 2)) as split:
        assert split.cache.bytes_per_token == whole.cache.bytes_per_token
        assert outputs(split.engine, "a") == expected
    assert workers() == []


def test_two_ranks_give_the_tokens_of_one_say_which_is_slow_and_miss_one_that_hangs(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **LLAMA)
    with assembled(settings_for(folder, 1)) as whole:
        expected = outputs(whole.engine, "a")
        assert whole.engine.stats.counters.preemptions_swap_total > 0
        assert whole.engine.stats.ranks == ()
    with assembled(settings_for(folder, 2)) as split:
        engine = split.engine
        assert split.cache.bytes_per_token * 2 == whole.cache.bytes_per_token
        assert outputs(engine, "a") == expected
        first, second = engine.stats.ranks
        assert second.steps <= first.steps == engine.stats.counters.steps_total
        assert min(rank.compute_s for rank in engine.stats.ranks) > 0
        slow_first_rank(engine)
        steps: list[list[float]] = []
        outputs(engine, "b", 20, lambda: steps.append([s for r in engine.stats.ranks for s in (r.compute_s, r.wait_s)]))
        # of most steps: in any one a busy machine may have kept a rank from computing
        own, waited, others_own, others_waited = (
            statistics.median(after - before for before, after in itertools.pairwise(spent))
            for spent in zip(*steps, strict=True)
        )
        assert own > 2 * others_own
        assert others_waited > 2 * waited
        (other,) = workers()
        c10d._set_pg_timeout(timedelta(seconds=3), torch.distributed.group.WORLD)  # rank_timeout_s, of what comes now
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(RankLost, match="a rank did not answer in time"):
            outputs(engine, "c")
    assert workers() == []


def slow_first_rank(engine: Engine) -> None:
    """As if its GPU were throttled: 50 ms more in a step's own work."""
    runner: Any = engine._runner
    decoder = runner._inner.decoder
    forward = decoder.forward

    def slow_forward(*arguments: Any) -> torch.Tensor:
        time.sleep(0.05)
        done: torch.Tensor = forward(*arguments)
        return done

    decoder.forward = slow_forward


def test_a_rank_that_is_killed_ends_the_engine_in_one_line_with_exit_code_1(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    settings = {"model": str(folder), "port": 0, "kv_blocks": 64, "threads": 1, "tensor_parallel": 2, "max_seqs": 1}
    process = start_process(settings)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        url = ready.split()[-1]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 5}, timeout=WAIT_S)
        assert answer.status_code == 200
        text = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
        for name in ("steps", "compute_seconds", "wait_seconds"):
            for rank in "01":
                assert f'pairscope_rank_{name}_total{{model_name="{tmp_path.name}",rank="{rank}"}} ' in text
        assert httpx.post(f"{url}/kv/migrate", json={}).json()["error"]["message"].startswith("with tensor_parallel")
        (other,) = psutil.Process(process.pid).children()
        os.kill(other.pid, signal.SIGKILL)  # while nothing runs: it is missed all the same
        _, errors = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "Traceback" not in errors
    line = "rank 1 of 2 has ended (signal 9), and the model's other parts with it"
    assert [said for said in errors.splitlines() if line in said] == [
        f"CRITICAL:pairscope.engine:the engine loop died: {line}"
    ]
    until(lambda: not psutil.pid_exists(other.pid), "no process is left")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tensor_parallel": 3}, "4 attention heads, 2 KV heads and an MLP of 48 can't be split evenly over 3 ranks; "),
        (
            {"tensor_parallel": 2, "quantize": "int8"},
            "quantize is 'int8': its cost in quality is measured on a whole model",
        ),
    ],
)
def test_what_cant_be_split_is_refused_before_any_process_starts(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    settings = replace(settings_for(write_checkpoint(tmp_path), 1), **change)
    with pytest.raises(SettingsError, match=line.replace("(", "\\(")):
        assemble(settings, silent, lambda told: None)
    assert workers() == []


def test_a_model_of_nine_heads_says_how_many_ranks_it_takes() -> None:
    with pytest.raises(SettingsError) as refused:
        refuse_unfit(SMOLLM2, 2)
    assert str(refused.value) == (
        "tensor_parallel is 2: 9 attention heads, 3 KV heads and an MLP of 1536 can't be split evenly over 2 ranks; "
        "this model takes 1 or 3"
    )
    refuse_unfit(SMOLLM2, 3)


def test_the_ranks_parts_make_the_whole_and_each_bias_is_added_once(tmp_path: Path) -> None:
    whole = open_checkpoint(write_checkpoint(tmp_path, **QWEN))
    parts = [ShardedCheckpoint(whole, Shard(rank, 2)) for rank in range(2)]
    for name, dim in (("q_proj.weight", 0), ("q_proj.bias", 0), ("o_proj.weight", 1)):
        name = f"model.layers.1.self_attn.{name}"
        assert torch.equal(torch.cat([part.tensor(name) for part in parts], dim), whole.tensor(name))
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        name = f"model.layers.1.mlp.{name}.weight"
        assert torch.equal(torch.cat([part.tensor(name) for part in parts], dim), whole.tensor(name))
    for part in parts:  # the one KV head, twice
        assert torch.equal(
            part.tensor("model.layers.0.self_attn.k_proj.weight"),
            whole.tensor("model.layers.0.self_attn.k_proj.weight"),
        )
        assert (part.config.num_heads, part.config.num_kv_heads, part.config.intermediate) == (2, 1, 24)
        assert torch.equal(part.tensor("model.norm.weight"), whole.tensor("model.norm.weight"))


def test_a_plan_arrives_as_it_was() -> None:
    sampling = Sampling(seed=0)
    long, short = Request("a", [11, 12, 13, 14, 15], sampling, 0.0), Request("b", [21], sampling, 0.0)
    guessed = Request("c", [31, 32], sampling, 0.0)
    long.blocks, short.blocks, guessed.blocks = [4, 2], [9], [6]
    rows = [Row(long, 1, 3), Row(short, 0, 1), Row(guessed, 1, 3, Draft((33, 34)))]
    plan = StepPlan(rows, swap_out=[(1, 2), (3, 4)], swap_in=[(7, 8)])
    got = unpacked(packed(plan))
    assert [(row.start, row.count, row.samples, row.request.blocks) for row in got.rows] == [
        (1, 3, False, [4, 2]),
        (0, 1, True, [9]),
        (1, 3, True, [6]),
    ]
    assert [row.tokens for row in got.rows] == [row.tokens for row in rows] == [[12, 13, 14], [21], [32, 33, 34]]
    assert [row.num_samples for row in got.rows] == [0, 1, 3]
    assert (got.swap_out, got.swap_in) == ([(1, 2), (3, 4)], [(7, 8)])
