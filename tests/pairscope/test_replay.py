"""Replay: a recording into a store, by the same admission as everything, told apart from what happens now when it is moved."""

from __future__ import annotations

import gzip
import io
import json
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent.simulator import recording as simulated
from agent.simulator.settings import SimulatorSettings
from pairscope.judge import judge_live, judge_recording
from pairscope.replay import Plan, Shift, parse_shift, replay
from pairscope.whole_file import CannotCopy
from rules.service import TriageSettings
from telemetry.lineprotocol import encode, encode_many, read
from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, open_store
from tests.pairscope.command_line import pairscope
from tests.pairscope.recordings import T0, S, everything, recorded, replayed, samples, sqlite_store, unseen, written
from tests.store_servers import Influxd

ROOT = Path(__file__).parents[2]
HOUR = 3600 * S


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(sqlite_store(tmp_path, "replayed")) as opened:
        yield opened


def stored(store: Store, measurement: str) -> list[Sample]:
    return store.samples(measurement, start_ns=0, end_ns=2**62)


@pytest.mark.parametrize(
    ("text", "paced", "wanted"),
    [
        ("now", False, Shift(last_at_ns=T0)),
        ("now", True, Shift(first_at_ns=T0)),
        ("+2h", False, Shift(by_ns=2 * HOUR)),
        ("-1d12h", True, Shift(by_ns=-36 * HOUR)),
        ("2026-11-29T02:13:05Z", False, Shift(first_at_ns=1_795_918_385 * S)),
    ],
)
def test_a_shift_is_now_a_moment_or_a_span(text: str, paced: bool, wanted: Shift) -> None:
    assert parse_shift(text, paced=paced, now_ns=T0) == wanted


@pytest.mark.parametrize(
    "text", ["", "soon", "2h", "+", "+2", "+-2h", "+0s", "tomorrow", "+99999999999d", "1960-01-01"]
)
def test_what_is_no_shift_is_refused_or_a_plain_number_of_seconds(text: str) -> None:
    if text == "+2":
        assert parse_shift(text, paced=False, now_ns=T0) == Shift(by_ns=2 * S)
        return
    with pytest.raises(ValueError, match=r"."):
        parse_shift(text, paced=False, now_ns=T0)


@pytest.mark.parametrize(
    ("shift", "first_ns"),
    [
        (Shift(by_ns=-5 * HOUR + 7), T0 + 123_456_789 - 5 * HOUR + 7),
        (Shift(first_at_ns=T0 - HOUR), T0 - HOUR),
        (Shift(last_at_ns=T0 - HOUR), T0 - HOUR - 39 * S),
    ],
)
def test_all_times_move_by_one_offset_and_are_marked(store: Store, tmp_path: Path, shift: Shift, first_ns: int) -> None:
    path = written(tmp_path / "a.lp", random.Random(1).sample(samples(), 241))
    done = replayed(path, store, Plan(shift))
    offset = first_ns - (T0 + 123_456_789)
    assert (done.samples, done.offset_ns, done.first_ns) == (241, offset, first_ns)
    recorded(store, tmp_path / "b.lp", everything(1, T0 + HOUR))
    moved = [Sample(s.measurement, {**s.tags, "origin": "replay"}, s.fields, s.time_ns + offset) for s in samples()]
    assert list(read(tmp_path / "b.lp")) == moved


def test_a_mark_that_is_there_stays_and_none_is_made_without_a_shift_or_when_told_so(
    store: Store, tmp_path: Path
) -> None:
    one = Sample("host", {"node": "s1", "origin": "simulated"}, {"cpu_pct": 1.0}, T0)
    path = written(tmp_path / "a.lp", [one, Sample("host", {"node": "n1"}, {"cpu_pct": 2.0}, T0)])

    def origins(plan: Plan) -> list[str | None]:
        replayed(path, store, plan)
        return [sample.tags.get("origin") for sample in stored(store, "host")[-2:]]

    assert origins(Plan()) == [None, "simulated"]
    assert origins(Plan(Shift(by_ns=S))) == ["replay", "simulated"]
    assert origins(Plan(Shift(by_ns=2 * S), origin="keep")) == [None, "simulated"]
    assert origins(Plan(origin="replay", shift=Shift(by_ns=3 * S))) == ["replay", "simulated"]


