"""The triage service: reads the store every few seconds, judges every pair, writes pairs, verdicts and alerts, tells the webhook."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rules.alertfile import load_alerts
from rules.alerts import AlertMachine, AlertSettings, alert_sample
from rules.clocks import Clocks, set_right
from rules.memory import PairMemory
from rules.notification import Voice, messages_of, summary_text
from rules.observation.reader import BACK_S
from rules.outage import Outage, without_silence
from rules.pair import pairs_of
from rules.statefile import put_aside, read_state, write_state
from rules.triage import JudgeSettings, Triage
from rules.verdict import Diagnosis
from rules.verdict_record import VerdictRecord
from rules.webhook import Message, Outbox, Sender, WebhookError
from rules.window import KEPT, SECOND
from telemetry.lineprotocol import printable
from telemetry.logs import and_then
from telemetry.messages import say
from telemetry.process import notify, stop_event
from telemetry.sample import Sample
from telemetry.store import Store, StoreError, open_store
from telemetry.store.upkeep import Upkeep

log = logging.getLogger(__name__)

READ = (*KEPT, "event")
OVERLAP_S = 10.0  # samples that reach the store this late are still read in the next turn
LEARN_FROM_S = 1800.0  # history walked for a node that nothing is known of
LEARN_FLEET_FROM_S = 600.0  # of so many nodes that they can serve as each other's peers
LEARN_FLEET = 20
LEARN_STEP_S = 10.0
READ_SAMPLES = 8_000  # are held at once: those of a thousand GPUs over five minutes would be gigabytes
FIRST_PART_NS, LONGEST_PART_NS = 2 * SECOND, 600 * SECOND
UNWRITTEN_SAMPLES = 5000
BASELINE_EVERY_S = 60.0
FORGET_BASELINE_S = 30 * 86_400.0
CLOCK_STEP_S = 30.0
CLOCKS_EVERY_S = 20.0
CLOCKS_BACK_S = 86_400.0  # a clock that is further behind is not found
BASELINE, ALERTS, OUTBOX = "baseline.json", "alerts.json", "outbox"


@dataclass(frozen=True, slots=True)
class TriageSettings:
    """Settings of the service. `webhook_secret` signs messages and is never logged; `external_url` makes the links in them."""

    store_url: str
    state_dir: Path
    evaluate_every_s: float = 5.0
    webhook_url: str | None = None
    webhook_secret: str | None = field(default=None, repr=False)
    language: str = "en"
    external_url: str = ""
    priors: str = "evidence"
    alerts: AlertSettings = field(default_factory=AlertSettings)


def run(settings: TriageSettings) -> int:
    """Judge until SIGTERM or SIGINT. 0, or 2 with one line on stderr for a setting that can't be used."""
    stopping = stop_event()
    try:
        service = Service(settings, open_store(settings.store_url))
    except (StoreError, WebhookError, OSError, ValueError) as error:
        reason = _told(error, settings)
        print(say("rules.start.unusable", settings.language, reason=reason), file=sys.stderr)
        return 2
    service.start()
    upkeep = Upkeep(lambda: open_store(settings.store_url))
    if not settings.store_url.startswith("sqlite:"):  # the embedded store has the agent of its host
        upkeep.start()
    told = False
    next_s = time.monotonic()
    while not stopping.is_set():
        done = service.turn(time.time_ns(), time.monotonic())
        if done:
            status = f"{len(service.diagnoses)} pairs, {len(service.machine.open())} alerts open"
            notify(STATUS=status) if told else notify(READY="1", STATUS=status)
            told = True
        next_s = max(next_s + settings.evaluate_every_s, time.monotonic())
        stopping.wait(next_s - time.monotonic())
    upkeep.stop(0.5)
    service.stop()
    return 0


def _told(error: Exception, settings: TriageSettings) -> str:
    if isinstance(error, StoreError | WebhookError):
        return error.told(settings.language)
    if isinstance(error, OSError):
        path, reason = error.filename or settings.state_dir, error.strerror or str(error)
        return say("rules.start.state", settings.language, path=path, reason=reason, uid=os.getuid())
    return str(error)


