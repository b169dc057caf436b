"""The incident report: what it says is what happened, what it costs is right, and nothing that samples hold is more than text in it."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from pairscope.cli import app
from pairscope.moment import moment_ns
from pairscope.report import source
from pairscope.report.as_json import as_json
from pairscope.report.content import Report, commands_of, report_of, straggler
from pairscope.report.markdown import markdown, plain
from pairscope.report.plots import plots_of
from pairscope.report.settings import ReportSettings
from pairscope.report.svg import Line, Mark, Panel, Plot, Rows, draw, pieces, thinned, ticks
from rules.course import Course, incidents_of
from rules.verdict import Cause
from telemetry.lineprotocol import encode_many
from telemetry.messages import say
from telemetry.sample import Sample
from telemetry.store import open_store
from tests.rules.plant import SECOND, T0, Fault, Moment, Node, bend, event, fleet, scene

HOT = {"mask": 0x20, "temp": 86, "clock": 1215, "power": 430, "work": 1.5, "inlet": 34}
AT, END = 240, 420
PRICE = ReportSettings(2.5, "EUR")


def hot_until(end: int) -> Fault:
    """Hot from its first second to `end`, then as before."""
    hot = bend(**HOT)

    def fault(moment: Moment) -> None:
        if moment.t < end:
            hot(moment)

    return fault


def told_of(samples: list[Sample], settings: ReportSettings = PRICE, from_ns: int = T0) -> Report:
    ordered = sorted(samples, key=lambda sample: sample.time_ns)
    return report_of(source.Source("night.lp", tuple(ordered), from_ns, ordered[-1].time_ns), settings, "evidence")


@cache
def hot() -> Report:
    nodes = fleet(bend(**HOT), at=AT)
    nodes[1].events = [event("n2", "bmc", AT - 5, "fan 3 | stands *still*", subject="n2")]
    return told_of(scene(nodes, END))


def rendered(text: str) -> str:
    return str(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


def row(report: Report, lane: str) -> tuple[float | None, float | None, float | None]:
    found = next(row for row in report.told[0].rows if row.lane == lane)
    return found.before, found.during, found.expected


def test_the_incident_is_the_one_that_was_planted_and_began_when_it_did() -> None:
    (incident,) = hot().incidents
    assert (incident.cause, incident.scope, incident.subject["node"]) == (Cause.THERMAL, "node", "n2")
    assert incident.until_ns is None
    assert abs(incident.since_ns - (T0 + AT * SECOND)) <= 20 * SECOND
    assert sorted(course.key[0] for course in hot().others) == ["n1", "n3"]


def test_the_table_sets_before_beside_during() -> None:
    report = hot()
    assert row(report, "gpu.sm_clock_mhz") == pytest.approx((1755, 1215, 1980), rel=0.02)
    assert row(report, "gpu.temp_c")[:2] == pytest.approx((66, 86), abs=2)
    assert row(report, "gpu.power_w") == pytest.approx((2 * 604, 2 * 430, 2 * 700), rel=0.03)
    before, during, expected = row(report, "engine.tokens_per_s")
    assert before is not None and during is not None and expected is not None
    assert during == pytest.approx(before / 1.5, rel=0.08)
    assert expected == pytest.approx(before, rel=0.08)
    assert row(report, "throttle.sw_thermal")[:2] == pytest.approx((0, 100), abs=1)
    assert not any(entry.lane == "throttle.hw_power_brake" for entry in report.told[0].rows)


def test_the_cost_is_the_difference_over_the_time_and_money_is_all_gpus_of_the_engine() -> None:
    told = hot().told[0]
    before, during, _ = row(hot(), "engine.tokens_per_s")
    assert before is not None and during is not None
    cost, seconds = told.cost, (hot().end_ns - told.incident.since_ns) / SECOND
    assert cost.tokens_per_s == pytest.approx(before - during, rel=0.12)
    assert cost.tokens == pytest.approx((before - during) * seconds, rel=0.15)
    assert cost.gpu_hours == pytest.approx(2 * seconds / 3600 / 3, rel=0.15)
    assert cost.loss_pct is not None
    assert cost.money_per_hour == pytest.approx(cost.loss_pct / 100 * 2 * 2.5)
    assert cost.money == pytest.approx((cost.gpu_hours or 0) * 2.5)
    assert cost.per_million_during == pytest.approx(2 * 2.5 / during / 3600 * 1e6)


def test_an_incident_that_ended_is_told_with_its_end_and_its_own_cost() -> None:
    report = told_of(scene(fleet(hot_until(AT + 120), at=AT), END + 120))
    (incident,) = report.incidents
    assert incident.cause is Cause.THERMAL and incident.until_ns is not None
    assert abs(incident.until_ns - (T0 + (AT + 120) * SECOND)) <= 45 * SECOND
    assert incident.verdict.confidence > 0.5
    before, during, _ = row(report, "engine.tokens_per_s")
    assert before is not None and during is not None
    assert report.told[0].cost.tokens == pytest.approx((before - during) * 120, rel=0.2)
    text = markdown(report, {}, "en")
    assert "it stood no longer" in text and "still stood" not in text


def test_what_ended_before_the_told_time_is_not_told() -> None:
    samples = scene(fleet(hot_until(AT + 60), at=AT), END + 180)
    assert told_of(samples).incidents
    assert told_of(samples, from_ns=T0 + (END + 60) * SECOND).incidents == ()


def test_a_quiet_night_is_no_incident_and_says_so() -> None:
    report = told_of(scene(fleet(None), 200))
    assert report.incidents == () and len(report.others) == 3
    text = markdown(report, plots_of(report, "en"), "en")
    assert text.startswith("# Report: nothing is wrong")


def test_an_engine_that_is_away_costs_nobody_knows_what() -> None:
    report = told_of(scene(fleet(bend(up=0, util=0), at=AT), END))
    cost = report.told[0].cost
    assert (cost.tokens_per_s, cost.money_per_hour) == (None, None)
    assert cost.unknown_s > 100
    plain_json = as_json(report, {}, "en")["incidents"]
    assert isinstance(plain_json, list) and plain_json[0]["loss"]["tokens_per_s"] is None


def test_without_a_price_no_money_is_told() -> None:
    report = told_of(scene(fleet(bend(**HOT), at=AT), END), ReportSettings())
    loss = as_json(report, {}, "en")["incidents"][0]["loss"]  # type: ignore[index]
    assert loss["tokens"] > 0
    assert [loss[name] for name in ("money_per_hour", "money", "price_per_million_during")] == [None] * 3
    text = markdown(report, {}, "en")
    assert "No price was given" in text and "money" not in text.split("### What it costs")[1].split("No price")[0]


def test_the_slow_member_of_a_group_is_named_with_what_it_costs_the_group() -> None:
    seen = hot().told[0].worst.spell.evidence
    first, second = seen.gpus
    assert first.sm_clock is not None
    slow = replace(second, sm_clock=replace(first.sm_clock, value=first.sm_clock.value / 2))
    line = straggler(replace(seen, gpus=(first, slow)))
    assert line is not None and line.values["gpu"] == second.index
    assert (line.values["pace_pct"], line.values["alone_pct"], line.values["group_pct"]) == pytest.approx((50, 25, 50))
    assert straggler(seen) is None


def test_one_hot_card_in_each_of_three_groups_is_told_with_those_that_it_holds_up() -> None:
    nodes = [Node(f"n{i}", seed=i) for i in range(1, 5)]
    for node in nodes[:3]:
        node.fault, node.at = bend(work=1.4, inlet=34), 200
    samples = []
    for sample in scene(nodes, 330):
        struck = sample.measurement == "gpu" and sample.tags["gpu"] == "1" and sample.tags["node"] != "n4"
        if struck and sample.time_ns >= T0 + 200 * SECOND:
            hot_now = {"temp_c": 87.0, "sm_clock_mhz": 1210.0, "throttle_reasons": 0x20, "power_w": 420.0}
            sample = Sample("gpu", sample.tags, {**sample.fields, **hot_now}, sample.time_ns)
        samples.append(sample)
    report = told_of(samples)
    (incident,) = report.incidents
    assert (incident.cause, incident.scope, dict(incident.subject)) == (Cause.THERMAL, "rack", {"rack": "r1"})
    line = report.told[0].coupling
    assert line is not None
    assert {name: line.values[name] for name in ("slow", "held_up", "of", "group")} == {
        "slow": 3,
        "held_up": 6,
        "of": 8,
        "group": 2,
    }
    lost = 100 * (1 - 1 / 1.4)
    assert line.values["lost_pct"] == pytest.approx(lost * 6 / 8, abs=1.5)
    assert line.values["lost_alone_pct"] == pytest.approx(lost * 3 / 8, abs=0.8)
    assert "3 of 8 GPUs are slow" in markdown(report, {}, "en")
    assert "8 块 GPU 中有 3 块变慢" in markdown(report, {}, "zh")
    assert "6 GPUs are held up" in json.dumps(as_json(report, {}, "en"))
    assert hot().told[0].coupling is None


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_text_holds_every_part(language: str) -> None:
    report = hot()
    text = markdown(report, plots_of(report, language), language)
    heads = re.findall(r"^### (.+)$", text, re.M)
    assert len(heads) == 10
    assert bool(re.search("[\u4e00-\u9fff]", text)) is (language == "zh")
    assert "fan 3 \\| stands \\*still\\*" in text
    html = rendered(text)
    assert html.count("<img") == 3 and html.count("<table>") == 4
    assert "fan 3 | stands *still*" in html


def test_the_files_it_names_are_the_plots_it_has() -> None:
    plots = plots_of(hot(), "en")
    text = markdown(hot(), plots, "en")
    assert re.findall(r"\]\((\w+\.svg)\)", text) == [plot.name for plot in plots[0]]
    single = markdown(hot(), plots, "en", inside=True)
    assert ".svg)" not in single and rendered(single).count('src="data:image/svg+xml;base64,') == 3


HOSTILE = "n`2|](javascript:alert(1))<script>x</script>![a](http://e.vil) *b* $(id)\u202e"


def hostile(samples: list[Sample]) -> list[Sample]:
    return [
        Sample(s.measurement, {k: HOSTILE if v == "n2" else v for k, v in s.tags.items()}, s.fields, s.time_ns)
        for s in samples
    ]


def test_a_hostile_name_is_text_in_the_report_and_in_its_plots_and_never_a_command() -> None:
    nodes = fleet(bend(**HOT), at=AT)
    text = "</text><script>y</script>\n# head\n| a | b |"
    nodes[1].events = [event("n2", "deploy", AT - 9, text)]
    report = told_of(hostile(scene(nodes, 330)))
    assert report.incidents
    written = markdown(report, plots_of(report, "en"), "en")
    html = rendered(written)
    assert "<script" not in html and "<a " not in html and html.count("<img") == 3
    assert html.count("<h1>") == 1 and "\u202e" not in written
    assert "javascript&#58;alert" in written
    clean = rendered(markdown(hot(), plots_of(hot(), "en"), "en"))
    assert html.count("<td>") == pytest.approx(clean.count("<td>"), abs=6)
    assert commands_of(report.told[0])[-1] == "pairscope triage --all"
    for plot in plots_of(report, "en")[0]:
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(plot.svg).iter()}
        assert tags <= {"svg", "title", "desc", "rect", "line", "text", "polyline", "path"}
        assert "\u202e" not in plot.svg and "nan" not in plot.svg.lower().replace("nano", "")


@pytest.mark.parametrize(
    "text",
    [
        "- no list", "1. no list", "1) no list", "# no head", "=== ", "+ no", "a|b", "`code`", "**bold**", "_em_",
        "<b>html</b>", "&lt;", "[a](b)", "![a](b)", "http://x.y", "www.x.y", "a@b.c", "\\", "~~gone~~", "$x$", "--- ",
    ],
)  # fmt: skip
def test_any_text_is_shown_as_it_is(text: str) -> None:
    parser = MarkdownIt("gfm-like", {"linkify": False}).enable("table")
    html = str(parser.render(f"| a |\n| --- |\n| {plain(text)} |\n\n{plain(text)}\n"))
    shown = re.sub(r"</?(p|table|thead|tbody|tr|th|td)>", "", html)
    assert "<" not in shown
    wanted = text.strip().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert shown.split("\n").count(wanted) == 2, html


# --- plots


def drawn(**changes: object) -> str:
    line = Line("clock", "#009E73", [(T0 + s * SECOND, 1755.0 - s) for s in range(100)])
    fields: dict[str, object] = {
        "title": "A & B",
        "describes": "about",
        "start_ns": T0,
        "end_ns": T0 + 100 * SECOND,
        "panels": (
            Panel("SM clock", "MHz", (line,)),
            Rows("throttle", (("thermal", "#E69F00", ((T0, T0 + SECOND),)),)),
        ),
        "onset_ns": T0 + 50 * SECOND,
        "marks": (Mark(T0 + 20 * SECOND, "deploy"),),
    }
    return draw(Plot(**{**fields, **changes}))  # type: ignore[arg-type]


def test_a_plot_has_units_axes_the_beginning_and_every_name() -> None:
    root = ElementTree.fromstring(drawn())
    texts = [element.text for element in root.iter() if element.tag.endswith("}text")]
    for wanted in ("A & B", "SM clock, MHz", "clock", "thermal", "deploy", "0", "2,000"):
        assert wanted in texts
    assert any(text and text.startswith("beginning") for text in texts)
    assert any(text and "UTC" in text for text in texts)


def test_a_line_is_cut_where_readings_are_missing() -> None:
    points = [(T0 + s * SECOND, 1.0) for s in (*range(10), *range(60, 70))]
    assert [len(piece) for piece in pieces(points)] == [10, 10]
    assert pieces([]) == [] and pieces(points[:1]) == [points[:1]]


def test_thinning_keeps_every_spike() -> None:
    points = [(T0 + s * SECOND, 99.0 if s == 7777 else 5.0 + s % 3) for s in range(20_000)]
    thin = thinned(points)
    assert len(thin) < 800
    assert max(value for _, value in thin) == 99.0
    assert [point[0] for point in thin] == sorted(point[0] for point in thin)


@pytest.mark.parametrize(("low", "high"), [(0, 97), (0, 0), (5, 5), (0, 1e9), (0, 0.00003), (20.5, 88.1), (-3, 4)])
def test_ticks_are_few_and_hold_the_range(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 7
    assert marks[0] <= low and marks[-1] >= high * (1 - 1e-9)


@pytest.mark.parametrize("value", [5e-324, 1e-310, 1e15, -1e15])
def test_a_reading_of_any_size_can_be_drawn(value: float) -> None:
    panel = Panel("x", "", (Line("a", "#000", [(T0, value), (T0 + SECOND, value)]),))
    assert "polyline" in drawn(start_ns=T0, end_ns=T0 + SECOND, panels=(panel,), onset_ns=None)


def test_a_reading_beyond_any_measure_is_left_out_of_the_plot() -> None:
    panel = Panel("x", "", (Line("a", "#000", [(T0, 1.7e308), (T0 + SECOND, -1.7e308), (T0 + 2 * SECOND, 5.0)]),))
    told = drawn(start_ns=T0, end_ns=T0 + 2 * SECOND, panels=(panel,), onset_ns=None)
    assert "nan" not in told and "inf" not in told and told.count("<polyline") == 1


def test_a_plot_of_one_moment_or_none_can_be_drawn() -> None:
    for points in ([], [(T0, 5.0)]):
        panel = Panel("x", "", (Line("a", "#000", points),))
        ElementTree.fromstring(drawn(start_ns=T0, end_ns=T0, panels=(panel,), onset_ns=None))
    with pytest.raises(ValueError, match="panel"):
        drawn(panels=())


# --- the command


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "night.lp"
    path.write_text(encode_many(scene(fleet(bend(**HOT), at=AT), 330)), "utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["report", *arguments, "--state-dir", str(tmp_path / "state"), "--lang", "en"])
        return done.exit_code, done.stdout, done.stderr

    return run


Run = Callable[..., tuple[int, str, str]]


def test_a_report_is_written_whole_and_never_over_another(run: Run, recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "night"
    code, _, told = run(str(recording), "--out", str(out))
    assert code == 0 and "thermal throttling" in told
    assert sorted(path.name for path in out.iterdir()) == ["engine.svg", "hardware.svg", "pair.svg", "report.md"]
    (out / "report.md").write_text("mine", "utf-8")
    (out / "engine.svg").unlink()
    code, _, told = run(str(recording), "--out", str(out))
    assert code == 2 and "--force" in told and told.count("\n") == 1
    assert (out / "report.md").read_text("utf-8") == "mine"
    assert not (out / "engine.svg").exists()
    assert run(str(recording), "--out", str(out), "--force")[0] == 0
    assert (out / "report.md").read_text("utf-8").startswith("# Incident report")


def test_a_named_file_carries_its_plots_beside_it_or_in_it(run: Run, recording: Path, tmp_path: Path) -> None:
    assert run(str(recording), "--out", str(tmp_path / "my night.md"))[0] == 0
    assert "(my-night-pair.svg)" in (tmp_path / "my night.md").read_text("utf-8")
    assert (tmp_path / "my-night-pair.svg").is_file()
    assert run(str(recording), "--out", str(tmp_path / "one.md"), "--single-file")[0] == 0
    assert not (tmp_path / "one-pair.svg").exists()


def test_json_says_the_same_and_writes_nothing(run: Run, recording: Path, tmp_path: Path) -> None:
    code, told, _ = run(str(recording), "--json", "--price-per-gpu-hour", "2.5", "--currency", "EUR")
    assert code == 0 and list(tmp_path.glob("*.md")) == []
    incident = json.loads(told)["incidents"][0]
    assert incident["cause"] == "thermal" and incident["loss"]["money_per_hour"] > 0
    assert {"paired", "evidence", "ruled_out", "no_data", "competing", "timeline", "fix", "check"} <= set(incident)


def test_the_store_tells_the_same_of_one_node(run: Run, recording: Path, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    store = open_store(url)
    store.write(scene(fleet(bend(**HOT), at=AT), 330))
    store.close()
    at = str((T0 + 329 * SECOND) // SECOND)
    code, told, _ = run("--store", url, "--node", "n2", "--at", at, "--json")
    assert code == 0
    found = json.loads(told)
    assert [entry["cause"] for entry in found["incidents"]] == ["thermal"] and found["other_pairs"] == []
    assert "Only this host" not in run("--store", url, "--node", "n2", "--at", at, "--out", str(tmp_path / "named"))[2]
    code, told, error = run("--store", url, "--node", "n9", "--at", at)
    assert code == 2 and error.splitlines()[0].startswith("reading n9 from ") and error.count("\n") == 2
    assert "no samples of node n9" in error and "it has: n1, n2, n3" in error
    (tmp_path / "here.toml").write_text(f'store = "{url}"\n[node]\nname = "n1"\n')
    code, _, told = run("--config", str(tmp_path / "here.toml"), "--at", at, "--out", str(tmp_path / "here"))
    assert code == 0 and "nothing is wrong" in told and "Only this host, n1, was looked at" in told and "--all" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.lp"], "absent.lp"),
        (["FILE", "--at", "2026-01-01", "--since", "2026-01-02"], "--since"),
        (["FILE", "--at", "nonsense"], "--at 'nonsense'"),
        (["FILE", "--since", "nonsense"], "--since 'nonsense'"),
        (["FILE", "--all"], "--all"),
        (["FILE", "--price-per-gpu-hour", "-1"], "price"),
        (["FILE", "--price-per-gpu-hour", "nan"], "price"),
        (["FILE", "--currency", "x" * 40], "currency"),
        (["FILE", "--out", "/tmp/x.txt"], ".md"),
        (["FILE", "--out", "/nonexistent/a/b"], "/nonexistent/a"),
    ],
)
def test_a_mistake_is_one_line_and_exit_two(run: Run, recording: Path, arguments: list[str], says: str) -> None:
    code, told, error = run(*[str(recording) if entry == "FILE" else entry for entry in arguments])
    assert code == 2 and told == ""
    assert error.count("\n") == 1 and says in error


def test_two_troubles_are_two_incidents_the_worse_first() -> None:
    nodes = fleet(bend(**HOT), at=AT)
    nodes[2].fault, nodes[2].at = bend(clock=600, power=190, work=2.5, temp=44), AT
    extra = [Node("n4", seed=44), Node("n5", seed=55)]
    report = told_of(scene([*nodes, *extra], 330))
    assert [(i.cause, i.subject["node"]) for i in report.incidents] == [
        (Cause.GPU_FAULT, "n3"),
        (Cause.THERMAL, "n2"),
    ]
    text = markdown(report, plots_of(report, "en"), "en")
    assert "## Overview" in text and "## Incident 2: thermal throttling" in text
    assert len([plot for plots in plots_of(report, "en").values() for plot in plots]) == 4


def test_two_parts_of_a_node_with_one_cause_are_one_incident_of_the_node() -> None:
    """What the whole pair says of its node, and another pair of one of its GPUs."""
    course = hot().told[0].worst.course
    verdict = course.last.verdicts[0]
    subject = {**verdict.subject, "gpu": "1"}
    last = replace(
        course.last,
        subject={**course.last.subject, "engine": "other"},
        verdicts=(replace(verdict, scope="gpu", subject=subject),),
    )
    spells = [replace(spell, diagnosis=last) for spell in course.spells]
    other = Course(last, course.seen, course.moments, spells)
    (incident,) = incidents_of([course, other], T0, hot().end_ns)
    assert (incident.scope, incident.subject.get("gpu"), len(incident.struck)) == ("node", None, 2)
    (alone,) = incidents_of([other], T0, hot().end_ns)
    assert (alone.scope, alone.subject["gpu"]) == ("gpu", "1")
    assert incident.lost.tokens == pytest.approx(2 * (alone.lost.tokens or 0))


def test_the_last_command_names_what_the_report_was_made_of(run: Run, recording: Path, tmp_path: Path) -> None:
    def last_command(*arguments: str) -> str:
        code, told, error = run(*arguments, "--json")
        assert code == 0, error
        return str(json.loads(told)["incidents"][0]["commands"][-1])

    assert last_command(str(recording)) == f"pairscope triage {recording}"
    url = f"sqlite://{tmp_path}/a store.db"
    store = open_store(url)
    store.write(scene(fleet(bend(**HOT), at=AT), 330))
    store.close()
    at = str((T0 + 329 * SECOND) // SECOND)
    assert last_command("--store", url, "--node", "n2", "--at", at) == f"pairscope triage --node n2 --store '{url}'"


@pytest.mark.parametrize("options", [("--last", "5m"), ("--from", "START"), ("--since", "START", "--to", "END")])
def test_the_time_that_is_told_is_named_as_in_a_recording(run: Run, recording: Path, options: tuple[str, ...]) -> None:
    ends = {"START": str(T0 // SECOND + 29), "END": str(T0 // SECOND + 329)}
    code, told, error = run(str(recording), *(ends.get(option, option) for option in options), "--json")
    assert code == 0, error
    begin, end = json.loads(told)["from"], json.loads(told)["to"]
    assert (moment_ns(begin) - T0) // SECOND == 29 and (moment_ns(end) - T0) // SECOND == 329


@pytest.mark.parametrize(("one", "other"), [("--since", "--last"), ("--since", "--from"), ("--at", "--to")])
def test_two_names_for_one_end_of_the_time_are_refused(run: Run, recording: Path, one: str, other: str) -> None:
    code, _, error = run(str(recording), one, "1795960800", other, "10m" if other == "--last" else "1795960900")
    assert code == 2 and error.count("\n") == 1 and one in error and other in error


@pytest.mark.parametrize("room_bytes", [100, 9_000])
def test_a_disk_that_is_full_keeps_no_part_of_a_report(
    run: Run, recording: Path, tmp_path: Path, room_bytes: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        code, _, error = run(str(recording), "--out", str(tmp_path / "night"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2 and error.count("\n") == 1 and "does not fit" in error and ".gz" not in error
    assert not (tmp_path / "night").exists()


def test_json_that_does_not_fit_is_one_line(recording: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pairscope", "report", str(recording), "--json", "--lang", "en"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "pairscope: the output can't be written: No space left on device; send it to another place\n"


def test_long_times_are_told_in_hours_and_one_process_is_one() -> None:
    assert say("rules.evidence.warm", minutes=4351.0) == "the engine is up for 72.5 h"
    assert say("rules.evidence.warm", minutes=119.0) == "the engine is up for 119 min"
    assert say("rules.summary.silent", "zh", age_s=7200.0) == "该节点已 2.0 小时没有样本:无法判断"
    text = markdown(hot(), {}, "en")
    assert "one process on GPU" in text and "1 processes" not in text
