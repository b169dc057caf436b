"""The service over a real store: what it reads, writes, remembers and tells, through restarts, outages and stepped clocks."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rules.service import Service, TriageSettings
from rules.verdict import Cause, from_sample
from telemetry.catalogue import check
from telemetry.sample import Sample
from telemetry.store import StoreDown, open_store
from tests.rules.plant import SECOND, T0, Moment, Node, bend, fleet, scene

AT = 200
ROOT = Path(__file__).parents[2]
BRAKE = bend(mask=0x88, clock=870, power=330, work=1.4, temp=52)


def brake_until(end: int):  # type: ignore[no-untyped-def]
    def fault(moment: Moment) -> None:
        if moment.t < end:
            BRAKE(moment)

    return fault


class House:
    """A service on a store in a folder, with the clock in hand."""

    def __init__(self, folder: Path, samples: Sequence[Sample], **options: object) -> None:
        self.folder = folder
        self.samples = samples
        self.url = f"sqlite://{folder}/store.db"
        self.options = options
        self.position = 0
        self.service = self.open()

    def open(self) -> Service:
        settings = TriageSettings(
            store_url=self.url,
            state_dir=self.folder / "state",
            webhook_url="http://127.0.0.1:9/never-started",
            **self.options,  # type: ignore[arg-type]
        )
        self.service = Service(settings, open_store(self.url))
        return self.service

    def deliver(self, t: float) -> None:
        """The agents' samples up to second t reach the store."""
        begin = self.position
        while self.position < len(self.samples) and self.samples[self.position].time_ns <= T0 + t * SECOND:
            self.position += 1
        if self.position > begin:
            self.service.store.write(self.samples[begin : self.position])

    def walk(self, start: int, end: int, every: int = 5) -> None:
        for t in range(start, end, every):
            self.deliver(t)
            assert self.service.turn(T0 + t * SECOND, float(t))

    def told(self) -> list[dict[str, object]]:
        outbox = self.service.outbox
        assert outbox is not None
        return [json.loads(outbox.read(path).body) for path in outbox.waiting()]

    def stored(self, measurement: str) -> list[Sample]:
        return self.service.store.samples(measurement, start_ns=T0, end_ns=T0 + 10**13)


def test_an_incident_is_written_and_told_once_when_it_begins_and_once_when_it_ends(tmp_path: Path) -> None:
    house = House(tmp_path, scene(fleet(brake_until(AT + 90), AT), AT + 300))
    house.walk(0, AT + 300)
    firing, resolved = house.told()
    assert (firing["status"], resolved["status"]) == ("firing", "resolved")
    assert firing["verdict"]["cause"] == "power"  # type: ignore[index]
    assert firing["commonLabels"]["node"] == "n2"  # type: ignore[index]
    assert firing["pair"]["gpu_util"] == pytest.approx(97, abs=2)  # type: ignore[index]

    alerts = house.stored("alert")
    assert {alert.tags["node"] for alert in alerts} == {"n2"}
    states = [alert.fields["state"] for alert in alerts]
    assert states == sorted(states[: states.index(2)]) + [2] * states.count(2) + [0]

    pairs = [sample for sample in house.stored("pair") if sample.tags["node"] == "n2"]
    during = [s for s in pairs if AT + 40 <= (s.time_ns - T0) / SECOND < AT + 90]
    assert all(s.fields["output_pct"] == pytest.approx(71, abs=5) for s in during)
    assert all(s.fields["effort"] == "gpu" and s.fields["baseline"] == "history" for s in during)
    assert pairs[0].fields["baseline"] == "warming" and "output_pct" not in pairs[0].fields
    assert pairs[0].tags["model"] == "qwen2-7b" and pairs[0].tags["gpus"] == "0+1"

    told = [sample for sample in house.stored("verdict") if sample.tags["node"] == "n2" and "evidence" in sample.fields]
    verdicts = [from_sample(sample) for sample in told]
    named = [d for d in verdicts if d.verdicts]
    assert named and {d.verdicts[0].cause for d in named} == {Cause.POWER}
    assert not verdicts[-1].verdicts
    for measurement in ("pair", "verdict", "alert"):
        for sample in house.stored(measurement):
            check(sample)


