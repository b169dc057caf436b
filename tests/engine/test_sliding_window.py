"""Where no layer looks back further than a window, blocks before it are free while their request runs, and nothing else changes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import Assembled, assemble
from engine.request import Request, Sampling
from engine.settings import EngineSettings
from tests.engine.checkpoints import write_checkpoint
from tests.engine.fakes import Always, ask, expected_output, make, run_out
from tests.engine.running import ThreadServer, until

WINDOW, NEW_TOKENS = 13, 60
LENGTHS = (3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5, 12, 13, 14, 40, 90, 91)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("mistral"), seed=9, model_type="mistral", sliding_window=WINDOW, num_hidden_layers=3
    )


def prompts() -> list[list[int]]:
    """Two of them begin alike."""
    made = [[(7 * at + 31 * number) % 250 for at in range(length)] for number, length in enumerate(LENGTHS)]
    return [*made[:-1], made[-2][:64] + made[-1][64:]]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What transformers says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                following = model(ids, use_cache=False).logits[0, -1].argmax()
                ids = torch.cat([ids, following.view(1, 1)], dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def assembled(folder: Path, **how: Any) -> Assembled:
    settings = EngineSettings(
        model=str(folder), **({"block_size": 4, "max_seqs": 16, "token_budget": 32, "kv_blocks": 400} | how)
    )
    return assemble(settings, lambda stage, done, detail="": None, lambda line: None)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"prefix_cache": False},
        {"kv_blocks": 40},
        {"kv_blocks": 40, "preemption": "swap"},
        {"kv_layout": "contiguous", "kv_blocks": 1024},
        {"speculate": "ngram"},
    ],
    ids=["pages", "no prefix cache", "preempted", "swapped", "contiguous", "guesses"],
)
def test_outputs_are_those_of_transformers_with_the_window(
    how: dict[str, Any], folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.speculation.Payoff", Always)
    engine = assembled(folder, **how).engine
    scheduler = engine.scheduler
    sampling = Sampling(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(f"r{n}", prompt, sampling, time.monotonic()) for n, prompt in enumerate(prompts())]
    for request in requests:
        engine.add(request)
    most_held = 0
    while engine.has_work:
        engine.step()
        scheduler.check()
        most_held = max([most_held, *(len(r.held_blocks) for r in scheduler.running if r.num_computed > 100)])
    assert [request.output for request in requests] == expected
    counters = engine.stats.counters
    if how.get("kv_layout") == "contiguous":
        assert most_held * 4 > 150  # an extent, whatever of it is still read
        return
    assert 0 < most_held <= 4 + 3  # thirteen tokens, and guesses
    assert scheduler.pool.num_taken == 0
    if how.get("kv_blocks") == 40:
        assert counters.preemptions_total > 0
        assert (counters.swap_in_blocks_total > 0) == ("preemption" in how)


def test_a_model_with_layers_that_see_everything_keeps_all_blocks(tmp_path: Path) -> None:
    mixed = write_checkpoint(
        tmp_path, model_type="gemma2", head_dim=16, sliding_window=WINDOW, hidden_activation="gelu_pytorch_tanh"
    )
    scheduler = assembled(mixed).engine.scheduler
    assert scheduler.window is None


def test_a_long_answer_holds_no_more_than_its_window_and_its_beginning_can_still_be_found() -> None:
    engine, _, clock = make(blocks=60, block_size=4, context=200, prefix_cache=True, window=8)
    first = ask("a", list(range(100, 140)), 120, clock)
    engine.add(first)
    held = []
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        held.append(engine.scheduler.pool.num_taken)
    assert max(held) <= 10 and held[100] == 3
    assert first.output == expected_output(first)
    second = ask("b", list(range(100, 140)), 3, clock)
    engine.add(second)
    engine.step()
    assert engine.stats.counters.prefix_hits_total == 36
    run_out(engine)
    assert second.output == expected_output(second)


def test_what_was_left_behind_makes_room_for_others() -> None:
    """Three requests of 25 blocks each in a pool of 32: without a window they would preempt each other."""
    for window, preempted in ((8, False), (None, True)):
        engine, _, clock = make(blocks=32, block_size=4, context=128, window=window)
        requests = [ask(f"r{n}", 20, 80, clock) for n in range(3)]
        for request in requests:
            engine.add(request)
        run_out(engine)
        assert all(request.output == expected_output(request) for request in requests)
        assert (engine.stats.counters.preemptions_total > 0) is preempted


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[ThreadServer, ThreadServer]]:
    settings = EngineSettings(model=str(folder), model_name="tiny", block_size=4, kv_blocks=400, max_seqs=8, port=0)
    with ThreadServer(settings) as source, ThreadServer(settings) as target:
        yield source, target


def test_a_request_that_has_left_blocks_behind_moves_without_its_cache(
    pair: tuple[ThreadServer, ThreadServer],
) -> None:
    source, target = pair
    asked = {"prompt": [5, 6, 7], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    whole = source.http.post("/v1/completions", json=asked | {"stream": False}).json()["choices"][0]["text"]

    def pieces(lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            if line.startswith("data: {"):
                yield from (choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"])

    with source.http.stream("POST", "/v1/completions", json=asked) as answer:
        texts = pieces(answer.iter_lines())
        text = "".join(next(texts) for _ in range(40))
        (running,) = until(lambda: source.http.get("/kv/requests").json()["requests"], "it runs")
        moved = source.http.post("/kv/migrate", json={"target": target.url, "request": running["id"]}).text
        text += "".join(texts)
    assert text == whole
    done = json.loads(moved.splitlines()[-1])["migrated"]
    assert (done["request"], done["bytes"]) == (running["id"], 0)
    assert target.service.engine.stats.counters.requests_migrated_in_total == 1
    for server in pair:
        until(lambda server=server: server.service.engine.scheduler.pool.num_taken == 0, "all blocks are free")  # type: ignore[misc]
