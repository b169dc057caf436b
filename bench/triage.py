"""How often the judgement is right: python bench/triage.py --incidents incidents.json --power-sweep folder

The corpus is a JSON list of reports, each with `id`, `kind`, `confidence`, `signals` (what `pairscope triage --signals` takes) and
`expected` (`primary`, `accept`, `must_not`); a report without signals can't be judged and is counted apart. The sweep is what
`bench/power_sweep.py` reads. Exit code 1 below the bar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import power_sweep
from rules.signals.judging import judge_signals
from rules.signals.reading import parse
from rules.verdict import Diagnosis

BAR = 0.95
GATED = ("high", "medium")
HARMLESS = ("none", "demand")


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    control: bool
    gated: bool
    expected: tuple[str, ...]
    found: tuple[tuple[str, float], ...]  # (cause, confidence), most likely first
    forbidden: tuple[str, ...]

    @property
    def top(self) -> str:
        return self.found[0][0] if self.found else "none"

    @property
    def right(self) -> bool:
        return self.top in self.expected or (self.top == "none" and any(cause in HARMLESS for cause in self.expected))

    @property
    def violates(self) -> bool:
        """A forbidden cause is among the verdicts, at any rank; `x-alert` forbids an incident of cause x."""
        return bool({cause for cause, _ in self.found} & {name.removesuffix("-alert") for name in self.forbidden})

    @property
    def rank(self) -> int | None:
        return next((rank for rank, (cause, _) in enumerate(self.found, 1) if cause in self.expected), None)


def row_of(report: Mapping[str, object], diagnosis: Diagnosis) -> Row:
    expected = report["expected"]
    assert isinstance(expected, Mapping)
    return Row(
        name=str(report["id"]),
        control=report["kind"] != "incident",
        gated=report["confidence"] in GATED,
        expected=tuple(dict.fromkeys((expected["primary"], *expected["accept"]))),
        found=tuple((str(verdict.cause), verdict.confidence) for verdict in diagnosis.verdicts),
        forbidden=tuple(expected["must_not"]),
    )


def half_of(name: str) -> int:
    """0 or 1, by a hash of the id: so that rules may be written on one half and measured on the other."""
    return hashlib.sha256(name.encode()).digest()[0] % 2


def totals(title: str, rows: Sequence[Row], unjudged: int) -> bool:
    """Print one line of totals; whether it holds the bar."""
    gated = [row for row in rows if row.gated]
    right = sum(row.right for row in gated)
    share = right / len(gated) if gated else 1.0
    forbidden = sum(row.violates for row in rows)
    alarms = sum(bool(row.found) for row in rows if row.control)
    held = share >= BAR and not forbidden and not alarms
    print(
        f"{title:<12} right {right}/{len(gated)} ({100 * share:.1f} %) of high and medium; must_not {forbidden}; "
        f"incidents on controls {alarms}/{sum(row.control for row in rows)}; low confidence right "
        f"{sum(row.right for row in rows if not row.gated)}/{len(rows) - len(gated)}; without signals {unjudged}"
    )
    sure = [row for row in gated if row.found and row.found[0][1] >= 0.9]
    if sure:
        print(f"{'':<12} of {len(sure)} verdicts at 0.9 and above {sum(row.right for row in sure)} are right")
    return held


def judge_corpus(corpus: Path, half: int | None, preset: str) -> bool:
    """Print every report and the totals; whether the bar is held."""
    reports = json.loads(corpus.read_text("utf-8"))
    if half is not None:
        reports = [report for report in reports if half_of(report["id"]) == half]
    judged = [report for report in reports if report["signals"] is not None]
    rows = [row_of(report, judge_signals(parse(report["signals"]), preset)) for report in judged]
    print(f"{'report':<10} {'ok':<3} {'expected':<34} {'ours':<14} {'rank':>4} {'confidence':>10}  others")
    for row in rows:
        mark = "!" if row.violates or (row.control and row.found) else "+" if row.right else "-"
        others = ", ".join(f"{cause} {confidence:.2f}" for cause, confidence in row.found[1:])
        sure = f"{row.found[0][1]:.2f}" if row.found else ""
        expected = ", ".join(row.expected) + ("" if row.gated else " (low)")
        print(f"{row.name:<10} {mark:<3} {expected:<34} {row.top:<14} {row.rank or '':>4} {sure:>10}  {others}")
    print()
    for each in (0, 1):
        here = [row for row in rows if half_of(row.name) == each]
        if here and half is None:
            missing = sum(half_of(report["id"]) == each for report in reports) - len(here)
            totals(f"half {each}", here, missing)
    return totals("all", rows, len(reports) - len(rows))


def judge_sweep(folder: Path) -> bool:
    try:
        rows = power_sweep.sweep(folder)
    except (OSError, ValueError) as error:
        raise SystemExit(f"the power sweep can't be read: {error}") from None
    print("\n".join(power_sweep.told(rows)))
    return all(row.right for row in rows)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--incidents", type=Path, help="the corpus")
    arguments.add_argument("--half", type=int, choices=(0, 1), help="only this half, by a hash of the id")
    arguments.add_argument("--preset", default="evidence", help="prior weights: evidence or article")
    arguments.add_argument(
        "--power-sweep", type=Path, metavar="FOLDER", help="recordings of a card at several power caps"
    )
    given = arguments.parse_args()
    held: list[bool] = []
    if given.incidents is not None:
        held.append(judge_corpus(given.incidents, given.half, given.preset))
    if given.power_sweep is not None:
        held.append(judge_sweep(given.power_sweep))
    if not held:
        print("nothing to judge: name a corpus with --incidents FILE, or see --help", file=sys.stderr)
        return 2
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
