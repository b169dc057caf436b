"""The bench beside other engines compares what belongs together and says which bars are reached."""

from __future__ import annotations

from bench.engine_peers import Contender, Row, Run, measure, sentence, table, verdicts
from engine.quality import Quality


def contender(name: str, pair: str, rates: list[float]) -> Contender:
    left = iter(rates)

    def run(streams: int, tokens: int) -> Run:
        return Run(next(left) * streams, 0.1 if pair == "HTTP" else None, "text")

    return Contender(name, pair, "1.0", run)


def test_rates_and_ratios_are_medians_of_turns_and_the_first_run_does_not_count() -> None:
    both = [contender("none", "HTTP", [1000, 30, 50, 40]), contender("vllm", "HTTP", [1000, 20, 10, 80])]
    mine, its = measure(both, 2, 128, 3)
    assert (mine.tokens_per_s, mine.spread) == (80, (60, 100))
    assert (its.tokens_per_s, its.spread) == (40, (20, 160))
    assert mine.ratios == {"vllm": 1.5}  # of 1.5, 5 and 0.5, not 80 / 40
    assert its.ratios == {}
    assert mine.ttft_p50_s == 0.1


def row(name: str, pair: str, streams: int, **ratios: float) -> Row:
    return Row(streams, name, pair, 10.0, (9.0, 11.0), None, ratios, "")


def test_the_best_of_8_and_4_bits_meets_the_bar_of_llama_and_only_in_the_same_way() -> None:
    rows = [
        row("int8", "in process", 8, llama=1.4),
        row("int4", "in process", 8, llama=1.6),
        row("none", "in process", 8, llama=9.0),
        row("int4", "HTTP", 8, llama=1.2),
        row("none", "HTTP", 8, vllm=1.31),
    ]
    judged = {(v.weights, v.peer, v.pair): (v.ratio, v.holds) for v in verdicts(rows)}
    assert judged == {
        ("best", "llama", "in process"): (1.6, True),
        ("best", "llama", "HTTP"): (1.2, False),
        ("none", "vllm", "HTTP"): (1.31, True),
    }
    told = [sentence(verdict) for verdict in verdicts(rows)]
    assert "best to llama, HTTP, 8 streams: 1.20x (at least 1.5): MISSED" in told


def test_a_quantised_rate_stands_beside_its_quality() -> None:
    cost = Quality("int8", 100, 17.0, 17.17, 0.004, 0.97)
    line = table([row("int8", "HTTP", 16, vllm=2.6)], {"int8": cost})[1]
    assert "+1.00 %, 0.0040" in line
    assert "2.60x" in line
