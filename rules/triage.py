"""The judge: walks every pair through the ordered steps and keeps what it has learned of each. Live and from a recording alike."""

from __future__ import annotations

import gc
import logging
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rules.clocks import offsets_of, set_right
from rules.evidence import Evidence, OutputEvidence, PeerEvidence
from rules.expected import Point
from rules.finding import Effect, Finding, effect_of, line, no_data, summary
from rules.memory import PairMemory
from rules.observation import observe
from rules.observation.reader import BACK_S, NOW_S, Reader
from rules.output import load_of, measure_output
from rules.pair import Pair, pairs_of
from rules.priors import priors
from rules.ranking import all_no_data, reports_of, verdicts_of, weigh
from rules.scopes import widen
from rules.steps import WALK
from rules.steps.validity import is_silent
from rules.thresholds import Bar
from rules.usual import PeerHabits
from rules.verdict import Diagnosis, Line, Status, Step, Verdict
from rules.window import SECOND, Window
from telemetry.sample import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """`step_s` is how far a recording is walked between judgements; `history_s` how much of it before the moment is walked.

    A verdict takes `least_confidence`; beside one, its rivals are told from `least_rival` on.
    """

    preset: str = "evidence"
    step_s: float = 5.0
    history_s: float = 3600.0
    least_confidence: float = 0.3
    least_rival: float = 0.05


LONGEST_GAP_S = 3600.0
"""For so long silence is walked moment by moment, and no longer: a sample of a clock that was not set yet lies years before the others."""


