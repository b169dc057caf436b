"""The corpus of public reports: each says where it is from, what is seen of it, and its cause; half of it may shape the rules."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest

from bench.triage import PUBLIC, half_of, row_of
from rules.signals.judging import judge_signals
from rules.signals.reading import parse
from rules.verdict import Cause

REPORTS = json.loads(PUBLIC.read_text("utf-8"))
LATE = json.loads(PUBLIC.with_name("public_reports_late.json").read_text("utf-8"))
CAUSES = {str(cause) for cause in Cause}


def test_no_report_is_told_twice() -> None:
    reports = [*REPORTS, *LATE]
    assert len({report["id"] for report in reports}) == len(reports)
    assert not {report["url"] for report in REPORTS} & {report["url"] for report in LATE}
    told = [json.dumps(report["signals"], sort_keys=True) + report["url"] for report in reports]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("report", [*REPORTS, *LATE], ids=[report["id"] for report in [*REPORTS, *LATE]])
def test_a_report_says_where_it_is_from_and_what_its_cause_was(report: dict[str, object]) -> None:
    expected = report["expected"]
    assert isinstance(expected, dict)
    assert urlsplit(str(report["url"])).scheme == "https" and report["title"] and report["cause"]
    assert report["confidence"] in ("high", "medium", "low")
    assert expected["primary"] in expected["accept"]
    assert {*expected["accept"], *expected["must_not"]} <= CAUSES
    assert not set(expected["accept"]) & set(expected["must_not"])
    assert (report["kind"] == "negative-control") == (expected["primary"] == "none")


def test_every_cause_that_can_be_a_verdict_is_in_each_half() -> None:
    primaries = (
        {report["expected"]["primary"] for report in REPORTS if half_of(report["id"]) == half} for half in (0, 1)
    )
    for named in primaries:
        assert {"none", "thermal", "power", "gpu_fault", "memory_kv", "request_mix", "scheduling", "software"} <= named


def test_what_the_rules_were_mended_by_is_still_judged_so() -> None:
    reports = [report for report in REPORTS if half_of(report["id"]) == 0 and report["confidence"] != "low"]
    rows = [row_of(report, judge_signals(parse(report["signals"]))) for report in reports]
    assert not [row.name for row in rows if row.control and row.found]
    assert not [row.name for row in rows if row.violates]
    assert [row.name for row in rows if not row.right] == []


def test_no_report_gets_a_cause_that_it_forbids_and_no_control_an_incident() -> None:
    rows = [row_of(report, judge_signals(parse(report["signals"]))) for report in [*REPORTS, *LATE]]
    assert not [row.name for row in rows if (row.control and row.found) or row.violates]
