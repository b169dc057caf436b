"""How often the judgement is right: of real incidents, of recordings, of simulated faults and of healthy days.

python bench/triage.py --incidents incidents.json
    The corpus is a JSON list of reports, each with `id`, `kind`, `confidence`, `signals` (what `pairscope triage --signals` takes) and
    `expected` (`primary`, `accept`, `must_not`); a report without signals can't be judged and is counted apart.
python bench/triage.py --public [--half 1]
    The corpus of public reports in `bench/corpora/`, written down before any of them was judged. Rules may be mended by what half 0
    shows; half 1 is for measuring only.
python bench/triage.py --power-sweep FOLDER
    The recordings that `bench/power_sweep.py` reads.
python bench/triage.py --cases
    Published faults, published claims that can't be, and 32 cards of which six stand behind a blocked intake (`bench/triage_cases.py`,
    `bench/blocked_inlet.py`).
python bench/triage.py --simulated [--kinds power-cap,dust] [--seeds 20] [--first-seed 1] [--loads 0.6,0.83] [--jobs 2]
    Every kind of simulated fault and its null twin, on each seed and load (see `bench/triage_simulated.py`).
python bench/triage.py --traces FOLDER [--gpu-days 60] [--first-seed 1] [--trace NAME] [--live] [--jobs 2]
    Healthy days with the arrivals of public traces (see `bench/triage_days.py`): a node, with a seed of its own, for each 7.5 GPU-days.
    One such day alone is --trace synthetic_trace --first-seed 4 --gpu-days 1.5.

They may be asked for together. Exit code 1 below a bar, 2 for what can't be asked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agent.simulator.sku import SKUS
from bench import blocked_inlet, power_sweep, triage_cases, triage_days, triage_simulated
from rules.signals.judging import judge_signals
from rules.signals.reading import parse
from rules.verdict import Diagnosis

PUBLIC = ROOT / "bench" / "corpora" / "public_reports.json"
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


def judge_simulated(given: argparse.Namespace) -> bool:
    """Simulated faults, healthy days, or both; whether the bars are held. ValueError for what can't be asked."""
    kinds = tuple(given.kinds.split(","))
    unknown = [kind for kind in kinds if kind not in triage_simulated.KINDS]
    if unknown:
        raise ValueError(f"no kind is named {', '.join(unknown)}; there are {', '.join(triage_simulated.KINDS)}")
    first, cadence = given.first_seed, triage_days.LIVE if given.live else triage_days.COARSE
    nodes = (
        [] if given.traces is None else triage_days.nodes_of(given.traces, given.gpu_days, first, given.trace, cadence)
    )
    groups = [
        triage_simulated.Group(seed, float(load), given.sku, kinds)
        for seed in range(first, first + given.seeds)
        for load in given.loads.split(",")
        if given.simulated
    ]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        faults = progress.add_task("faults: seeds and loads", total=len(groups), visible=bool(groups))
        days = progress.add_task("healthy days: nodes", total=len(nodes), visible=bool(nodes))
        runs = triage_simulated.play_all(groups, given.jobs, lambda done: progress.update(faults, completed=done))
        told = triage_days.live_all(nodes, given.jobs, lambda done: progress.update(days, completed=done))
    if given.json:
        print(json.dumps({"runs": [asdict(run) for run in runs], "days": [asdict(entry) for entry in told]}))
    else:
        print("\n".join([*(triage_simulated.told(runs) if groups else []), *(triage_days.told(told) if nodes else [])]))
    return triage_simulated.holds(runs) and triage_days.holds(told)


def judge_cases() -> bool:
    """Print each case and the 32 cards; whether all are right."""
    outcomes = [triage_cases.judged(case) for case in (*triage_cases.FAULTS, *triage_cases.TRAPS)]
    print("\n".join(triage_cases.told(outcomes)))
    cards = blocked_inlet.judged()
    print("\n".join(blocked_inlet.told(cards)))
    return all(outcome.right for outcome in outcomes) and cards.right


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--incidents", type=Path, help="the corpus")
    arguments.add_argument("--public", action="store_true", help="the public reports of this repository")
    arguments.add_argument("--half", type=int, choices=(0, 1), help="only this half, by a hash of the id")
    arguments.add_argument("--preset", default="evidence", help="prior weights: evidence or article")
    arguments.add_argument(
        "--power-sweep", type=Path, metavar="FOLDER", help="recordings of a card at several power caps"
    )
    arguments.add_argument("--cases", action="store_true", help="published faults and claims, and the 32 cards")
    arguments.add_argument("--simulated", action="store_true", help="simulated faults and their null twins")
    arguments.add_argument("--kinds", default=",".join(triage_simulated.KINDS), help="simulated faults, by name")
    arguments.add_argument("--seeds", type=int, default=20, help="runs of each kind on each load")
    arguments.add_argument("--first-seed", type=int, default=1, help="of the runs and of the healthy days")
    arguments.add_argument("--loads", default=",".join(map(str, triage_simulated.LOADS)), help="shares of the capacity")
    arguments.add_argument("--sku", default="h100-sxm", choices=sorted(SKUS), help="the simulated board")
    arguments.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="Azure's and Mooncake's traces, for healthy days"
    )
    arguments.add_argument("--gpu-days", type=float, default=60.0, help="of healthy days")
    arguments.add_argument("--trace", default="", help="only this one of the traces, by its name without the ending")
    arguments.add_argument("--live", action="store_true", help="healthy days as fine as an agent and the service are")
    arguments.add_argument("--jobs", type=int, default=1, help="processes that simulate")
    arguments.add_argument("--json", action="store_true", help="all that was simulated as JSON instead of tables")
    given = arguments.parse_args()
    held: list[bool] = []
    if given.incidents is not None:
        held.append(judge_corpus(given.incidents, given.half, given.preset))
    if given.public:
        held.append(judge_corpus(PUBLIC, given.half, given.preset))
    if given.power_sweep is not None:
        held.append(judge_sweep(given.power_sweep))
    if given.cases:
        held.append(judge_cases())
    if given.simulated or given.traces is not None:
        try:
            held.append(judge_simulated(given))
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    if not held:
        print("nothing to judge: name a corpus with --incidents FILE, or see --help", file=sys.stderr)
        return 2
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
