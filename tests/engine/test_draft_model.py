"""A smaller model guesses: outputs stay those of the large one, drawn ones in distribution, and its cache follows every turn."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import draftmodel
from engine.assembly import assemble
from engine.batch import build
from engine.blocks import BlockPool
from engine.draftmodel import DraftModel
from engine.kvstore import KVStore
from engine.model import Decoder
from engine.request import Request, Sampling
from engine.sampler import distribution
from engine.scheduler import Row, StepPlan
from engine.settings import EngineSettings, SettingsError, check
from tests.engine.checkpoints import write_checkpoint
from tests.engine.fakes import Always, FakeClock, speculate
from tests.engine.running import ThreadServer
from tests.engine.test_cache_variants import CPU, SMALL, engine_with, outputs_of, tiny
from tests.engine.test_sampling import chi_squared, limit


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny(tmp_path_factory.mktemp("large"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Half as deep, and with fewer tokens."""
    return tiny(tmp_path_factory.mktemp("small"), tie_word_embeddings=False, num_hidden_layers=1, vocab_size=260)


def proposer(decoder: Decoder, blocks: int = 400, vocab: int = 264) -> DraftModel:
    return DraftModel(decoder, KVStore(decoder.config, blocks, 4, torch.float32, CPU), BlockPool(blocks, 4), vocab)


@pytest.mark.parametrize("who", ["itself", "another"])
@pytest.mark.parametrize("blocks", [1000, SMALL], ids=["room", "preemptions"])
def test_greedy_output_is_the_large_models(large: Decoder, small: Decoder, blocks: int, who: str) -> None:
    expected, _ = outputs_of(engine_with(large, 1000, prefix_cache=False))
    engine = engine_with(large, blocks)
    guesser = proposer(large if who == "itself" else small)
    stats = speculate(engine, guesser, FakeClock(), 4, Always).stats
    outputs, counters = outputs_of(engine)
    assert outputs == expected
    assert bool(counters.preemptions_total) == (blocks == SMALL)
    assert stats.drafted_total > 100
    if who == "itself":
        assert stats.accepted_total > 0.95 * stats.drafted_total
    else:
        assert stats.accepted_total < stats.drafted_total
    assert guesser.pool.num_taken == 0
    assert guesser._shadows == {}


def test_a_cache_too_small_for_all_costs_guesses_and_nothing_else(large: Decoder) -> None:
    expected, _ = outputs_of(engine_with(large, 1000))
    engine = engine_with(large, 1000)
    guesser = proposer(large, blocks=40)
    stats = speculate(engine, guesser, FakeClock(), 4, Always).stats
    assert outputs_of(engine)[0] == expected
    assert 0 < stats.drafted_total < 900
    assert guesser.pool.num_taken == 0


def test_a_long_prompt_is_read_in_pieces_before_anything_is_guessed(
    large: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draftmodel, "CATCH_UP", 40)
    guesser = proposer(large)
    request = Request("r", [n % 250 for n in range(90)], Sampling(temperature=0.0, max_tokens=9), 0.0)
    short = Request("s", [1, 2, 3], Sampling(temperature=0.0, max_tokens=9), 0.0)
    lengths = [[len(draft.tokens) for draft in guesser.propose([(request, 3), (short, 2)])] for _ in range(4)]
    assert lengths == [[0, 2], [0, 2], [3, 2], [3, 2]]


def test_a_request_with_tokens_that_the_small_model_lacks_gets_no_guess(small: Decoder) -> None:
    guesser = proposer(small)
    request = Request("r", [1, 2, 3], Sampling(temperature=0.0, max_tokens=9), 0.0)
    assert len(guesser.propose([(request, 3)])[0].tokens) == 3
    request.tokens.append(262)
    assert guesser.propose([(request, 3)])[0].tokens == ()
    assert guesser.pool.num_taken == 0