def _most_needed(samples: Sequence[Sample]) -> list[Sample]:
    """What is kept of more than can be: a verdict's text and an alert are written once, a pair every few seconds."""
    if len(samples) <= UNWRITTEN_SAMPLES:
        return list(samples)
    rare = [sample for sample in samples if sample.measurement != "pair"][-UNWRITTEN_SAMPLES:]
    pairs = [sample for sample in samples if sample.measurement == "pair"]
    return [*pairs[len(pairs) - min(len(pairs), UNWRITTEN_SAMPLES - len(rare)) :], *rare]


def named_place(place: Mapping[str, str]) -> str:
    """Each part of a place with its label, once, for the log: `node n07, rack r2 (simulated)`."""
    origin = place.get("origin", "")
    labels = [name for name in ("node", "rack", "circuit", "cluster") if place.get(name) and place[name] != origin]
    named = ", ".join(f"{name} {printable(place[name])}" for name in labels) or "all nodes"
    return f"{named} ({printable(origin)})" if origin else named


class Service:
    """One turn at a time, with the clocks passed in. Holds everything that outlives a turn."""

    def __init__(self, settings: TriageSettings, store: Store) -> None:
        self.settings = settings
        self.store = store
        self.folder = settings.state_dir
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.triage = Triage(JudgeSettings(preset=settings.priors))
        self.machine = self._load_alerts()
        self.diagnoses: list[Diagnosis] = []
        self.voice = Voice(settings.language, settings.external_url)
        self.outbox = Outbox(self.folder / OUTBOX) if settings.webhook_url else None
        self.sender: Sender | None = None
        if self.outbox is not None and settings.webhook_url:
            self.sender = Sender(self.outbox, settings.webhook_url, secret=settings.webhook_secret)
        self._load_baseline()
        self._cursor_ns: int | None = None
        self._last_s: float | None = None
        self._saved_s = 0.0
        self._nodes: set[str] = set()
        self._clocks = Clocks()
        self._looked_ns = 0  # at clocks
        self._part_ns = FIRST_PART_NS  # of time is read at once
        self._record = VerdictRecord()
        self._unwritten: list[Sample] = []
        self._down_logged_s = float("-inf")
        self._outage = Outage()

    def start(self) -> None:
        if self.sender is not None:
            self.sender.start()

    def stop(self) -> None:
        self._save_baseline()
        if self.sender is not None:
            self.sender.stop(1.0)
        self.store.close()

    def turn(self, at_ns: int, now_s: float) -> bool:
        """Read, judge, write. False when the store could not be read: then nothing is judged, and nothing fires or ends."""
        try:
            self._read(at_ns)
        except StoreError as error:
            self._outage.unread(now_s)
            self._say_down(error, now_s)
            return False
        self.diagnoses = self.triage.evaluate(at_ns)
        if self._outage.holds(self.triage.window, at_ns, now_s):
            self.diagnoses = without_silence(self.diagnoses)
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        written = [
            *self._pair_samples(at_ns),
            *self._record.samples(self.diagnoses),
            *self._alert(at_ns, now_s, elapsed_s),
        ]
        self._write(written, now_s)
        if now_s - self._saved_s >= BASELINE_EVERY_S:
            self._save_baseline()
            self._saved_s = now_s
        return True

    # --- reading

    def _read(self, at_ns: int) -> None:
        if self._cursor_ns is not None and at_ns < self._cursor_ns - CLOCK_STEP_S * SECOND:
            log.warning("the clock went back by %.0f s: the window starts anew", (self._cursor_ns - at_ns) / SECOND)
            self.triage.forget_window()
            self._cursor_ns = None
        back_s = BACK_S if self._cursor_ns is None else OVERLAP_S  # the window needs its few minutes back
        start_ns = (self._cursor_ns or at_ns) - int(back_s * SECOND)
        found = self._look_at_clocks(at_ns)
        off = self._clocks.offsets
        for part in self._parts(start_ns, at_ns + 1):
            fresh = [sample for sample in part if sample.tags.get("node") not in off]
            new = {sample.tags.get("node", "") for sample in fresh} - self._nodes
            unlearned = [node for node in sorted(new) if not self._is_known(node)]
            if unlearned:
                self._learn_past(unlearned, fresh[0].time_ns, at_ns)
            self.triage.add(fresh)
            self._nodes |= new
        for node, offset in off.items():
            since_ns = at_ns - int(BACK_S * SECOND) if node in found else start_ns
            for part in self._parts(since_ns + offset, at_ns + 1 + offset, [node]):
                self.triage.add(set_right(part, off))
        if self._cursor_ns is None:
            self.triage.add(self._events(at_ns - 3600 * SECOND, start_ns))
        self._cursor_ns = at_ns

    def _look_at_clocks(self, at_ns: int) -> set[str]:
        """Look for nodes that send with other times than this host's; those that were not known before."""
        if 0 <= at_ns - self._looked_ns < CLOCKS_EVERY_S * SECOND:
            return set()
        self._looked_ns = at_ns
        known = dict(self._clocks.offsets)
        newest: dict[str, int] = {}
        for sample in self.store.latest("host", since_ns=at_ns - int(CLOCKS_BACK_S * SECOND)):
            node = sample.tags.get("node", "")
            newest[node] = max(newest.get(node, sample.time_ns), sample.time_ns)
        self._clocks.look(newest, at_ns)
        self.triage.clocks = off = self._clocks.offsets
        found = {node for node, offset in off.items() if known.get(node) != offset}
        for node in sorted(found):
            side = "ahead of" if off[node] > 0 else "behind"
            log.warning(
                "the clock of node %s is %.0f s %s this host's; set it right (chrony or NTP)",
                printable(node),
                abs(off[node]) / SECOND,
                side,
            )
        if len(found) > 1 and len(found) == len(newest):
            log.warning(
                "the clocks of all %d nodes differ from this host's: it is likely this one that is off", len(found)
            )
        return found

    def _parts(self, start_ns: int, end_ns: int, nodes: Sequence[str] = ()) -> Iterator[list[Sample]]:
        """What the window keeps of this time, in parts of some thousand samples, oldest first."""
        where = {"node": list(nodes)} if nodes else None
        while start_ns < end_ns:
            until_ns = min(end_ns, start_ns + self._part_ns)
            found: list[Sample] = []
            for measurement in READ:
                found += self.store.samples(measurement, start_ns=start_ns, end_ns=until_ns, where=where)
            found.sort(key=lambda sample: sample.time_ns)
            if until_ns - start_ns == self._part_ns or len(found) > READ_SAMPLES:
                fitting_ns = (until_ns - start_ns) * READ_SAMPLES // max(1, len(found))
                self._part_ns = min(max(SECOND // 4, fitting_ns), 4 * self._part_ns, LONGEST_PART_NS)
            start_ns = until_ns
            yield found

    def _events(self, start_ns: int, end_ns: int) -> list[Sample]:
        return self.store.samples("event", start_ns=start_ns, end_ns=end_ns)

    def _is_known(self, node: str) -> bool:
        return any(key.split("\x1f")[0] == node for key in self.triage.memories)

    def _learn_past(self, nodes: Sequence[str], start_ns: int, at_ns: int) -> None:
        """Walk what the store holds of nodes that are new, so that they are judged at once and not in two minutes."""
        back_s = LEARN_FROM_S if len(nodes) <= LEARN_FLEET else LEARN_FLEET_FROM_S
        notify(STATUS=f"learning from the last minutes of {len(nodes)} nodes")
        walker = Triage(self.triage.settings)
        walker.memories = dict(self.triage.memories)  # the known ones serve as peers
        step_ns = int(LEARN_STEP_S * SECOND)
        recent_ns = at_ns - int(BACK_S * SECOND)
        is_first = not self.triage.window.nodes()  # then the walker's window becomes its own, for two would be large
        moment: int | None = None
        for past in self._parts(at_ns - int(back_s * SECOND), start_ns, nodes):
            position = 0
            while past and (moment is None or moment <= past[-1].time_ns):
                moment = past[0].time_ns if moment is None else moment
                begin = position
                while position < len(past) and past[position].time_ns <= moment:
                    position += 1
                walker.add(past[begin:position])
                walker.evaluate(moment)
                moment += step_ns
            walker.add(past[position:])
            if not is_first:
                self.triage.add(s for s in past if s.time_ns > recent_ns or s.measurement == "event")
        if is_first:
            self.triage.window = walker.window
        for key, memory in walker.memories.items():
            self.triage.memories.setdefault(key, memory)

    # --- writing

    def _pair_samples(self, at_ns: int) -> Iterable[Sample]:
        pairs = {tuple(sorted(pair.subject.items())): pair for pair in pairs_of(self.triage.window)}
        for diagnosis in self.diagnoses:
            pair = pairs.get(tuple(sorted(diagnosis.subject.items())))
            evidence = self.triage.last.get(pair.key) if pair is not None else None
            if pair is None or evidence is None or evidence.silent_s > 15:
                continue
            tags = dict(diagnosis.subject)
            if pair.engine is not None:
                tags |= {name: pair.engine.tags[name] for name in ("model", "gpus") if pair.engine.tags.get(name)}
            numbers = {
                "output_pct": diagnosis.output_pct,
                "util_pct": diagnosis.util_pct,
                "tokens_per_s": diagnosis.tokens_per_s,
                "expected_tokens_per_s": diagnosis.expected_tokens_per_s,
                "expected_spread_pct": None if evidence.output.spread is None else 100 * evidence.output.spread,
            }
            fields: dict[str, float | int | str] = {
                name: float(number) for name, number in numbers.items() if number is not None
            }
            if not fields:
                continue
            fields |= {"effort": evidence.effort}
            if pair.engine is not None:
                fields["baseline"] = evidence.output.baseline
            yield Sample("pair", tags, fields, at_ns)

    def _alert(self, at_ns: int, now_s: float, elapsed_s: float) -> Iterable[Sample]:
        """Advance the alerts. A message is in the outbox before the state says that it was told."""
        had = bool(self.machine.alerts)
        transitions = self.machine.step(self.diagnoses, at_ns, elapsed_s)
        try:
            if self._tell(messages_of(transitions, self.voice), now_s) and (had or self.machine.alerts):
                write_state(self.folder / ALERTS, self.machine.state())
        except OSError as error:
            self._say_down(error, now_s)
        for transition in transitions:
            alert = transition.alert
            log.warning("alert %s: %s on %s", transition.state, alert.cause, named_place(alert.place))
            yield alert_sample(alert, summary_text(alert, "en"), at_ns)
        told = {transition.alert.fingerprint for transition in transitions}
        for alert in self.machine.open():
            if alert.fingerprint not in told:
                yield alert_sample(alert, summary_text(alert, "en"), at_ns)

    def _tell(self, messages: Iterable[Message], now_s: float) -> bool:
        """Put the messages out, and say whether the state may follow: not while one is in memory alone, which a crash would lose."""
        if self.outbox is None:
            return True
        for message in messages:
            try:
                self.outbox.put(message)
            except OSError as error:
                self._say_down(error, now_s)
        return self.outbox.save()

    def _write(self, samples: Sequence[Sample], now_s: float) -> None:
        """What could not be written is kept for the next turn, for a few minutes' worth of turns."""
        batch = [*self._unwritten, *samples]
        try:
            for rejected in self.store.write(batch):
                log.error("the store refused a %s sample: %s", rejected.sample.measurement, rejected.reason)
            self._unwritten = []
        except StoreError as error:
            self._unwritten = _most_needed(batch)
            self._say_down(error, now_s)

    def _say_down(self, error: Exception, now_s: float) -> None:
        if now_s - self._down_logged_s >= 60:
            self._down_logged_s = now_s
            log.warning("%s", and_then(str(error), "trying again"))

    # --- state

    def _load_alerts(self) -> AlertMachine:
        return load_alerts(self.folder / ALERTS, self.settings.alerts)

    def _load_baseline(self) -> None:
        path = self.folder / BASELINE
        state = read_state(path)
        if state is None:
            return
        try:
            if not isinstance(state, dict) or state.get("version") != 1:
                raise ValueError("it was made by another version")
            self.triage.memories = {key: PairMemory.of(plain) for key, plain in state["pairs"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.triage.memories = {}
            put_aside(path, str(error))

    def _save_baseline(self) -> None:
        memories = self.triage.memories
        newest = max((memory.seen_ns for memory in memories.values()), default=0)
        oldest = newest - int(FORGET_BASELINE_S * SECOND)
        pairs = {key: memory.state() for key, memory in memories.items() if memory.seen_ns >= oldest}
        try:
            write_state(self.folder / BASELINE, {"version": 1, "pairs": pairs})
        except OSError as error:
            log.warning("%s can't be written: %s", self.folder / BASELINE, error)
