"""Sampling draws from the distribution that was asked for, and a request's draws are its own."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine.request import Sampling
from engine.sampler import sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0, 1.5, 0.25, -0.25, -1.5, 0.75, -0.75, -2.5, -4.0])


def draws(count: int = 20_000, **wanted: float) -> Counter[int]:
    settings = Sampling(**{"seed": 5, **wanted})  # type: ignore[arg-type]
    rows = LOGITS.expand(500, -1)
    seen: Counter[int] = Counter()
    for begin in range(0, count, 500):
        seen.update(sample(rows, [settings] * 500, range(begin, begin + 500)))
    return seen


def chi_squared(seen: Counter[int], expected: torch.Tensor) -> float:
    total = sum(seen.values())
    assert all(expected[token] > 0 for token in seen), "a token of probability 0 was drawn"
    kept = [token for token in range(len(expected)) if expected[token] > 0]
    return sum((seen[t] - total * float(expected[t])) ** 2 / (total * float(expected[t])) for t in kept)


def limit(freedom: int) -> float:
    """The 99.9 % quantile of chi-squared (Wilson and Hilferty 1931); the draws are fixed by the seed, so no flake."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8, 0.9e-5, 1.1e-5])
def test_a_temperature_close_to_0_draws_the_likeliest_token(temperature: float) -> None:
    assert draws(500, temperature=temperature) == {0: 500}
    assert draws(500, temperature=temperature, top_p=0.9) == {0: 500}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_plain_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    assert chi_squared(draws(temperature=temperature), expected) < limit(15)


def test_top_k_draws_follow_the_softmax_of_the_k_highest() -> None:
    kept = torch.full_like(LOGITS, float("-inf"))
    top = LOGITS.topk(5).indices
    kept[top] = LOGITS[top]
    assert chi_squared(draws(top_k=5), torch.softmax(kept, -1)) < limit(4)


def nucleus(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    """The definition: the smallest set of likeliest tokens whose mass reaches p."""
    order = probabilities.argsort(descending=True)
    kept, mass = torch.zeros_like(probabilities), 0.0
    for token in order:
        kept[token] = probabilities[token]
        mass += float(probabilities[token])
        if mass >= p:
            break
    return kept / kept.sum()


@pytest.mark.parametrize("p", [0.3, 0.8, 0.95])
def test_top_p_draws_follow_the_smallest_set_that_reaches_p(p: float) -> None:
    expected = nucleus(torch.softmax(LOGITS, -1), p)
    assert chi_squared(draws(top_p=p), expected) < limit(max(1, int((expected > 0).sum()) - 1))


def test_top_p_applies_to_what_top_k_has_kept() -> None:
    kept = torch.full_like(LOGITS, float("-inf"))
    top = LOGITS.topk(6).indices
    kept[top] = LOGITS[top]
    expected = nucleus(torch.softmax(kept, -1), 0.8)
    assert chi_squared(draws(top_k=6, top_p=0.8), expected) < limit(int((expected > 0).sum()) - 1)


def test_top_p_is_right_where_the_first_thousand_tokens_do_not_reach_it() -> None:
    flat = torch.zeros(1, 5000)
    tokens = [sample(flat, [Sampling(top_p=0.9, seed=seed)], [0])[0] for seed in range(300)]
    assert len({token // 1000 for token in tokens}) == 5 or max(tokens) > 1024
    assert len(set(tokens)) > 250


def test_temperature_zero_takes_the_highest_and_rows_may_differ_in_kind() -> None:
    greedy, hot = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=1)
    mixed = sample(LOGITS.expand(4, -1), [greedy, hot, greedy, hot], [0, 0, 1, 1])
    assert mixed[0] == mixed[2] == 0
    assert mixed[1] == sample(LOGITS[None], [hot], [0])[0]
    assert mixed[3] == sample(LOGITS[None], [hot], [1])[0]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    values = {uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(values) == 1600
    assert 0.45 < sum(values) / 1600 < 0.55
    assert all(0.0 <= value < 1.0 for value in values)


def test_seeds_are_not_the_same_by_default() -> None:
    assert Sampling().seed != Sampling().seed
