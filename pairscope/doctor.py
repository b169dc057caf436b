"""Doctor, as it is printed: one line a finding, the remedy beneath, and the sum; or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.collectors.interface import Finding
from agent.doctor.examination import worst
from telemetry.lineprotocol import printable
from telemetry.messages import catalogue, say

EXIT_CODES = {"ok": 0, "warning": 1, "error": 2}
STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "bold red"}
SIGNS = {"ok": "+", "absent": "-", "warning": "!", "error": "x"}


def print_findings(findings: Sequence[Finding], console: Console, language: str) -> None:
    """Grouped by source, in the order in which the sources first appear; then the sum and what to do next."""
    console.print(findings_table(findings, language))
    counts = Counter[str](finding.level for finding in findings)
    console.print()
    console.print(say("doctor.sum.line", language, **{level: counts[level] for level in STYLES}), markup=False)
    verdict = worst(findings)
    style = STYLES[verdict] if verdict != "ok" else ""
    console.print(Text(say(f"doctor.sum.{'well' if verdict == 'ok' else 'unwell'}", language), style=style))


def findings_table(findings: Sequence[Finding], language: str) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, max_width=28)
    table.add_column(overflow="fold")
    before = ""
    for finding in _grouped(findings):
        name = title(finding.source, language)
        sentence = Text(printable(finding.text))
        if finding.remedy:
            sentence.append(f"\n-> {printable(finding.remedy)}", style="italic")
        sign = Text(f"{SIGNS[finding.level]} {say(f'doctor.level.{finding.level}', language)}")
        sign.stylize(STYLES[finding.level])
        table.add_row(sign, Text(name if name != before else "", style="bold"), sentence)
        before = name
    return table


def as_json(findings: Sequence[Finding]) -> Mapping[str, object]:
    """{"worst": ok, warning or error, "findings": [{"source", "level", "text", "remedy"}]}."""
    return {
        "worst": worst(findings),
        "findings": [
            {
                "source": printable(finding.source),
                "level": finding.level,
                "text": printable(finding.text),
                "remedy": printable(finding.remedy),
            }
            for finding in findings
        ],
    }


def title(source: str, language: str) -> str:
    """What a person reads for a source: ours have names in both languages, others (engine chat-a) their own."""
    key = f"doctor.title.{source}"
    return say(key, language) if key in catalogue() else printable(source)


def _grouped(findings: Sequence[Finding]) -> list[Finding]:
    sources = list(dict.fromkeys(finding.source for finding in findings))
    return sorted(findings, key=lambda finding: sources.index(finding.source))
