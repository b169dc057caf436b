"""The default model gives the same greedy tokens as transformers does with the same weights, alone and in any mix."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.assembly import Assembled, assemble
from engine.batch import build
from engine.blocks import BlockPool
from engine.checkpoints.find import find_model
from engine.kvstore import KVStore
from engine.ngram import NGram
from engine.queue import FirstCome
from engine.request import Request, Sampling
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.settings import EngineSettings
from tests.engine.fakes import Always, FakeClock, speculate

pytestmark = pytest.mark.timeout(1800)  # two models are loaded first, which takes its time on a busy machine
NEW_TOKENS = 24
LENGTHS = (5, 7, 9, 12, 16, 17, 23, 32, 33, 48, 64, 65, 128, 150, 200, 255, 257, 300, 512, 700)
TIE = 1e-3
"""Logits so near to each other may be swapped by rounding: then both tokens are right."""
SETTINGS = EngineSettings(kv_blocks=400, max_seqs=32, token_budget=256)


@dataclass(frozen=True, slots=True)
class Reference:
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # between the two highest logits, at each step


@pytest.fixture(scope="module")
def assembled() -> Assembled:
    return assemble(SETTINGS, lambda *told: None, lambda line: None)


@pytest.fixture(scope="module")
def prompts(assembled: Assembled) -> list[list[int]]:
    return _prompts(assembled)


@pytest.fixture(scope="module")
def alone(assembled: Assembled, prompts: list[list[int]]) -> list[list[int]]:
    """What each prompt gets when nothing else runs."""
    return [_run(assembled, [prompt])[0] for prompt in prompts]


@pytest.fixture(scope="module")
def together(assembled: Assembled, prompts: list[list[int]]) -> list[list[int]]:
    """What they get all at once."""
    return _run(assembled, prompts)


@pytest.fixture(scope="module")
def references(prompts: list[list[int]], alone: list[list[int]]) -> list[Reference]:
    """What transformers' greedy generation gives for each prompt, on its own; computed once, float32."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = find_model(SETTINGS.model)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return [_reference(model, prompt, likely) for prompt, likely in zip(prompts, alone, strict=True)]


def _prompts(assembled: Assembled) -> list[list[int]]:
    """Licence text, program text, chat and Chinese, cut to the wanted numbers of tokens."""
    root = Path(__file__).parents[2]
    chat = "<|im_start|>user\nExplain why the sky is blue, in two sentences.<|im_end|>\n<|im_start|>assistant\n"
    chinese = "人工智能正在改变世界。今天我们来讨论数据中心的功耗与散热问题,以及如何提高推理吞吐量。"
    texts = [
        (root / "LICENSE").read_text("utf-8"),
        (root / "telemetry" / "store" / "interface.py").read_text("utf-8") * 3,
        chat * 40,
        chinese * 30,
        "Once upon a time, in a small village by the sea, there lived an old clockmaker. " * 60,
    ]
    ids = [assembled.tokenizer.encode(text) for text in texts]
    prompts = []
    for number, length in enumerate(LENGTHS):
        source = ids[number % len(ids)]
        begin = (37 * number) % max(1, min(200, len(source) - length))
        prompts.append(source[begin : begin + length])
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    return prompts