class Triage:
    """Feed it samples, ask it at moments that go forward. Times are wall nanoseconds of the samples."""

    def __init__(self, settings: JudgeSettings | None = None) -> None:
        self.settings = settings or JudgeSettings()
        self.priors = priors(self.settings.preset)
        self.window = Window()
        self.memories: dict[str, PairMemory] = {}
        self.last: dict[str, Evidence] = {}
        """What the last evaluation saw, by pair."""
        self.clocks: Mapping[str, int] = {}
        """Nanoseconds by which clocks of nodes are off; their samples are set right before they are added."""
        self._trimmed_ns = 0
        self._failed: set[str] = set()

    def add(self, samples: Iterable[Sample]) -> None:
        self.window.add(samples)

    def forget_window(self) -> None:
        """Let go of all samples, as after a step of the clock; what was learned stays."""
        self.window = Window()
        self.last = {}

    def evaluate(self, at_ns: int) -> list[Diagnosis]:
        """The judgement of every pair at `at_ns`, in the order of nodes and engines; learns from the healthy ones.

        Garbage is not collected meanwhile: a judgement makes many small objects and no cycle, and looking through them costs a tenth.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._evaluate(at_ns)
        finally:
            if collects:
                gc.enable()

    def _evaluate(self, at_ns: int) -> list[Diagnosis]:
        if at_ns - self._trimmed_ns > BACK_S * SECOND / 10:
            self.window.trim(at_ns)
            self._trimmed_ns = at_ns
        pairs = pairs_of(self.window)
        fleet = _Fleet(self.window, pairs, self.memories, at_ns)
        judged: list[tuple[Pair, Diagnosis]] = []
        for pair in pairs:
            try:
                judged.append((pair, self._judge(pair, fleet, at_ns)))
            except Exception:  # one pair's numbers must never cost the others their judgement
                if pair.key not in self._failed:
                    self._failed.add(pair.key)
                    log.exception("%s can't be judged; it is left out", pair.key.replace("\x1f", " / "))
        return widen([diagnosis for pair, diagnosis in judged if not _is_gone(pair, self.last[pair.key])])

    def _judge(self, pair: Pair, fleet: _Fleet, at_ns: int) -> Diagnosis:
        memory = self.memories.setdefault(pair.key, PairMemory())
        memory.seen_ns = at_ns
        bar = Bar(frozenset(memory.held))
        kin = fleet.kin_of(pair)
        output, point = OutputEvidence("warming"), None
        if pair.engine is not None:
            ready = [other.model for other in kin if other.model.ready]
            output, point = measure_output(pair.engine, at_ns, memory.model, ready, bar)
        evidence = observe(
            self.window,
            pair,
            Reader(memory.usual, fleet.habits_of(pair), at_ns),
            output,
            fleet.peers_of(pair),
            fleet.other_inlet(pair),
            fleet.neighbour_temps(pair.node),
            self.clocks[pair.node] / SECOND if pair.node in self.clocks else None,
        )
        self.last[pair.key] = evidence
        findings = {step: examine(evidence, bar) for step, examine in WALK.items()}
        return self._conclude(pair, memory, evidence, findings, point)

    def _conclude(
        self,
        pair: Pair,
        memory: PairMemory,
        evidence: Evidence,
        findings: Mapping[Step, Sequence[Finding]],
        point: Point | None,
    ) -> Diagnosis:
        bar = Bar(frozenset(memory.held))
        silent = is_silent(evidence, bar)
        away = evidence.engine is not None and evidence.engine.away
        if away:
            findings = {
                step: found if step is Step.PHYSICAL else [_unknown_while_away(finding, evidence) for finding in found]
                for step, found in findings.items()
            }
        walked = list(findings[Step.VALIDITY] if silent else [f for found in findings.values() for f in found])
        effect = effect_of(evidence, bar)
        ranked = weigh(walked, self.priors)
        reports = reports_of(findings, ranked, self.priors)
        if silent:
            reports = all_no_data(reports, line("silent", "", age_s=min(evidence.silent_s, 1e6)))
        else:
            standing = {r.finding.cause: r.finding.since_ns or evidence.at_ns for r in ranked if r.symptom_of is None}
            memory.hold(standing, evidence.at_ns)
            self._learn(memory, evidence, effect, any(f.status is Status.CONFIRMED for f in walked), point)
        since = {cause: began for cause, (began, _) in memory.held.items()}
        least, rival = self.settings.least_confidence, self.settings.least_rival
        verdicts = verdicts_of(ranked, evidence, effect, pair.subject, since, least, rival, bar)
        shown = not silent and not away and output_is_real(evidence)
        return Diagnosis(
            subject=dict(pair.subject),
            at_ns=evidence.at_ns,
            steps=reports,
            verdicts=verdicts,
            headline=headline(evidence, effect, verdicts, silent, memory.slow_since_ns),
            output_pct=100 * evidence.output.output_ratio
            if shown and evidence.output.output_ratio is not None
            else None,
            util_pct=evidence.util_pct,
            expected_tokens_per_s=evidence.output.expected_tokens_per_s if shown else None,
            tokens_per_s=None if away else evidence.output.tokens_per_s,
            simulated=pair.simulated,
            unknown=frozenset(f.cause for found in findings.values() for f in found if f.status is Status.NO_DATA),
            seen=evidence,
        )

    def _learn(
        self, memory: PairMemory, evidence: Evidence, effect: Effect, abnormal: bool, point: Point | None
    ) -> None:
        """Learn in health only; a steady, unexplained level becomes the usual one after half an hour."""
        at_ns = evidence.at_ns
        if effect.slow and not abnormal:
            memory.slow_since_ns = memory.slow_since_ns or at_ns
            patience = Bar().enter("loss.unexplained_s")
            if at_ns - memory.slow_since_ns < patience * SECOND:
                memory.freeze()
                return
        elif not effect.slow:
            memory.slow_since_ns = None
        uptime = evidence.engine.uptime_s if evidence.engine else None
        young = uptime is not None and uptime < Bar().enter("cold_start.blind_s")
        if abnormal or young or (evidence.engine is not None and evidence.engine.down_s > 0):
            memory.freeze()
            return
        readings = _readings_of(evidence) if memory.wants_readings(at_ns) else {}
        memory.note(at_ns, point, readings)


def _readings_of(evidence: Evidence) -> dict[tuple[str, str], float]:
    """What may be learned as usual, by lane and source; an idle GPU's clocks and power are no sign of what they are under load."""
    unloaded = {gpu.index for gpu in evidence.gpus if not gpu.loaded}
    return {
        (seen.lane if seen.lane not in _COUNTED else "gpu.throttle_reasons", seen.source): seen.value
        for seen in evidence.observations()
        if not (seen.lane in _IDLE and seen.source.partition(".")[0] in unloaded)
    }


_IDLE = frozenset(
    f"gpu.{name}" for name in ("sm_clock_mhz", "power_w", "mem_clock_mhz", "pcie_gen", "throttle_reasons")
)


def _is_gone(pair: Pair, evidence: Evidence) -> bool:
    """A simulation that has ended, or an engine that its agent was told to watch no more: neither is blind, neither is judged."""
    bar = Bar()
    if pair.simulated and bar.reached("telemetry.simulation_over_s", evidence.silent_s):
        return True
    engine = evidence.engine
    return engine is not None and not is_silent(evidence, bar) and bar.reached("telemetry.gone_s", engine.age_s)


_COUNTED = frozenset(
    f"gpu.throttle_{name}_s" for name in ("hw_thermal", "sw_thermal", "thermal", "sw_power", "hw_power_brake")
)
"""A duty read from a duration counter is learned beside the one read from the mask."""