def test_judgements_are_restored_with_the_past_but_not_moved(store: Store, tmp_path: Path) -> None:
    alert = Sample("alert", {"node": "n1", "alert": "power", "severity": "page"}, {"state": 2}, T0)
    pair = Sample("pair", {"node": "n1", "engine": "chat"}, {"output_pct": 40.0}, T0)
    path = written(tmp_path / "a.lp", [alert, pair, Sample("host", {"node": "n1"}, {"cpu_pct": 1.0}, T0)])
    assert replayed(path, store).judgements == 0
    assert stored(store, "alert") == [alert]
    done = replayed(path, store, Plan(Shift(by_ns=HOUR)))
    assert (done.judgements, done.samples) == (2, 1)
    assert stored(store, "alert") == [alert] and stored(store, "pair") == [pair]


def test_an_incident_is_not_played_over_a_node_that_is_alive(store: Store, tmp_path: Path) -> None:
    now_ns = time.time_ns()
    store.write([Sample("host", {"node": "n2"}, {"cpu_pct": 1.0}, now_ns)])
    path = written(tmp_path / "a.lp", samples(2))
    with pytest.raises(CannotCopy, match=r"n2.*--prefix"):
        replayed(path, store, Plan(Shift(last_at_ns=now_ns)))
    assert stored(store, "gpu") == [] and stored(store, "engine") == []
    assert replayed(path, store, Plan(Shift(last_at_ns=now_ns), prefix="again-")).samples == 12
    assert {s.tags["node"] for s in stored(store, "gpu")} == {"again-n 1,=", "again-n2"}
    assert (
        replayed(path, store, Plan(Shift(last_at_ns=now_ns), prefix="again-")).samples == 12
    )  # its own traces are no life
    assert replayed(path, store).samples == 12  # the past of a living node may be restored


def test_bad_lines_and_refused_samples_are_counted_and_the_first_three_named(store: Store, tmp_path: Path) -> None:
    lines = [
        b"nonsense",
        encode(samples()[0]).encode(),
        b"gpu,node=n1 no_such_field=1 1795960800000000000",
        b"weather,node=n1 rain=1 1795960800000000000",
        b"gpu,node=n1 util_pct=5,xid_total=1.5 1795960800000000000",
        b"\xff\xfe",
        b"# a comment",
        b"gpu,node=n1 util_pct=nan 1795960800000000000",
    ]
    path = tmp_path / "a.lp"
    path.write_bytes(b"\n".join(lines))
    done = replayed(path, store)
    assert (done.samples, done.bad_lines, done.refused) == (2, 3, 3)
    assert [problem.line for problem in done.problems] == [1, 3, 4]
    assert "no_such_field" in done.problems[1].reason and "weather" in done.problems[2].reason
    assert [sample.fields for sample in stored(store, "gpu")] == [{"util_pct": 5.0}]
    looked = replayed(path, None, Plan(dry_run=True))
    assert (looked.samples, looked.bad_lines, looked.refused) == (2, 3, 3)