def test_a_quiet_pair_has_a_verdict_sample_every_half_minute_and_not_more_often(tmp_path: Path) -> None:
    house = House(tmp_path, scene([Node("n1", seed=1)], 400))
    house.walk(0, 400)
    times = [(s.time_ns - T0) // SECOND for s in house.stored("verdict")]
    late = [t for t in times if t >= 200]
    assert 5 <= len(late) <= 8
    assert max(b - a for a, b in itertools.pairwise(late)) <= 30


def test_a_restart_in_the_middle_of_an_incident_tells_nothing_twice_and_forgets_nothing(tmp_path: Path) -> None:
    house = House(tmp_path, scene(fleet(brake_until(AT + 130), AT), AT + 340))
    house.walk(0, AT + 30)  # pending
    house.service.stop()
    house.open()
    house.walk(AT + 30, AT + 100)  # fires
    assert [m["status"] for m in house.told()] == ["firing"]
    house.service.stop()
    house.open()
    assert house.service.triage.memories, "what was learned is back"
    house.walk(AT + 100, AT + 340)
    assert [m["status"] for m in house.told()] == ["firing", "resolved"]
    assert house.told()[0]["alerts"][0]["fingerprint"] == house.told()[1]["alerts"][0]["fingerprint"]  # type: ignore[index]


def test_a_killed_service_learned_what_it_had_saved(tmp_path: Path) -> None:
    house = House(tmp_path, scene([Node("n1", seed=1)], 400))
    house.walk(0, 300)
    state = tmp_path / "state" / "baseline.json"
    assert json.loads(state.read_text())["pairs"]
    house.open()  # without stop
    house.deliver(305)
    house.service.turn(T0 + 305 * SECOND, 305.0)
    assert house.service.diagnoses[0].output_pct == pytest.approx(100, abs=6)


def test_a_first_start_learns_from_the_history_that_the_store_holds(tmp_path: Path) -> None:
    house = House(tmp_path, scene([Node("n1", seed=1, cadence=5), Node("n2", seed=2, cadence=5)], 900))
    house.deliver(900)
    house.service.turn(T0 + 895 * SECOND, 0.0)
    assert [d.headline.key for d in house.service.diagnoses] == ["rules.summary.healthy_gpu"] * 2
    assert all(d.output_pct == pytest.approx(100, abs=6) for d in house.service.diagnoses)


def test_a_node_that_comes_later_with_its_history_is_judged_at_once(tmp_path: Path) -> None:
    early = scene([Node("n1", seed=1, cadence=5)], 700)
    late = scene([Node("sim-1", seed=2, cadence=5)], 700)
    house = House(tmp_path, early)
    house.walk(0, 600, every=10)
    house.service.store.write([s for s in late if s.time_ns <= T0 + 600 * SECOND])
    house.deliver(600)
    house.service.turn(T0 + 600 * SECOND, 600.0)
    diagnosis = next(d for d in house.service.diagnoses if d.subject["node"] == "sim-1")
    assert diagnosis.output_pct == pytest.approx(100, abs=6)


def test_a_store_that_is_away_stops_the_judging_and_neither_fires_nor_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, scene(fleet(brake_until(AT + 120), AT), AT + 600))
    house.walk(0, AT + 100)
    before = house.told()

    def away(*_: object, **__: object) -> list[Sample]:
        raise StoreDown("store is away")

    real = house.service.store
    monkeypatch.setattr(house.service.store, "samples", away)
    for t in range(AT + 100, AT + 500, 5):
        assert house.service.turn(T0 + t * SECOND, float(t)) is False
    assert house.told() == before and house.service.machine.open()
    monkeypatch.undo()
    assert real is house.service.store
    house.walk(AT + 500, AT + 600)
    assert [m["status"] for m in house.told()] in (["firing"], ["firing", "resolved"])


