"""Evidence ranks, the order breaks ties, symptoms follow their cause, and what begins first leads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rules.evidence import Evidence, HostEvidence, Observation
from rules.finding import Effect, Finding, confirmed, line, no_data, ruled_out, summary
from rules.priors import STEP_OF, Strength, priors
from rules.ranking import reports_of, verdicts_of, weigh
from rules.thresholds import Bar, Threshold, thresholds
from rules.verdict import Cause, Status, Step

SECOND = 10**9


def found(cause: Cause, strength: Strength = Strength.FAIR, since_s: float | None = None, **options: object) -> Finding:
    since = None if since_s is None else int(since_s * SECOND)
    return confirmed(cause, strength, (line("idle"),), summary("idle"), (), since_ns=since, **options)  # type: ignore[arg-type]


def test_a_stronger_sign_outweighs_a_larger_prior() -> None:
    ranked = weigh([found(Cause.CONTENTION, Strength.STRONG), found(Cause.SOFTWARE, Strength.WEAK)], priors())
    assert ranked[0].finding.cause is Cause.CONTENTION
    assert ranked[0].confidence > 0.6 > ranked[1].confidence


def test_equal_evidence_is_decided_by_the_preset() -> None:
    both = [found(Cause.HOST_CPU), found(Cause.SOFTWARE)]
    assert weigh(both, priors("evidence"))[0].finding.cause is Cause.SOFTWARE
    article = weigh([found(Cause.THERMAL), found(Cause.REQUEST_MIX)], priors("article"))
    assert article[0].finding.cause is Cause.THERMAL
    assert weigh([found(Cause.THERMAL), found(Cause.REQUEST_MIX)], priors())[0].finding.cause is Cause.REQUEST_MIX


def test_a_weak_sign_alone_is_not_sure() -> None:
    assert weigh([found(Cause.STORAGE, Strength.WEAK)], priors())[0].confidence < 0.6
    assert weigh([found(Cause.GPU_FAULT, Strength.PROOF)], priors())[0].confidence > 0.95


def test_a_symptom_follows_its_cause_unless_it_began_clearly_before() -> None:
    brake = found(Cause.POWER, Strength.PROOF, 100)
    for began, symptom_of in ((100, Cause.POWER), (160, Cause.POWER), (80, Cause.POWER), (20, None)):
        memory = next(
            r
            for r in weigh([brake, found(Cause.MEMORY_KV, since_s=began)], priors())
            if r.finding.cause is Cause.MEMORY_KV
        )
        assert memory.symptom_of is symptom_of, began
        assert (memory.confidence == 0) is (symptom_of is not None)


def test_of_two_that_explain_each_other_the_proven_one_is_the_cause() -> None:
    hung = found(Cause.SCHEDULING, Strength.PROOF, 100, alone=True)
    full = found(Cause.MEMORY_KV, Strength.STRONG, 60)
    ranked = weigh([full, hung], priors())
    assert [(r.finding.cause, r.symptom_of) for r in ranked] == [
        (Cause.SCHEDULING, None),
        (Cause.MEMORY_KV, Cause.SCHEDULING),
    ]
    uneven = found(Cause.SCHEDULING, Strength.FAIR, 100)
    assert weigh([full, uneven], priors())[0].finding.cause is Cause.MEMORY_KV
    assert weigh([full, uneven], priors())[1].symptom_of is Cause.MEMORY_KV


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(STEP_OF)),
        st.tuples(st.sampled_from(sorted(Strength)), st.none() | st.floats(0, 300)),
        min_size=1,
    )
)
def test_whatever_is_confirmed_there_is_a_root(causes: dict[Cause, tuple[Strength, float | None]]) -> None:
    ranked = weigh([found(cause, strength, since) for cause, (strength, since) in causes.items()], priors())
    assert len(ranked) == len(causes)
    assert ranked[0].symptom_of is None and ranked[0].confidence > 0
    assert all(0 <= r.confidence <= 0.98 for r in ranked)


def test_a_report_confirms_before_it_rules_out_and_no_data_is_neither() -> None:
    findings = {
        Step.PHYSICAL: [ruled_out(Cause.THERMAL, line("idle")), found(Cause.POWER, Strength.PROOF, 0)],
        Step.MEMORY: [found(Cause.MEMORY_KV, since_s=10)],
        Step.REQUESTS: [no_data(Cause.REQUEST_MIX, line("no_lengths"))],
        Step.SCHEDULING: [no_data(Cause.NETWORK, line("no_network")), ruled_out(Cause.SCHEDULING, line("idle"))],
    }
    ranked = weigh([f for group in findings.values() for f in group], priors())
    reports = {report.step: report for report in reports_of(findings, ranked, priors())}
    assert [reports[step].status for step in Step] == [
        Status.NO_DATA,
        Status.CONFIRMED,
        Status.SYMPTOM,
        Status.NO_DATA,
        Status.RULED_OUT,
        Status.NO_DATA,
    ]
    assert reports[Step.PHYSICAL].posterior > 0.9 and reports[Step.MEMORY].posterior == 0
    assert sum(report.prior for report in reports.values()) == pytest.approx(1)


def test_the_articles_order_is_the_articles() -> None:
    article = priors("article")
    shares = [article.of_step(step) for step in Step]
    assert [round(100 * share) for share in shares[1:]] == [40, 25, 20, 10, 5] or shares[1] == max(shares)
    assert shares[1:] == sorted(shares[1:], reverse=True)
    with pytest.raises(ValueError, match="preset 'guess'"):
        priors("guess")


def test_every_cause_has_a_step_and_a_weight() -> None:
    assert set(STEP_OF) == set(Cause) - {Cause.NONE}
    for preset in ("article", "evidence"):
        assert all(priors(preset).weight[cause] > 0 for cause in STEP_OF)


def test_every_threshold_says_where_it_comes_from_and_leaves_on_the_calm_side() -> None:
    assert len(thresholds()) > 50
    for key, threshold in thresholds().items():
        assert len(threshold.source) > 10, key


def test_a_held_cause_is_let_go_later_than_it_was_taken_up() -> None:
    above, below = Threshold(0.1, 0.05, ""), Threshold(0.9, 0.95, "")
    assert [above.reached(0.07, held) for held in (False, True)] == [False, True]
    assert [below.reached(0.93, held) for held in (False, True)] == [False, True]
    assert not above.reached(None, True)
    held = Bar(frozenset((Cause.THERMAL,)))
    assert held.reached("thermal.duty", 0.07) and not Bar().reached("thermal.duty", 0.07)
    assert not held.reached("power.cap_duty", 0.07)
    assert held.reached("loss.ratio", 0.96) and not Bar().reached("loss.ratio", 0.96)


@pytest.mark.parametrize(
    ("loss_pct", "cpu_pct", "said"),
    [
        (29.4, 97.0, "Output is 29 % below expected while CPU reads 97 %: the power brake is on"),
        (29.4, None, "Output is 29 % below expected: power"),
        (None, 97.0, "What is known speaks for: power"),
    ],
)
def test_a_summary_tells_no_figure_that_nobody_knows(loss_pct: float | None, cpu_pct: float | None, said: str) -> None:
    spoken = summary("power_brake", loss_pct=loss_pct or 0.0, util_pct=cpu_pct or 0.0, effort="CPU")
    brake = confirmed(Cause.POWER, Strength.PROOF, (line("idle"),), spoken, ())
    host = HostEvidence(0.0, cpu=None if cpu_pct is None else Observation(cpu_pct, "host.cpu_pct"))
    verdicts = verdicts_of(
        weigh([brake], priors()),
        Evidence("n1", 0, host=host),
        Effect(loss_pct is not None, loss_pct is not None, False, loss_pct),
        {"node": "n1"},
        {},
        0.5,
        0.5,
    )
    assert [verdict.summary.text() for verdict in verdicts] == [said]


@pytest.mark.parametrize(("least", "told"), [(0.3, [Cause.MEMORY_KV, Cause.GPU_FAULT]), (0.95, [])])
def test_a_rival_that_is_outweighed_is_told_beside_a_verdict_and_never_alone(least: float, told: list[Cause]) -> None:
    ranked = weigh([found(Cause.MEMORY_KV, Strength.STRONG, 10), found(Cause.GPU_FAULT, since_s=100)], priors())
    assert ranked[0].confidence == pytest.approx(0.91, abs=0.01)
    assert ranked[1].confidence == pytest.approx(0.08, abs=0.01)
    effect = Effect(True, True, True, 40.0)
    verdicts = verdicts_of(ranked, Evidence("n1", 0), effect, {"node": "n1"}, {}, least, 0.05)
    assert [verdict.cause for verdict in verdicts] == told