def test_packed_data_that_break_off_are_replayed_so_far(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.lp.gz"
    path.write_bytes(gzip.compress(encode_many(samples()).encode())[:-200])
    done = replayed(path, store)
    assert done.ends_early and 0 < done.samples < 241
    (tmp_path / "b.lp.gz").write_bytes(b"\x1f\x8bnot packed at all")
    assert replayed(tmp_path / "b.lp.gz", store).ends_early


def test_a_recording_that_is_not_there_is_one_line(store: Store, tmp_path: Path) -> None:
    for path in (tmp_path / "absent.lp", tmp_path):
        with pytest.raises(CannotCopy, match=str(path)):
            replayed(path, store)


def test_two_thousand_damaged_lines_never_break_a_replay(store: Store, tmp_path: Path) -> None:
    chance = random.Random(3)
    good = [line.encode() for line in encode_many(samples()).splitlines()]
    damaged = []
    for _ in range(2000):
        line = bytearray(chance.choice(good))
        for _ in range(chance.randint(1, 4)):
            line[chance.randrange(len(line))] = chance.randrange(256)
        damaged.append(bytes(line).replace(b"\n", b"\x0b"))
    path = tmp_path / "a.lp"
    path.write_bytes(b"\n".join([*damaged, *good]))
    done = replayed(path, store)
    assert done.bad_lines > 500 and done.samples >= len(good)
    assert done.samples + done.bad_lines + done.refused >= len(good) + 1990
    assert [sample for sample in stored(store, "engine") if sample in samples()]


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s


def test_a_paced_replay_writes_each_sample_when_it_is_due(store: Store, tmp_path: Path) -> None:
    clock = Clock()
    written_at: list[tuple[float, int]] = []
    real = store.write

    def write(batch: list[Sample]) -> object:
        written_at.extend((clock.now_s, sample.time_ns) for sample in batch)
        return real(batch)

    store.write = write  # type: ignore[method-assign,assignment]
    path = written(tmp_path / "a.lp", samples())
    replay(path, store, Plan(speed=10), advance=unseen, wait=clock.wait, monotonic=clock.monotonic)
    assert len(written_at) == 241
    for at_s, time_ns in written_at:
        assert at_s == pytest.approx(100 + (time_ns - samples()[0].time_ns) / 1e10, abs=1e-6)
    assert sum(clock.waits) == pytest.approx(3.9)


def test_an_outage_of_the_store_is_waited_for_and_a_long_one_says_how_far_it_came(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("pairscope.replay.time.monotonic", clock.monotonic)
    monkeypatch.setattr("pairscope.replay.time.sleep", clock.wait)
    monkeypatch.setattr("pairscope.replay.BATCH", 100)
    real, calls, back_at = store.write, [0], [4]

    def write(batch: list[Sample]) -> object:
        calls[0] += 1
        if 2 <= calls[0] < back_at[0]:
            raise StoreDown("store x: is down")
        return real(batch)

    monkeypatch.setattr(store, "write", write)
    path = written(tmp_path / "a.lp", samples())
    assert replayed(path, store).samples == 241
    calls[0], back_at[0] = 0, 1000
    with pytest.raises(StoreDown.__base__ or Exception, match=r"is down.*first 100 samples") as caught:
        replayed(path, store)
    assert "\n" not in str(caught.value)


def test_a_simulated_incident_gets_the_same_cause_from_the_store_as_from_the_file(tmp_path: Path) -> None:
    path, url = tmp_path / "night.lp", f"sqlite://{tmp_path}/night.db"
    made = SimulatorSettings(nodes=1, gpus_per_node=2, history_s=900, fault="power-brake", fault_after_s=60)
    simulated.record(made, 150, path)
    with closing(open_store(url)) as opened:
        done = replayed(path, opened)
    settings = TriageSettings(store_url=url, state_dir=tmp_path)
    from_file = judge_recording(path, None, settings)
    from_store = judge_live(settings, done.last_ns, "sim-n01")
    causes = [[str(verdict.cause) for verdict in diagnosis.verdicts] for diagnosis in from_file]
    assert causes and causes[0] == ["power"]
    assert [[str(verdict.cause) for verdict in diagnosis.verdicts] for diagnosis in from_store] == causes
    assert from_store[0].simulated


def test_the_command_reads_stdin_moves_it_and_says_so_in_json(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/piped.db"
    typed = gzip.compress(b"nonsense\n" + encode_many(samples()).encode())
    told = pairscope("replay", "-", "--shift", "now", "--store", url, "--json", typed=typed)
    assert told.exit_code == 1, told.stderr
    summary = json.loads(told.stdout)
    assert (summary["samples"], summary["bad_lines"], summary["marked"]) == (241, 1, True)
    assert summary["problems"][0]["line"] == 1
    with closing(open_store(url)) as opened:
        newest = stored(opened, "gpu")[-1].time_ns
    assert abs(time.time_ns() - newest) < 120 * S


def test_stdin_that_is_kept_for_a_second_reading_is_read_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(encode_many(samples()).encode()))  # type: ignore[arg-type]

    monkeypatch.setattr("sys.stdin", Stdin)
    assert replayed(Path("-"), store, Plan(Shift(first_at_ns=T0))).samples == 241


@pytest.mark.server
def test_a_replay_into_influxdb_is_the_same_twice(influxd: Influxd, tmp_path: Path) -> None:
    path = written(tmp_path / "a.lp", samples())
    with closing(open_store(influxd.new_url())) as opened:
        for turn in ("1.lp", "2.lp"):
            replayed(path, opened)
            recorded(opened, tmp_path / turn)
    assert (tmp_path / "1.lp").read_bytes() == (tmp_path / "2.lp").read_bytes()
    assert list(read(tmp_path / "1.lp")) == samples()


def test_a_stray_sample_neither_moves_a_replay_into_the_past_nor_holds_it_up(store: Store, tmp_path: Path) -> None:
    stray = Sample("host", {"node": "n2"}, {"cpu_pct": 1.0}, T0 + 10**9 * S)
    path = written(tmp_path / "a.lp", [*samples()[:50], stray, *samples()[50:]])
    done = replayed(path, store, Plan(Shift(last_at_ns=T0 - HOUR)))
    assert (done.samples, done.strays, done.last_ns) == (241, 1, T0 - HOUR)
    assert replayed(path, store).strays == 0  # kept as it is where no time is moved
