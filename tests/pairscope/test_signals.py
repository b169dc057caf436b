"""`pairscope triage --signals`: the judgement of a told incident in the terminal and as JSON, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import Result

from tests.pairscope.command_line import pairscope


def triage(tmp_path: Path, told: object, *arguments: str) -> Result:
    path = tmp_path / "told.json"
    path.write_text(json.dumps(told))
    return pairscope("triage", "--signals", str(path), *arguments)


def test_one_incident_is_one_list_of_verdicts_and_a_list_is_a_list_of_them(tmp_path: Path) -> None:
    hot = {"tps_ratio": 0.6, "sm_ratio": 0.65, "temp_c": 91, "flags": ["hw_thermal"], "tps_rato": 1}
    one = triage(tmp_path, hot, "--json")
    (verdict,) = json.loads(one.stdout)
    assert (one.exit_code, verdict["cause"], verdict["step"], verdict["loss_pct"]) == (1, "thermal", 1, 40.0)
    assert {"confidence", "scope", "evidence", "ruled_out", "fix"} <= verdict.keys()
    assert one.stderr.strip() == "unknown, and not used: tps_rato (meant tps_ratio?)"
    both = triage(tmp_path, [hot, {}], "--json", "--lang", "zh")
    assert [len(found) for found in json.loads(both.stdout)] == [1, 0]
    assert "过热降频" in both.stdout


def test_nothing_told_is_no_verdict_and_exit_zero(tmp_path: Path) -> None:
    done = triage(tmp_path, {})
    assert done.exit_code == 0 and "Nothing is known" in done.stdout


def test_mistakes_are_one_line_and_exit_two(tmp_path: Path) -> None:
    wrong = triage(tmp_path, {"tps_ratio": "fast"})
    assert wrong.exit_code == 2 and wrong.stderr.count("\n") == 1 and "tps_ratio should be a number" in wrong.stderr
    both = triage(tmp_path, {}, "--at", "2026-11-29")
    assert both.exit_code == 2 and "--signals judges what its file tells" in both.stderr


def test_stdin_is_read_for_a_dash() -> None:
    done = pairscope("triage", "--signals", "-", "--json", typed=b'{"tps_ratio": 0.6, "flags": ["hw_thermal"]}')
    assert done.exit_code == 1 and json.loads(done.stdout)[0]["cause"] == "thermal"
    wrong = pairscope("triage", "--signals", "-", typed=b"hot")
    assert wrong.exit_code == 2 and wrong.stderr.count("\n") == 1 and "stdin" in wrong.stderr


def test_a_list_is_answered_in_the_order_in_which_it_was_given(tmp_path: Path) -> None:
    hot: dict[str, object] = {"id": "second", "tps_ratio": 0.6, "flags": ["hw_thermal"]}
    told = [{"id": "first", "tps_ratio": 1.0}, hot, {"id": "third", "tps_ratio": 1.0}]
    lines = triage(tmp_path, told).stdout
    assert -1 < lines.index("first") < lines.index("second") < lines.index("third")
    assert [len(found) for found in json.loads(triage(tmp_path, told, "--json").stdout)] == [0, 1, 0]


def test_a_verdict_of_no_place_names_none(tmp_path: Path) -> None:
    hot = {"tps_ratio": 0.6, "sm_ratio": 0.65, "temp_c": 91, "flags": ["hw_thermal"], "id": "night"}
    for language, cause in (
        ("en", "thermal throttling (step 1, confidence 0.9"),
        ("zh", "过热降频(第 1 步,置信度 0.9"),
    ):
        line = next(
            line for line in triage(tmp_path, hot, "--lang", language).stdout.splitlines() if cause[-15:] in line
        )
        assert line.startswith(cause) and line.rstrip(")").split()[-1][-1].isdigit(), line
