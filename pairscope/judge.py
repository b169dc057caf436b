"""Judging from the terminal: samples from a recording or from the store, judged by the rules, printed for a person."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pairscope.moment import iso
from pairscope.selection import open_for_reading
from rules.clocks import Clocks
from rules.present import MARKS, present_all
from rules.service import TriageSettings
from rules.strays import without_strays
from rules.triage import JudgeSettings, judge
from rules.verdict import Diagnosis, Status
from rules.window import KEPT
from telemetry import lineprotocol
from telemetry.messages import say
from telemetry.sample import Sample
from telemetry.store import Store, StoreError, Where, public_url

NODE_HISTORY_NS = 1800 * 10**9
FLEET_HISTORY_NS = 600 * 10**9
LARGE_BYTES, LARGE_PACKED_BYTES = 5_000_000, 500_000  # of a recording; a smaller one is judged before anybody wonders
SOME = 8  # nodes are named, of those that there are
FULL_PAIRS = 2  # so many are always shown whole
JUDGED = ("gpu", "engine", "host", "psu", "power", "thermal", "circuit", "event", "agent")
COLOURS = {
    Status.CONFIRMED: "bold red",
    Status.SYMPTOM: "yellow",
    Status.RULED_OUT: "green",
    Status.NO_DATA: "bright_black",
}


@contextmanager
def working(what: str) -> Iterator[None]:
    """A moving line on the terminal while something takes long; nothing where nobody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(what)):
        yield


def announce(path: Path, language: str) -> None:
    """One line at once where no terminal shows that work goes on, for a recording that is large enough to take a while."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with suppress(OSError):  # whoever reads it says so
        size, large = path.stat().st_size, LARGE_PACKED_BYTES if path.suffix == ".gz" else LARGE_BYTES
        if not console.is_terminal and size >= large:
            console.print(say("pairscope.judge.size", language, mb=size / 1e6), markup=False)


def read_recording(path: Path, language: str, nodes: Sequence[str] = ()) -> tuple[list[Sample], int]:
    """The samples (of these nodes) and how many lines could not be read.

    StoreError in one line, with what to do, where there is nothing to judge.
    """
    announce(path, language)
    try:
        with working(say("pairscope.judge.reading", language, where=path)):
            recording = lineprotocol.read(path)
            samples = list(recording)
    except (EOFError, zlib.error):
        raise StoreError(say("pairscope.judge.cut_off", language, path=path)) from None
    except gzip.BadGzipFile:
        raise StoreError(say("pairscope.judge.no_gzip", language, path=path)) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(say("pairscope.judge.unreadable", language, path=path, reason=reason)) from None
    samples, strays = without_strays(samples)
    if not samples and recording.bad_lines:
        first = recording.problems[0]
        values = {"path": path, "count": recording.bad_lines, "line": first.line, "reason": first.reason}
        raise StoreError(say("pairscope.judge.no_line", language, **values))
    refuse_nothing(samples, path, language)
    if recording.bad_lines:
        first = recording.problems[0]
        warning = say(
            "pairscope.judge.bad_lines",
            language,
            path=path,
            count=recording.bad_lines,
            line=first.line,
            reason=first.reason,
        )
        _warn(warning)
    if strays:
        values = {"path": path, "count": len(strays), "first": iso(strays[0].time_ns)}
        _warn(say("pairscope.judge.strays", language, **values, last=iso(max(s.time_ns for s in samples))))
    heard = {sample.tags["node"] for sample in samples if is_judged(sample)}
    if strange := [node for node in nodes if node not in heard]:
        values = {"path": path, "node": ", ".join(strange), "known": some_of(heard)}
        raise StoreError(say("pairscope.judge.none_of", language, **values))
    kept = [sample for sample in samples if not nodes or sample.tags.get("node") in nodes]
    return kept, recording.bad_lines


def _warn(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, style="yellow", markup=False, highlight=False)


def some_of(nodes: Iterable[str]) -> str:
    """The first few names, for a line on the terminal."""
    names = sorted(nodes)
    return lineprotocol.printable(", ".join(names[:SOME])) + (" ..." if len(names) > SOME else "")


def refuse_unheard(store: Store, url: str, nodes: Sequence[str], since_ns: int, language: str) -> None:
    """StoreError for a store without samples to judge since then: of which nodes there are some, else that the agent may not run."""
    known = {tags["node"] for name in KEPT for tags in store.series(name, since_ns=since_ns) if tags.get("node")}
    where = public_url(url)
    if nodes and known.difference(nodes):
        values = {"where": where, "node": ", ".join(nodes), "known": some_of(known)}
        raise StoreError(say("pairscope.judge.no_samples_of", language, **values))
    raise StoreError(say("pairscope.judge.no_samples", language, where=where))


def is_judged(sample: Sample) -> bool:
    """Whether a sample makes a pair: events and what the agent says of itself make none, nor does what names no node."""
    return sample.measurement in KEPT and bool(sample.tags.get("node"))


def refuse_nothing(samples: Sequence[Sample], where: object, language: str) -> None:
    """StoreError that says why, in one line, unless some sample makes a pair."""
    if any(is_judged(sample) for sample in samples):
        return
    key = "no_node" if any(sample.measurement in KEPT for sample in samples) else "only_events" if samples else "empty"
    raise StoreError(say(f"pairscope.judge.{key}", language, path=where, count=len(samples)))


def announce_live(url: str, start_ns: int, nodes: Sequence[str], language: str) -> None:
    """One line at once, on stderr, where no terminal shows that a store is being read: of a fleet that takes a while."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        named = ", ".join(nodes) or say("pairscope.judge.all_nodes", language)
        told = say("pairscope.judge.live", language, node=named, where=public_url(url), since=iso(start_ns))
        console.print(lineprotocol.printable(told), markup=False)