def _reference(model: torch.nn.Module, prompt: list[int], likely: list[int]) -> Reference:
    """Greedy generation takes the highest logit again and again. Where `likely` has it everywhere, which one pass over all of it
    tells, it is what generation gives; else that is asked, a pass a token.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + likely[:-1]]), logits_to_keep=NEW_TOKENS).logits[0]
    if logits.argmax(-1).tolist() != likely:
        return _generated(model, prompt)
    return Reference(prompt, likely, [float(one - other) for one, other in logits.topk(2).values])


def _generated(model: torch.nn.Module, prompt: list[int]) -> Reference:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        result = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=[model.config.vocab_size + 1],  # type: ignore[union-attr,operator]
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    top = [logits[0].topk(2).values for logits in result.logits]
    return Reference(prompt, result.sequences[0, len(prompt) :].tolist(), [float(t[0] - t[1]) for t in top])


def _run(assembled: Assembled, prompts: Sequence[list[int]], cached: bool = False) -> list[list[int]]:
    """All prompts at once through the engine, with nothing in the prefix cache unless `cached`; the block ledger is checked
    after every step.
    """
    engine = assembled.engine
    if not cached:
        engine.scheduler.pool.forget()
    sampling = Sampling(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(f"t{n}", prompt, sampling, time.monotonic()) for n, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return [request.output for request in requests]


def _compare(references: Sequence[Reference], outputs: Sequence[list[int]]) -> int:
    """How many outputs are equal to the end. Fails at a divergence that is not a tie of the reference itself."""
    equal = 0
    for reference, output in zip(references, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        differ = [at for at in range(NEW_TOKENS) if output[at] != reference.tokens[at]]
        equal += not differ
        if differ:
            gap = reference.gaps[differ[0]]
            assert gap <= TIE, (
                f"prompt of {len(reference.prompt)} tokens differs at output {differ[0]}, where the reference's "
                f"two highest logits are {gap:.4f} apart"
            )
    return equal


def test_alone_every_prompt_gets_the_tokens_of_transformers(
    references: list[Reference], alone: list[list[int]]
) -> None:
    assert _compare(references, alone) >= len(references) - 2


def test_in_one_mixed_batch_every_prompt_gets_the_tokens_of_transformers(
    references: list[Reference], together: list[list[int]]
) -> None:
    assert _compare(references, together) >= len(references) - 2


def test_guessed_tokens_leave_every_prompt_its_tokens(
    assembled: Assembled, prompts: list[list[int]], alone: list[list[int]], together: list[list[int]]
) -> None:
    """Alone and all at once: those that it gets without guesses."""
    engine = assembled.engine
    stats = speculate(engine, NGram(2, 4), FakeClock(), 8, Always).stats
    try:
        with_guesses = [[_run(assembled, [prompt])[0] for prompt in prompts], _run(assembled, prompts)]
    finally:
        engine.speculate(None)
    assert with_guesses == [alone, together]
    assert 20 < stats.accepted_total < stats.drafted_total


def test_with_small_chunks_and_preemptions_every_prompt_gets_the_tokens_of_transformers(
    assembled: Assembled, references: list[Reference]
) -> None:
    """A pool that can't hold them all, small blocks, and prompts cut into odd chunks that share steps with decoding."""
    engine = assembled.engine
    runner = engine._runner
    assert isinstance(runner, Runner)
    roomy = engine.scheduler
    before = engine.stats.counters.preemptions_total
    engine.scheduler = Scheduler(BlockPool(64, 4), FirstCome(), 12, 41, SETTINGS.stream_buffer)
    cache = KVStore(assembled.config, 64, 4, torch.float32, torch.device("cpu"))
    engine._runner = Runner(runner.decoder, cache, runner.threads)
    small = [reference for reference in references if len(reference.prompt) <= 200]
    try:
        outputs = _run(assembled, [reference.prompt for reference in small])
    finally:
        engine.scheduler, engine._runner = roomy, runner
    assert engine.stats.counters.preemptions_total > before
    assert _compare(small, outputs) >= len(small) - 2


def test_with_prompts_and_outputs_in_the_prefix_cache_every_prompt_gets_the_tokens_of_transformers(
    assembled: Assembled, references: list[Reference]
) -> None:
    some = references[::3]
    longer = [reference.prompt + reference.tokens[:9] for reference in some]  # a text that goes on where an output was
    _run(assembled, [reference.prompt for reference in some])
    counters = assembled.engine.stats.counters
    hits, queries = counters.prefix_hits_total, counters.prefix_queries_total
    outputs = _run(assembled, longer, cached=True)
    assert counters.prefix_hits_total - hits > 0.9 * (counters.prefix_queries_total - queries)
    wholes = [reference.tokens[:9] + output[: NEW_TOKENS - 9] for reference, output in zip(some, outputs, strict=True)]
    assert _compare(some, wholes) >= len(some) - 1


def test_two_sequences_with_the_same_prompt_get_the_same_tokens(
    assembled: Assembled, references: list[Reference]
) -> None:
    first, second = _run(assembled, [references[8].prompt] * 2)
    assert first == second


def _distributions(assembled: Assembled, tokens: list[int], int8: bool) -> torch.Tensor:
    """Log-probabilities after each of `tokens`, computed in chunks of 16 onto a cache: nearly all that is read was kept."""
    runner = assembled.engine._runner
    assert isinstance(runner, Runner)
    cache = KVStore(assembled.config, 32, 16, torch.float32, torch.device("cpu"), int8)
    scheduler = Scheduler(BlockPool(32, 16), FirstCome(), 1, 1000, 256)
    request = Request("a", tokens[:16], Sampling(), 0.0)
    scheduler.add(request)
    rows = []
    with torch.inference_mode():
        while request.num_computed < len(tokens):
            request.tokens = tokens[: request.num_computed + 16]
            plan = scheduler.schedule()
            batch = build(plan, 16, torch.float32, torch.device("cpu"), runner.decoder.head.padded)
            rows.append(runner.decoder.logits(runner.decoder.forward(batch, cache)))
            scheduler.computed(plan.rows[0])
    return torch.cat(rows).log_softmax(-1)


def test_a_cache_in_8_bits_hardly_changes_what_the_model_says(assembled: Assembled) -> None:
    tokens = assembled.tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text("utf-8"))[:320]
    exact, near = (_distributions(assembled, tokens, int8) for int8 in (False, True))
    divergence = (exact.exp() * (exact - near)).sum(-1).mean()  # Kullback-Leibler, nats a token
    assert 0 < float(divergence) < 0.01
    assert float((exact.argmax(-1) == near.argmax(-1)).float().mean()) > 0.96
    text = torch.tensor(tokens[1:])
    gains = [float(side[:-1].gather(1, text[:, None]).mean()) for side in (exact, near)]
    assert abs(gains[0] - gains[1]) < 0.01  # perplexity within 1 %