def _unknown_while_away(finding: Finding, evidence: Evidence) -> Finding:
    """What only a living engine can exonerate is not ruled out while it does not answer; the last numbers are old ones."""
    engine = evidence.engine
    if engine is None or finding.status is not Status.RULED_OUT:
        return finding
    key = "starting" if engine.starting else "not_answering"
    return no_data(finding.cause, line(key, "engine.up", engine=engine.name, down_s=engine.down_s))


def output_is_real(evidence: Evidence) -> bool:
    return evidence.engine is not None and evidence.output.output_ratio is not None


def headline(
    evidence: Evidence, effect: Effect, verdicts: Sequence[Verdict], silent: bool, slow_since_ns: int | None
) -> Line:
    """One sentence for the top of the page, also when nothing is wrong. A loss without a cause is told once it has lasted."""
    if verdicts:
        return verdicts[0].summary
    if silent:
        return summary("gap", age_s=min(evidence.silent_s, 1e6))
    engine = evidence.engine
    util = evidence.util_pct
    if engine is None:
        return summary("node_ok") if util is None else summary(f"node_ok_{evidence.effort}", util_pct=util)
    if engine.starting:
        return summary("starting", engine=engine.name, down_s=engine.down_s)
    if engine.away:
        return summary("engine_away", engine=engine.name)
    ratio = evidence.output.output_ratio
    if ratio is None:
        running = engine.running.value if engine.running is not None else None
        if running is not None and running < 0.3:
            return summary("idle")
        return summary("warming" if evidence.output.baseline == "warming" else "little")
    if effect.slow and effect.loss_pct is not None and slow_since_ns is not None:
        lasted_s = (evidence.at_ns - slow_since_ns) / SECOND
        if lasted_s >= Bar().enter("loss.noted_s"):
            return summary("unexplained", loss_pct=effect.loss_pct)
    if effect.slow_output:
        return summary("slow", output_pct=100 * ratio)
    if util is None:
        return summary("healthy", output_pct=100 * ratio)
    return summary(f"healthy_{evidence.effort}", output_pct=100 * ratio, util_pct=util)


_CANT_TELL = frozenset(
    f"rules.summary.{name}" for name in ("gap", "warming", "engine_away", "little", "slow", "unexplained")
)
_SILENT = frozenset(f"rules.summary.{name}" for name in ("silent", "gpu_silent", "engine_silent"))


def can_tell(diagnosis: Diagnosis) -> bool:
    """False while the absence of a verdict says nothing: a part is silent, nothing to compare with, a loss that nobody explains."""
    silent = any(verdict.summary.key in _SILENT for verdict in diagnosis.verdicts)
    return not silent and diagnosis.headline.key not in _CANT_TELL


