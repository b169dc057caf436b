"""`pairscope doctor` and `pairscope agent --once` as a person meets them: words, exit codes, JSON, and never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from agent import sweep
from agent.collectors.interface import Finding, Level
from agent.sweep import Sweep
from pairscope import cli, doctor
from pairscope.sweep import print_sweep, shown
from telemetry.sample import Sample

WHOLE = [
    Finding("install", "ok", "all there"),
    Finding("gpu", "error", "GPU 1 is lost", "reboot the node"),
    Finding("bmc", "warning", "evil\nline\x1b[31m", "shut\tup"),
    Finding("pdu", "absent", "none"),
    Finding("gpu", "ok", "1 GPU answers"),
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAIRSCOPE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sweep, "SETTLE_S", 0.2)  # what these tests read has answered by then, or never will


def called(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def printed(width: int, draw: Callable[[Console], None]) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    draw(console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_this_machine_is_examined_in_words_and_in_json(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAIRSCOPE_AGENT__PORT", str(free_port()))
    said = called("doctor", "--lang", "en")
    told = called("doctor", "--lang", "en", "--json")
    document = json.loads(told.stdout)
    assert said.exit_code == told.exit_code == doctor.EXIT_CODES[document["worst"]]
    assert set(document) == {"worst", "findings"}
    assert all(set(finding) == {"source", "level", "text", "remedy"} for finding in document["findings"])
    assert {"install", "state", "store", "agent", "host"} <= {finding["source"] for finding in document["findings"]}
    assert "state folder" in said.stdout and " ok, " in said.stdout
    assert not (tmp_path / "state").exists()


def test_it_speaks_chinese_when_asked(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAIRSCOPE_AGENT__PORT", str(free_port()))
    assert "状态目录" in called("doctor", "--lang", "zh").stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--config", "/no/such/file.toml"], 2),
        (["--lang", "xx"], 2),
        (["--engine-url", "nonsense"], 2),
        (["--wait", "0"], 2),
        (["--nonsense"], 2),
        (["--store", "nosuch://x"], 2),
        (["--store", "influxdb://127.0.0.1:9/db"], 2),
        (["--state-dir", "/dev/null/state"], 2),
    ],
)
def test_what_can_not_work_ends_with_two_and_without_a_traceback(
    arguments: list[str], code: int, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAIRSCOPE_AGENT__PORT", str(free_port()))
    result = called("doctor", *arguments)
    assert result.exit_code == code
    assert "Traceback" not in result.output


def test_a_secret_file_that_all_may_read_is_a_warning_and_its_content_is_not_shown(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    secret = tmp_path / "community"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    config = tmp_path / "pairscope.toml"
    config.write_text(
        f"[agent]\nport = {free_port()}\n[[agent.pdus]]\nname = 'a'\nhost = '127.0.0.1'\ncommunity_file = '{secret}'\n"
    )
    result = called("doctor", "--config", str(config), "--wait", "1", "--json")
    found = [finding for finding in json.loads(result.stdout)["findings"] if finding["source"] == "secrets"]
    assert [(finding["level"], finding["remedy"]) for finding in found] == [("warning", f"chmod 600 {secret}")]
    assert result.exit_code >= 1
    assert "hunter2" not in result.output


@pytest.mark.parametrize("width", [60, 80, 160])
def test_findings_are_grouped_by_source_with_words_and_remedies(width: int) -> None:
    text = printed(width, lambda console: doctor.print_findings(WHOLE, console, "en"))
    lines = [line.rstrip() for line in text.splitlines()]
    assert all(len(line) <= width for line in lines)
    assert text.index("GPU 1 is lost") < text.index("1 GPU answers") < text.index("evil")
    assert text.count("NVIDIA GPUs") == 1
    assert "x error" in text and "! warning" in text and "- absent" in text
    assert "-> reboot the node" in text
    assert "\x1b" not in text
    assert "2 ok, 1 absent, 1 with a warning, 1 with an error" in text


@pytest.mark.parametrize(
    ("levels", "worst", "code"),
    [
        ([], "ok", 0),
        (["ok", "absent"], "ok", 0),
        (["warning", "absent", "ok"], "warning", 1),
        (["ok", "error", "warning"], "error", 2),
    ],
)
def test_the_exit_code_is_that_of_the_worst(levels: list[Level], worst: str, code: int) -> None:
    assert doctor.as_json([Finding("x", level, "") for level in levels])["worst"] == worst
    assert doctor.EXIT_CODES[worst] == code


def node() -> Sweep:
    tags = {"node": "n7", "rack": "r2"}
    gpu = {**tags, "gpu": "3", "uuid": "GPU-6f1c"}
    return Sweep(
        [
            Sample("event", {**tags, "kind": "xid", "subject": "gpu3"}, {"text": "Xid 79", "code": 79}, 10**18),
            Sample("host", tags, {"cpu_pct": 12.345, "net_rx_bytes_s": 1536.0}, 10**18),
            Sample("agent", tags, {"tick_ms": 3.0}, 10**18),
            Sample(
                "gpu",
                gpu,
                {
                    "util_pct": 98.0,
                    "mem_used_bytes": 65712226304.0,
                    "throttle_reasons": 0x24 | 0x800,
                    "state": 2,
                    "recovery_action": 1,
                    "remap_pending": 1,
                    "energy_j": 1234567.0,
                    "name": "H100",
                },
                10**18,
            ),
            Sample("engine", {**tags, "engine": "chat-a", "model": "m"}, {"up": 1, "tokens_per_s": 1630.25}, 10**18),
        ],
        [Finding("bmc", "error", "does not answer", "look at the cable"), Finding("host", "ok", "reads")],
        ["bmc"],
    )


@pytest.mark.parametrize("width", [80, 160])
def test_a_sweep_is_grouped_by_thing_with_titles_units_and_words(width: int) -> None:
    text = printed(width, lambda console: print_sweep(node(), console, "en"))
    assert all(len(line) <= width for line in text.splitlines())
    assert text.index("GPU 3  GPU-6f1c") < text.index("Engine chat-a  m") < text.index("Host  n7  rack=r2")
    for expected in ("98.0 %", "61.2 GiB", "SW power cap", "SW thermal", "0x800", "needs a reset", "1,234,567 J"):
        assert expected in text
    assert "1,630.2 tokens/s" in text and "1.5 KiB/s" in text
    assert "tick duration" not in text
    assert "xid gpu3: Xid 79" in text
    assert text.index("Not read, and why") < text.index("does not answer") < text.index("look at the cable")
    assert "reads" not in text.split("Not read")[1]


@pytest.mark.parametrize("width", range(90, 200, 10))
def test_a_column_that_does_not_fit_beside_the_others_is_not_begun(width: int) -> None:
    """It would go on below them, in a width of its own."""
    told: dict[str, float | int | str] = {"throttle_reasons": 0x2C, "recovery_action": 1, "util_pct": 98.0}
    told |= {"name": "NVIDIA H100 80GB HBM3", "source": "nvml", "power_scope": "module", "throttle_hw_thermal_s": 1.5}
    swept = Sweep([Sample("gpu", {"node": "n7", "gpu": "3", "uuid": "GPU-6f1c"}, told, 10**18)], [], [])
    lines = printed(width, lambda console: print_sweep(swept, console, "en")).splitlines()[1:-1]
    ends = {len(line.rstrip()) for line in lines[: len(told) // 2]}
    assert len(ends) == 1
    assert len(lines) < len(told) or {len(line.rstrip()) for line in lines} == ends


def test_a_sweep_in_chinese_has_chinese_titles_and_states() -> None:
    text = printed(120, lambda console: print_sweep(node(), console, "zh"))
    for expected in ("显存已用", "需要重置", "软件过热", "未读取的来源及原因", "行重映射待生效"):
        assert expected in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("throttle_reasons", 0, "none"),
        ("throttle_reasons", 0x40, "HW thermal"),
        ("state", 99, "99"),
        ("mem_used_bytes", 12.0, "12 B"),
        ("temp_c", 86.5, "86.50 °C"),
        ("xid_total", 1234, "1,234"),
        ("power_w", 0.00123, "0.00123 W"),
    ],
)
def test_a_value_is_shown_as_people_say_it(name: str, value: float, words: str) -> None:
    assert shown("gpu", name, value, "en") == words
