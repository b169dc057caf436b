"""Guessed tokens change when an output comes, never what it is; and they are guessed only where that pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from engine.draft import NO_DRAFT, Draft
from engine.ngram import NGram
from engine.payoff import LONGEST_PAUSE, PAUSE, PLAIN_EVERY, PLAIN_FIRST, TRIAL, Payoff
from engine.request import Finish, Request, Sampling
from engine.sampler import distribution, sample
from engine.scheduler import Row
from engine.speculation import Speculation
from engine.stats import SpeculationStats
from engine.verification import by_rejection, choose
from tests.engine.fakes import FakeClock, Oracle, ask, expected_output, make, next_token, run_out, speculate
from tests.engine.test_sampling import chi_squared, limit

# -- guesses from the text ----------------------------------------------------------------------------------------------


def guess(tokens: Sequence[int], most: int = 4, least: int = 2, longest: int = 4) -> tuple[int, ...]:
    request = Request("r", tokens, Sampling(), 0.0)
    return NGram(least, longest).propose([(request, most)])[0].tokens


def test_what_followed_the_same_tokens_before_is_guessed() -> None:
    assert guess([1, 2, 3, 4, 5, 6, 9, 2, 3]) == (4, 5, 6, 9)


def test_a_longer_match_counts_for_more_than_a_later_one() -> None:
    assert guess([7, 1, 2, 30, 31, 8, 1, 2, 40, 41, 7, 1, 2], most=2) == (30, 31)


def test_of_equally_long_matches_the_latest_counts() -> None:
    assert guess([1, 2, 30, 1, 2, 40, 1, 2], most=1) == (40,)


def test_a_period_goes_on_beyond_the_end_of_the_text() -> None:
    assert guess([5, 1, 2, 3, 1, 2, 3], most=8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert guess([9, 9, 9], most=3) == (9, 9, 9)


def test_without_a_match_long_enough_nothing_is_guessed() -> None:
    assert guess([1, 2, 3, 4]) == ()
    assert guess([3, 1, 2, 3]) == ()
    assert guess([1]) == guess([1, 1]) == ()


def test_bytes_that_match_across_two_tokens_are_no_match() -> None:
    # 0x01000000 0x01000000 holds the bytes of 0x00000001 twice, none of them at a token's place
    assert guess([0x01000000, 0x01000000, 0x00010000, 5, 1, 1, 5, 0], least=2) == ()
    assert guess([256, 0, 65536, 77, 0, 1, 0], least=2, longest=2) == ()


def test_a_text_that_grows_is_searched_to_its_new_end_and_forgotten_with_its_request() -> None:
    proposer = NGram(2, 4)
    request = Request("r", [1, 2, 3, 4, 8], Sampling(), 0.0)
    assert proposer.propose([(request, 2)]) == [NO_DRAFT]
    request.tokens += [1, 2]
    assert proposer.propose([(request, 2)]) == [Draft((3, 4))]
    proposer.forget("r")
    assert proposer.propose([(Request("r", [4, 4], Sampling(), 0.0), 2)]) == [NO_DRAFT]


# -- within the engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_outputs_are_the_same_however_good_the_guesses_are(right: float) -> None:
    engine, runner, clock = make(blocks=200, max_seqs=4, budget=40, prefix_cache=True)
    oracle = Oracle(right=right)
    stats = speculate(engine, oracle, clock).stats
    requests = [ask(f"r{n}", 10 + n, 90 + n, clock) for n in range(6)]
    for request in requests:
        engine.add(request)
    run_out(engine)
    assert [request.output for request in requests] == [expected_output(request) for request in requests]
    assert stats.drafted_total > 20
    assert (stats.accepted_total == stats.drafted_total) == (right == 1.0)
    assert (stats.accepted_total == 0) == (right == 0.0)
    assert engine.stats.counters.generation_tokens_total == sum(r.num_output for r in requests)
    assert engine.scheduler.pool.num_taken == 0
    assert oracle.known == set()
    if right == 1.0:
        assert runner.steps < 120


def test_an_output_ends_within_a_draft_where_it_would_have_ended_without() -> None:
    for length in range(5, 30):
        engine, _, clock = make()
        speculate(engine, Oracle(right=1.0), clock)
        request = ask("r", 3, length, clock)
        engine.add(request)
        run_out(engine)
        assert request.output == expected_output(request)
        assert request.finish is Finish.LENGTH


def test_an_end_token_within_a_draft_ends_the_output_and_what_was_guessed_after_it_is_dropped() -> None:
    clock = FakeClock()
    ghost = ask("r", 3, 60, clock)
    expected = expected_output(ghost)
    place = next(n for n in range(25, 60) if expected.index(expected[n]) == n)
    engine, _, clock = make(prefix_cache=True)
    engine._end_tokens = frozenset([expected[place]])
    stats = speculate(engine, Oracle(right=1.0), clock).stats
    request = Request("r", [5] * 3, Sampling(max_tokens=60), clock())
    engine.add(request)
    outputs = run_out(engine)
    assert request.output == expected[: place + 1]
    assert outputs[-1].finish is Finish.STOP
    assert sum(output.tokens for output in outputs) == place + 1
    assert engine.stats.counters.generation_tokens_total == place + 1
    assert stats.accepted_total > 10


def test_guesses_take_no_token_and_no_block_from_real_work() -> None:
    engine, _, clock = make(blocks=12, block_size=4, max_seqs=3, budget=8)
    first, second = ask("a", 15, 9, clock), ask("b", 15, 9, clock)
    engine.add(first)
    engine.add(second)
    while first.num_output < 2 or second.num_output < 2:
        engine.step()
    assert engine.scheduler.pool.num_free == 3
    drafts = {r.id: Draft(tuple(next_token(r, n) for n in range(7))) for r in (first, second)}
    engine.add(ask("c", 3, 1, clock))
    plan = engine.scheduler.schedule(drafts)
    assert not plan.preempted
    assert [(row.request.id, row.known_end - row.start) for row in plan.rows][:2] == [("a", 1), ("b", 1)]
    assert plan.num_tokens <= 8
    assert sum(len(row.draft.tokens) for row in plan.rows) == 8 - sum(row.known_end - row.start for row in plan.rows)
    engine.scheduler.check()


def test_blocks_of_wrong_guesses_are_free_after_the_step_and_nobody_finds_them() -> None:
    engine, _, clock = make(blocks=50, block_size=4, prefix_cache=True, budget=40)
    request = ask("r", 7, 30, clock)
    engine.add(request)
    engine.step()
    speculation = speculate(engine, Oracle(right=0.0), clock, most=16)
    for _ in range(PLAIN_FIRST + 3):
        engine.step()
        assert len(request.blocks) == engine.scheduler.pool.blocks_for(request.num_computed)
        assert engine.stats.occupancy.slots_written == request.num_computed
    assert speculation.stats.drafted_total > 3
    assert engine.scheduler.pool.num_cached == 0
    assert len(engine.scheduler.pool._names) == request.num_computed // 4


def test_several_tokens_of_one_step_share_its_time() -> None:
    engine, runner, clock = make(budget=40)
    speculate(engine, Oracle(right=1.0), clock)
    request = ask("r", 3, 40, clock)
    engine.add(request)
    while engine.has_work:
        clock.now += runner.step_s
        engine.step()
    gaps = engine.stats.inter_token_latency
    assert gaps.count == 39
    assert gaps.sum == pytest.approx((runner.steps - 1) * runner.step_s)
    assert runner.steps < 35


# -- who is guessed for ------------------------------------------------------------------------------------------------


def test_free_guesses_are_computed_only_after_they_came_true() -> None:
    engine, _, clock = make()
    stats = speculate(engine, Oracle(right=0.0, free=True), clock).stats
    engine.add(ask("r", 3, 80, clock))
    run_out(engine)
    assert stats.drafted_total == 0
    speculate(engine, Oracle(right=1.0, free=True), clock)
    engine.add(ask("q", 3, 80, clock))
    run_out(engine)
    assert engine.stats.speculation is not None
    assert engine.stats.speculation.accepted_total == engine.stats.speculation.drafted_total > 40


def test_a_draft_grows_while_it_is_right_and_shrinks_to_what_was_right() -> None:
    speculation = Speculation(Oracle(), 8, 1000, SpeculationStats(), FakeClock())
    record = speculation._new_record()
    record.length = 1
    lengths = []
    for accepted, drafted in ((1, 1), (2, 2), (4, 4), (8, 8), (3, 8), (0, 4), (0, 1)):
        record.judge(accepted, drafted, 8)
        lengths.append(record.length)
    assert lengths == [2, 4, 8, 8, 4, 1, 1]


# -- whether it pays ---------------------------------------------------------------------------------------------------


def trial(payoff: Payoff, seconds: float, tokens: float) -> int:
    """Steps with drafts until it wants none any more, at most a hundred."""
    for steps in range(100):
        if not payoff.wants_drafts():
            return steps
        payoff.drafted(seconds, tokens)
    return 100


def rest(payoff: Payoff) -> int:
    """Steps without drafts until it wants some again."""
    for steps in range(5000):
        if payoff.wants_drafts():
            return steps
        payoff.plain(1.0)
    raise AssertionError("speculation never comes back")


def test_nothing_is_drafted_before_steps_without_drafts_are_known() -> None:
    assert rest(Payoff()) == PLAIN_FIRST


def test_what_pays_stays_on_but_for_a_step_now_and_then() -> None:
    payoff = Payoff()
    rest(payoff)
    assert trial(payoff, 1.2, 2.0) == PLAIN_EVERY
    assert payoff.on
    assert payoff.speedup == pytest.approx(2 / 1.2)
    assert rest(payoff) == 1
    assert trial(payoff, 1.2, 2.0) == PLAIN_EVERY


def test_what_costs_more_than_it_brings_is_switched_off_and_tried_again_ever_more_seldom() -> None:
    payoff = Payoff()
    rest(payoff)
    pauses = []
    for _ in range(8):
        assert trial(payoff, 1.3, 1.2) == TRIAL
        assert not payoff.on
        pauses.append(rest(payoff))
    assert pauses == [min(PAUSE * 2**n, LONGEST_PAUSE) for n in range(8)]
    assert trial(payoff, 1.2, 2.4) == PLAIN_EVERY
    payoff.plain(1.0)
    assert trial(payoff, 3.0, 1.0) < PLAIN_EVERY
    assert rest(payoff) == PAUSE


def test_a_hopeless_trial_ends_early() -> None:
    payoff = Payoff()
    rest(payoff)
    assert trial(payoff, 4.0, 1.0) == TRIAL // 3


def test_what_is_neither_good_nor_bad_is_not_switched_off_once_it_was_kept() -> None:
    payoff = Payoff()
    rest(payoff)
    trial(payoff, 1.0, 1.2)
    for _ in range(5):
        payoff.plain(1.0)
        assert trial(payoff, 1.0, 1.02) == PLAIN_EVERY
    assert payoff.on


def test_one_slow_step_does_not_end_it() -> None:
    payoff = Payoff()
    rest(payoff)
    trial(payoff, 1.0, 2.0)
    payoff.plain(1.0)
    payoff.drafted(60.0, 2.0)
    assert payoff.on


def test_the_engine_stops_guessing_where_steps_with_drafts_take_too_long_and_says_so() -> None:
    engine, runner, clock = make(blocks=900, budget=40)
    lines: list[str] = []
    speculation = Speculation(Oracle(right=0.5), 4, 10_000, SpeculationStats(), clock, lines.append)
    engine.speculate(speculation)
    engine.add(ask("r", 3, 120, clock))
    plain_run = runner.run

    def run(plan):  # type: ignore[no-untyped-def]
        runner.step_s = 0.01 * plan.num_tokens**2
        return plain_run(plan)

    runner.run = run  # type: ignore[method-assign]
    run_out(engine)
    assert not speculation.stats.on
    assert speculation.stats.speedup is not None
    assert speculation.stats.speedup < 1
    assert "speculation is off with 1 decoding" in lines[0]
    assert speculation.stats.drafts_total <= 3 * TRIAL


# -- exactness of draws ------------------------------------------------------------------------------------------------

P = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.25])
Q = torch.tensor([0.0, 2.0, 0.5, 1.0, -2.5, -1.0, -1.5, 1.25])


def draws_by_rejection(
    sampling: dict[str, float], tokens: int, count: int = 8_000
) -> tuple[Counter[int], Counter[int]]:
    """First and last tokens of runs in which drafts of `tokens` tokens were drawn from Q and verified against P."""
    first: Counter[int] = Counter()
    after: Counter[int] = Counter()
    for seed in range(count):
        how = Sampling(seed=seed, **sampling)  # type: ignore[arg-type]
        odds = distribution(Q, how)
        drawn = [sample(Q[None], [Sampling(seed=-seed - 1, **sampling)], [n])[0] for n in range(tokens)]  # type: ignore[arg-type]
        got = by_rejection(P.expand(tokens + 1, -1), Draft(tuple(drawn), odds.expand(tokens, -1)), how, 0)
        first[got[0]] += 1
        if len(got) == tokens + 1:
            after[got[-1]] += 1
    return first, after


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 4}])
def test_verified_drafts_are_distributed_as_the_models_own_draws(sampling: dict[str, float]) -> None:
    expected = distribution(P, Sampling(**sampling))  # type: ignore[arg-type]
    assert float(expected.sum()) == pytest.approx(1.0)
    assert float((expected - distribution(Q, Sampling(**sampling))).abs().sum()) > 0.5  # type: ignore[arg-type]
    first, after = draws_by_rejection(sampling, 2)
    freedom = int((expected > 0).sum()) - 1
    assert chi_squared(first, expected) < limit(freedom)
    assert sum(after.values()) > 250
    assert chi_squared(after, expected) < limit(freedom)


def test_a_draft_from_the_models_own_distribution_is_nearly_always_accepted() -> None:
    how = Sampling(seed=3)
    own = distribution(P, how)
    got = by_rejection(P.expand(8, -1), Draft((0, 1, 2, 3, 6, 7, 0), own.expand(7, -1)), how, 0)
    assert got[:7] == [0, 1, 2, 3, 6, 7, 0]


def test_a_drawn_output_is_the_same_with_guesses_as_without() -> None:
    """A guess without odds is judged by the draw that its place gets in any case."""
    for seed in range(40):
        sampling = Sampling(temperature=1.0, seed=seed)
        request = Request("r", [1, 2, 3], sampling, 0.0)
        plain = sample(P.expand(5, -1), [sampling] * 5, range(5))
        for right in range(5):
            tokens = (*plain[:right], *(7 - token for token in plain[right:4]))[:4]
            row = Row(request, 2, 1 + len(tokens), Draft(tokens))
            assert [token for _, token in choose(P.expand(5, -1), [row])] == plain[: min(right, 4) + 1]


def test_rows_with_and_without_drafts_and_odds_are_told_apart() -> None:
    plain, guessed, drawn = (Request(name, [1, 2], Sampling(temperature=0.0), 0.0) for name in "abc")
    hot = Request("d", [1, 2], Sampling(seed=4), 0.0)
    certain = torch.full((2, 8), 0.0)
    certain[:, 5] = 1.0  # a guess that the model gives little: it is refused most times
    rows = [
        Row(plain, 1, 1),
        Row(guessed, 1, 3, Draft((0, 4))),
        Row(hot, 1, 3, Draft((5, 5), certain)),
        Row(drawn, 1, 2, Draft((0,))),
    ]
    found = choose(P.expand(1 + 3 + 3 + 2, -1), rows)
    assert [token for row, token in found if row.request is plain] == [0]
    assert [token for row, token in found if row.request is guessed] == [0, 0]
    assert [token for row, token in found if row.request is drawn] == [0, 0]
    of_hot = [token for row, token in found if row.request is hot]
    assert 1 <= len(of_hot) <= 3
    assert of_hot[:-1] == [5] * (len(of_hot) - 1)  # only guesses that were taken stand before the last