def judge_recording(
    path: Path, at_ns: int | None, settings: TriageSettings, node: str | None = None
) -> list[Diagnosis]:
    """Judge a line-protocol file; of one node, if it is named, with the others as its peers.

    StoreError, in one line, when it can't be read, holds nothing or nothing of that node; bad lines are told of.
    """
    language = settings.language
    samples, _ = read_recording(path, language)
    first_ns = min(sample.time_ns for sample in samples if is_judged(sample))
    if at_ns is not None and at_ns < first_ns:
        raise StoreError(say("pairscope.judge.before", language, path=path, first=iso(first_ns)))
    heard = {sample.tags["node"] for sample in samples if is_judged(sample)}
    if node is not None and node not in heard:
        raise StoreError(say("pairscope.judge.none_of", language, path=path, node=node, known=some_of(heard)))
    with working(say("pairscope.judge.judging", language, count=len(samples))):
        found = judge(samples, at_ns, JudgeSettings(preset=settings.priors))
    return [diagnosis for diagnosis in found if node in (None, diagnosis.subject["node"])]


def judge_live(settings: TriageSettings, at_ns: int | None, node: str | None) -> list[Diagnosis]:
    """Judge what the store holds of one node, or of all with None, at `at_ns` or now."""
    end_ns = time.time_ns() if at_ns is None else at_ns
    store = open_for_reading(settings.store_url, settings.language)
    try:
        start_ns = end_ns - (FLEET_HISTORY_NS if node is None else NODE_HISTORY_NS)
        announce_live(settings.store_url, start_ns, [node] if node else [], settings.language)
        samples = _read(store, start_ns, end_ns, {"node": node} if node else None)
        ahead = _ahead(store, end_ns, node) if at_ns is None else {}
        for name, offset in ahead.items():
            samples = [sample for sample in samples if sample.tags.get("node") != name]
            samples += _read(store, start_ns + offset, end_ns + offset, {"node": name})
        if not any(is_judged(sample) for sample in samples):
            refuse_unheard(store, settings.store_url, [node] if node else [], start_ns, settings.language)
    finally:
        store.close()
    with working(say("pairscope.judge.judging", settings.language, count=len(samples))):
        return judge(samples, end_ns, JudgeSettings(preset=settings.priors), ahead or None)


def _ahead(store: Store, now_ns: int, node: str | None) -> dict[str, int]:
    """Nanoseconds by which nodes send from the future; that one is behind can't be told from its silence at a glance."""
    clocks = Clocks()
    newest = store.latest("host", since_ns=now_ns, where={"node": node} if node else None)
    clocks.look({sample.tags["node"]: sample.time_ns for sample in newest if sample.tags.get("node")}, now_ns)
    return clocks.offsets


def _read(store: Store, start_ns: int, end_ns: int, where: Where | None) -> list[Sample]:
    found: list[Sample] = []
    for measurement in JUDGED:
        found += store.samples(measurement, start_ns=start_ns, end_ns=end_ns + 1, where=where)
    return found


def print_diagnoses(
    diagnoses: Sequence[Diagnosis], console: Console, language: str, *, whole: bool = False, as_given: bool = False
) -> None:
    """The lines of `rules.present`, a step's line in the colour of its status where the terminal has colours.

    Of a fleet, unless `whole`: the walk of one pair for each thing that is wrong, a line for every other pair, and the sum last.
    What is wrong comes first, unless `as_given`.
    """
    colours = {mark: COLOURS[status] for status, mark in MARKS.items()}
    shown = list(diagnoses) if whole or len(diagnoses) <= FULL_PAIRS else _one_of_each(diagnoses)
    for line in present_all(shown, language, as_given=as_given):
        console.print(Text(lineprotocol.printable(line), style=colours.get(line[:1], "")), soft_wrap=True)
    if len(shown) == len(diagnoses):
        return
    console.print()
    for diagnosis in diagnoses:
        if diagnosis not in shown:
            names = " / ".join(diagnosis.subject[tag] for tag in ("rack", "node", "engine") if tag in diagnosis.subject)
            style = "red" if diagnosis.verdicts else "green"
            told = lineprotocol.printable(f"{names}   {diagnosis.headline.text(language)}")
            console.print(Text(told, style=style), soft_wrap=True)
    console.print()
    wrong: dict[tuple[str, str], int] = {}
    for diagnosis in diagnoses:
        if diagnosis.verdicts:
            wrong[_named(diagnosis)] = wrong.get(_named(diagnosis), 0) + 1
    for (cause, where), count in wrong.items():
        spoken = say(f"rules.cause.{cause}", language)
        line = say("pairscope.judge.sum_wrong", language, cause=spoken, where=where, count=count)
        console.print(Text(line, style="bold red"), soft_wrap=True)
    healthy = sum(not diagnosis.verdicts for diagnosis in diagnoses)
    console.print(say("pairscope.judge.sum_rest", language, count=healthy), highlight=False)


def _named(diagnosis: Diagnosis) -> tuple[str, str]:
    """(cause, place) of the first verdict."""
    verdict = diagnosis.verdicts[0]
    place = [verdict.subject[tag] for tag in ("rack", "node", "engine", "gpu") if tag in verdict.subject]
    return str(verdict.cause), " / ".join(place) or verdict.scope


def _one_of_each(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    seen: dict[tuple[str, str], Diagnosis] = {}
    for diagnosis in diagnoses:
        if diagnosis.verdicts:
            seen.setdefault(_named(diagnosis), diagnosis)
    return list(seen.values()) or list(diagnoses[:1])