def test_drawn_guesses_say_what_they_were_drawn_from(small: Decoder) -> None:
    guesser = proposer(small)
    request = Request("r", [1, 2, 3], Sampling(temperature=0.8, top_k=7, seed=3, max_tokens=9), 0.0)
    draft = guesser.propose([(request, 3)])[0]
    assert isinstance(draft.odds, torch.Tensor)
    assert draft.odds.shape == (3, 264)
    assert draft.odds.sum(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert ((draft.odds > 0).sum(dim=1) == 7).all()
    assert all(float(odds[token]) > 0 for odds, token in zip(draft.odds, draft.tokens, strict=True))


def test_drawn_outputs_are_distributed_as_the_large_models(large: Decoder, tmp_path: Path) -> None:
    """The first token comes without a guess, the second is guessed and verified: pairs have the large model's probabilities."""
    prompt, how = [7, 8, 9], {"temperature": 1.0, "top_k": 3, "max_tokens": 3, "ignore_eos": True}
    near = tiny(tmp_path, tie_word_embeddings=False, rope_theta=3.0, rms_norm_eps=0.1)  # the same weights, askew
    engine = engine_with(large, 1000)
    stats = speculate(engine, proposer(near), FakeClock(), 4, Always).stats
    requests = [Request(f"r{n}", prompt, Sampling(seed=n, **how), 0.0) for n in range(1500)]  # type: ignore[arg-type]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert 200 < stats.accepted_total < 1400
    seen = Counter(264 * request.output[0] + request.output[1] for request in requests)
    expected = torch.zeros(264 * 264)
    first = probabilities(large, prompt)
    for token in first.nonzero().flatten().tolist():
        second = probabilities(large, [*prompt, token])
        expected[264 * token : 264 * (token + 1)] = first[token] * second
    assert chi_squared(seen, expected) < limit(int((expected > 0).sum()) - 1)


def probabilities(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    request = Request("p", tokens, Sampling(), 0.0)
    request.blocks = [0, 1]
    batch = build(StepPlan(rows=[Row(request, 0, len(tokens))]), 4, torch.float32, CPU)
    with torch.inference_mode():
        x = decoder.forward(batch, KVStore(decoder.config, 2, 4, torch.float32, CPU))
        return distribution(decoder.logits(x)[-1], Sampling(temperature=1.0, top_k=3))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_checkpoint(folder / "large", seed=3), write_checkpoint(folder / "small", seed=4, num_hidden_layers=1)


@pytest.mark.parametrize("speculating", ["ngram", "draft:small", "draft:large"])
def test_a_server_that_speculates_answers_the_same_and_counts_it(folders: tuple[Path, Path], speculating: str) -> None:
    large = folders[0]
    plain = EngineSettings(model=str(large), kv_blocks=64, max_seqs=4, threads=1)
    wanted = speculating.replace("draft:", f"draft:{large.parent}/")
    body = {"prompt": [5, 6, 7, 5, 6, 7, 5, 6], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    texts = []
    for settings in (plain, replace(plain, speculate=wanted)):
        check(settings)
        with ThreadServer(settings) as server:
            texts.append(server.http.post("/v1/completions", json=body).json()["choices"][0]["text"])
            exposed = server.http.get("/metrics").text
            assert ("pairscope_spec_" in exposed) == (settings is not plain)
            if settings is not plain:
                assert server.metric("spec_drafted_total") >= server.metric("spec_drafts_total")
                assert server.metric("spec_accepted_total") <= server.metric("spec_drafted_total")
                assert server.metric("spec_on") in (0.0, 1.0)
    assert texts[0] == texts[1]


def test_a_model_with_other_tokens_is_refused_in_one_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=5)
    told = json.loads((other / "tokenizer.json").read_text())
    vocab = told["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(told))
    settings = EngineSettings(model=str(folders[0]), kv_blocks=64, speculate=f"draft:{other}")

    def quiet(*told: object) -> None:
        pass

    with pytest.raises(SettingsError, match=r"other has other tokens than the model \(4 differ, of 264 and 264\)"):
        assemble(settings, quiet, quiet)


@pytest.mark.parametrize("wanted", ["draft:", "draft", "on", ""])
def test_who_guesses_must_be_known(wanted: str) -> None:
    with pytest.raises(SettingsError, match="choose off, ngram or draft:MODEL"):
        check(EngineSettings(speculate=wanted))