def median_without(ordered: Sequence[float], own: float | None) -> float | None:
    """The median of the others: `ordered` is ascending and has `own` in it, unless that is None. None where there are no others."""
    skipped = len(ordered) if own is None else bisect_left(ordered, own)
    count = len(ordered) - (own is not None)
    if count < 1:
        return None
    low, high = (place + (place >= skipped) for place in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


class _Fleet:
    """What pairs can be compared on, at one moment."""

    def __init__(self, window: Window, pairs: Sequence[Pair], memories: Mapping[str, PairMemory], at_ns: int) -> None:
        self._window = window
        self._memories = memories
        self._kin: dict[tuple[str, str, int, bool], list[Pair]] = {}
        self._loads: dict[str, tuple[float, float, float]] = {}
        self._columns: dict[tuple[str, str, int, bool], list[list[float]]] = {}  # the loads of a kin, each ascending
        self._inlets: dict[str, float] = {}
        self._around: dict[bool, list[float]] = {}  # intakes, ascending
        self._origin: dict[str, bool] = {}
        self._habits: dict[tuple[str, str, int, bool], PeerHabits] = {}
        self._temps: dict[str, dict[str, float]] = {}
        self._start_ns, self._at_ns = at_ns - int(NOW_S * SECOND), at_ns
        for pair in pairs:
            self._origin[pair.node] = pair.simulated
            if pair.engine is None:
                continue
            self._kin.setdefault(pair.kin, []).append(pair)
            load = load_of(pair.engine, self._start_ns, at_ns)
            if load is not None:
                self._loads[pair.key] = (load.waiting, load.running, load.tokens_per_s)
        for node in self._origin:
            for device in window.devices(node, "thermal"):
                inlets = device.values("inlet_c", at_ns - 150 * SECOND, at_ns)
                if inlets:
                    self._inlets[node] = inlets[-1]

    def kin_of(self, pair: Pair) -> list[PairMemory]:
        """Memories of up to nine pairs that do the same work on other nodes."""
        if pair.engine is None:
            return []
        others = (other.key for other in self._kin.get(pair.kin, ()) if other.key != pair.key)
        return list(islice((self._memories[key] for key in others if key in self._memories), 9))

    def peers_of(self, pair: Pair) -> PeerEvidence:
        if pair.engine is None:
            return PeerEvidence()
        columns = self._columns.get(pair.kin)
        if columns is None:
            loads = [self._loads[kin.key] for kin in self._kin.get(pair.kin, ()) if kin.key in self._loads]
            columns = self._columns[pair.kin] = [sorted(column) for column in zip(*loads, strict=True)]
        own = self._loads.get(pair.key, (None, None, None))
        others = len(columns[0]) - (own[0] is not None) if columns else 0
        if not others:
            return PeerEvidence()
        waiting, running, tokens = map(median_without, columns, own)
        ranges = [memory.usual.range("engine.requests_running", "") for memory in self.kin_of(pair)]
        usual = [known[1] for known in ranges if known is not None]
        return PeerEvidence(others, waiting, running, tokens, statistics.median(usual) if usual else None)

    def other_inlet(self, pair: Pair) -> float | None:
        """The median intake of the other nodes, of simulated ones among themselves."""
        around = self._around.get(pair.simulated)
        if around is None:
            mine = [inlet for node, inlet in self._inlets.items() if self._origin[node] is pair.simulated]
            around = self._around[pair.simulated] = sorted(mine)
        return median_without(around, self._inlets.get(pair.node))

    def habits_of(self, pair: Pair) -> PeerHabits:
        """What is usual among the pair's kin, itself included: it is asked for only where the pair itself knows nothing."""
        if pair.engine is None:
            return PeerHabits()
        if pair.kin not in self._habits:
            known = [self._memories[kin.key] for kin in self._kin[pair.kin] if kin.key in self._memories]
            self._habits[pair.kin] = PeerHabits([memory.usual for memory in known[:16]])
        return self._habits[pair.kin]

    def neighbour_temps(self, node: str) -> dict[str, float]:
        """The temperature of every GPU of the node, by index."""
        if node not in self._temps:
            readings = {
                device.tags.get("gpu", ""): device.values("temp_c", self._start_ns, self._at_ns)
                for device in self._window.devices(node, "gpu")
            }
            self._temps[node] = {index: statistics.median(temps) for index, temps in readings.items() if temps}
        return self._temps[node]


def judge(
    samples: Iterable[Sample],
    at_ns: int | None = None,
    settings: JudgeSettings | None = None,
    clocks: Mapping[str, int] | None = None,
) -> list[Diagnosis]:
    """The judgement of every pair of a recording at `at_ns` (default: its newest sample).

    Samples may come in any order. The recording is walked as if it were live, so that what is usual is learned from what came
    before; with less than about two minutes before the moment, pairs are still warming and only hard faults are named.

    `clocks` holds by how many nanoseconds the clocks of nodes are off (default: as the recording shows, see `rules.clocks`).
    """
    last = deque(walk(samples, at_ns, settings, clocks), maxlen=1)
    return last[0][1] if last else []


def walk(
    samples: Iterable[Sample],
    at_ns: int | None = None,
    settings: JudgeSettings | None = None,
    clocks: Mapping[str, int] | None = None,
) -> Iterator[tuple[Triage, list[Diagnosis]]]:
    """As `judge`, moment by moment up to the last: the triage, whose `last` holds what it saw, and its judgement of every pair."""
    settings = settings or JudgeSettings()
    if clocks is None:
        samples = list(samples)
        clocks = offsets_of(samples)
    right = set_right(samples, clocks) if clocks else samples
    ordered = sorted((s for s in right if at_ns is None or s.time_ns <= at_ns), key=lambda s: s.time_ns)
    if not ordered:
        return
    end_ns = at_ns if at_ns is not None else ordered[-1].time_ns
    triage = Triage(settings)
    triage.clocks = clocks
    step_ns = int(settings.step_s * SECOND)
    start_ns = max(ordered[0].time_ns, end_ns - int(settings.history_s * SECOND))
    moment = end_ns - (end_ns - start_ns) // step_ns * step_ns
    gap_ns = int(LONGEST_GAP_S * SECOND)
    position = 0
    while moment <= end_ns:
        begin = position
        while position < len(ordered) and ordered[position].time_ns <= moment:
            position += 1
        triage.add(ordered[begin:position])
        yield triage, triage.evaluate(moment)
        moment += step_ns
        next_ns = ordered[position].time_ns if position < len(ordered) else end_ns
        if moment < next_ns and moment - ordered[position - 1].time_ns > gap_ns:
            moment += (next_ns - moment) // step_ns * step_ns