def test_an_alert_that_fires_on_a_full_disk_is_told_at_once_and_its_state_waits_for_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, scene(fleet(brake_until(AT + 200), AT), AT + 120))
    house.walk(0, AT + 30)  # pending
    state = tmp_path / "state" / "alerts.json"

    def full(path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("rules.webhook.write_text", full)
        house.walk(AT + 30, AT + 100)
        assert [m["status"] for m in house.told()] == ["firing"]
        saved = json.loads(state.read_text())["alerts"][0]
        assert saved["state"] == "pending", "a crash now would tell it again, not lose it"
    house.walk(AT + 100, AT + 120)
    assert json.loads(state.read_text())["alerts"][0]["state"] == "firing"
    house.open()  # without stop
    assert [m["status"] for m in house.told()] == ["firing"]


def test_a_clock_that_goes_back_an_hour_starts_the_window_anew_and_keeps_what_was_learned(tmp_path: Path) -> None:
    house = House(tmp_path, scene([Node("n1", seed=1)], 300))
    house.walk(0, 300)
    earlier = [Sample(s.measurement, s.tags, s.fields, s.time_ns - 3600 * SECOND) for s in house.samples]
    house.service.store.write(earlier)
    assert house.service.turn(T0 + (295 - 3600) * SECOND, 300.0)
    assert house.service.diagnoses[0].output_pct == pytest.approx(100, abs=6)
    assert not house.service.machine.open()


@pytest.mark.parametrize("name", ["baseline.json", "alerts.json"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version":1}',
        '{"version":1,"pairs":{"x":3},"alerts":[7]}',
        "\x00",
        "[" * 100_000,
        '{"version":1,"alerts":[{}],"pairs":{"x":{"spans":[[1' + 400 * "0" + ',2,3,4]],"usual":{},"seen_ns":1}}}',
    ],
    ids=range(8),
)
def test_a_damaged_state_file_is_put_aside_and_the_service_goes_on(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).write_text(content)
    house = House(tmp_path, scene([Node("n1", seed=1)], 20))
    house.walk(0, 20)
    assert (tmp_path / "state" / f"{name}.damaged").exists()


@pytest.mark.parametrize(("origin", "word"), [("simulated", "[simulated]"), ("replay", "[replayed]")])
def test_what_does_not_happen_now_is_marked_in_everything_that_is_written_and_told(
    tmp_path: Path, origin: str, word: str
) -> None:
    samples = [
        Sample(s.measurement, {**s.tags, "origin": origin}, s.fields, s.time_ns)
        for s in scene(fleet(BRAKE, AT), AT + 100)
    ]
    house = House(tmp_path, samples)
    house.walk(0, AT + 100)
    for measurement in ("pair", "verdict", "alert"):
        stored = house.stored(measurement)
        assert stored and all(sample.tags["origin"] == origin for sample in stored)
    assert [(m["simulated"], word in json.dumps(m["alerts"])) for m in house.told()] == [(True, True)]


def start(tmp_path: Path, *arguments: str, notify: str = "") -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from rules.service import TriageSettings, run; "
        "sys.exit(run(TriageSettings(sys.argv[1], Path(sys.argv[2]), 0.2, sys.argv[3] or None)))"
    )
    environment = dict(os.environ) | ({"NOTIFY_SOCKET": notify} if notify else {})
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_says_when_it_is_ready_and_stops_when_told(tmp_path: Path, number: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "n"))
        listening.settimeout(240)
        process = start(tmp_path, f"sqlite://{tmp_path}/store.db", str(tmp_path / "s"), "", notify=str(tmp_path / "n"))
        try:
            while "READY=1" not in listening.recv(4096).decode():
                pass
            process.send_signal(number)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in (process.stderr.read() if process.stderr else "")


def test_settings_that_can_not_be_used_are_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    good = f"sqlite://{tmp_path}/store.db"
    for arguments in (
        ("nonsense://x", str(tmp_path / "s"), ""),
        (good, str(tmp_path / "file" / "s"), ""),
        (good, str(tmp_path / "s"), "ftp://hooks.example/T0K3N"),
    ):
        process = start(tmp_path, *arguments)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2, arguments
        assert len(errors.strip().splitlines()) == 1 and "T0K3N" not in errors, errors


def test_reading_the_store_takes_each_sample_once_though_turns_overlap(tmp_path: Path) -> None:
    house = House(tmp_path, scene([Node("n1", seed=1)], 100))
    house.walk(0, 100)
    (engine,) = house.service.triage.window.devices("n1", "engine")
    assert len(engine.times) == len(set(engine.times)) == 96


def test_what_waits_for_the_store_loses_pairs_before_the_words_of_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rules.service.UNWRITTEN_SAMPLES", 6)
    house = House(tmp_path, scene(fleet(brake_until(0), 0), 60))
    house.deliver(60)
    write = house.service.store.write

    def away(samples: Sequence[Sample]) -> None:
        raise StoreDown("away")

    monkeypatch.setattr(house.service.store, "write", away)
    for t in range(60, 90, 5):
        house.service.turn(T0 + t * SECOND, float(t))
    monkeypatch.setattr(house.service.store, "write", write)
    house.service.turn(T0 + 90 * SECOND, 90.0)
    judged = {sample.tags["node"] for sample in house.stored("verdict") if "evidence" in sample.fields}
    assert judged == {sample.tags["node"] for sample in house.stored("host")}
    assert len(house.stored("pair")) <= 6


def test_a_fleet_that_is_read_in_small_parts_is_judged_as_when_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = AT + 300  # so that some of the past is beyond the window
    samples = scene(fleet(brake_until(late + 90), late), late + 60)
    judged, most = [], []
    for name, at_once in (("whole", 10**9), ("parts", 60)):
        monkeypatch.setattr("rules.service.READ_SAMPLES", at_once)
        monkeypatch.setattr("rules.service.FIRST_PART_NS", at_once * SECOND // 30)
        (tmp_path / name).mkdir()
        house = House(tmp_path / name, samples)
        house.deliver(late + 60)
        added: list[int] = []
        add = house.service.triage.add

        def counted(fresh: Sequence[Sample], add=add, added=added) -> None:  # type: ignore[no-untyped-def]
            fresh = list(fresh)
            added.append(len(fresh))
            add(fresh)

        monkeypatch.setattr(house.service.triage, "add", counted)
        assert house.service.turn(T0 + (late + 60) * SECOND, 1.0)
        judged.append(house.service.diagnoses)
        most.append(max(added))
    assert [d.verdicts[0].cause for d in judged[0] if d.verdicts] == [Cause.POWER]
    assert judged[1] == judged[0]
    assert most[1] <= 4 * 60 < most[0]
