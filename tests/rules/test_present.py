"""A diagnosis reads well on a terminal, in both languages, and never by colour alone."""

from __future__ import annotations

import pytest

from rules.present import present, present_all
from rules.triage import judge
from rules.verdict import Diagnosis, verdict_json
from telemetry.sample import Sample
from tests.rules.plant import bend, fleet, scene

AT = 180


@pytest.fixture(scope="module")
def diagnoses() -> list[Diagnosis]:
    heat = bend(mask=0x20, temp=86, clock=1215, power=430, work=1.22, inlet=34)
    samples = [
        Sample(s.measurement, {**s.tags, "origin": "simulated"}, s.fields, s.time_ns)
        for s in scene(fleet(heat, AT), AT + 60)
    ]
    return judge(samples)


def test_the_text_holds_the_verdict_the_pair_the_six_steps_and_what_to_do(diagnoses: list[Diagnosis]) -> None:
    lines = present(next(d for d in diagnoses if d.verdicts))
    text = "\n".join(lines)
    assert "r1 / n2 / chat" in lines[0] and "[simulated]" in lines[0]
    assert "% below expected while GPU-Util reads 97 %: thermal throttling" in lines[1]
    steps = [line for line in lines if line[:3] in ("● 1", "✓ 0", "✓ 2", "✓ 3", "✓ 4", "✓ 5")]
    assert len(steps) == 6
    assert "● 1 Temperature and power: confirmed" in text
    assert "SM clock of GPU" in text and "usual 1755 MHz" in text
    assert "clear the inlet, look at fans and blanking panels (operations, cheap)" in text


def test_the_same_in_chinese(diagnoses: list[Diagnosis]) -> None:
    text = "\n".join(present(next(d for d in diagnoses if d.verdicts), "zh"))
    assert "过热降频" in text and "确认" in text and "[模拟]" in text
    assert "thermal throttling" not in text and "confirmed" not in text


def test_pairs_with_a_verdict_come_first(diagnoses: list[Diagnosis]) -> None:
    lines = present_all(diagnoses)
    titles = [line for line in lines if "/ chat" in line and "UTC" in line]
    assert [title.split(" / ")[1] for title in titles] == ["n2", "n1", "n3"]
    assert present_all([]) != []


def test_the_json_is_the_documented_list(diagnoses: list[Diagnosis]) -> None:
    found = [verdict_json(d) for d in diagnoses]
    (verdict,) = next(entry for entry in found if entry)
    assert sum(bool(entry) for entry in found) == 1
    assert {"cause", "step", "confidence", "loss_pct", "scope", "evidence", "ruled_out", "fix"} <= set(verdict)
    assert (verdict["cause"], verdict["step"], verdict["scope"]) == ("thermal", 1, "node")
    assert verdict["loss_pct"] == pytest.approx(18, abs=3)
    assert {entry["step"] for entry in verdict["ruled_out"]} == {0, 2, 3, 4, 5}  # type: ignore[attr-defined]
