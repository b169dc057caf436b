"""Rollups, every backend that has them: answers from cells equal those from raw samples, whatever came late, twice, or was cut off."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from telemetry import catalogue
from telemetry.sample import Sample
from telemetry.store import Column, Spread, Store, influxdb_rollup, open_store
from telemetry.store.buckets import Buckets, buckets, rates
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS
from telemetry.store.victoriametrics import VictoriaStore

S = 10**9
T0 = (
    (int(time.time()) // 3600 - 12) * 3600 * S
)  # a multiple of an hour; half a day ago, since a server may keep only recent samples
HOURS = 2
END = T0 + HOURS * 3600 * S
LONG_AFTER = END + 3600 * S
ASKED = (
    # field, aggregate
    ("temp_c", "mean"),
    ("temp_c", "min"),
    ("temp_c", "max"),
    ("util_pct", "auto"),
    ("throttle_reasons", "or"),
    ("state", "max"),
    ("xid_total", "last"),
    ("xid_total", "rate"),
    ("energy_j", "rate"),
    ("energy_j", "last"),
)
STEPS_S = (60, 420, 900, 3600)
Values = dict[tuple[str, str], dict[str, list[float | None]]]


PRUNING = ["sqlite", pytest.param("influxdb", marks=pytest.mark.server)]


@pytest.fixture(params=[*PRUNING, pytest.param("victoriametrics", marks=pytest.mark.server)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    yield from opened(request, tmp_path, monkeypatch)


@pytest.fixture(params=PRUNING)
def pruning_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """One that replaces and deletes samples."""
    yield from opened(request, tmp_path, monkeypatch)


def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "influxdb":
        monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 0)
        store = open_store(request.getfixturevalue("influxd").new_url())
        store.prepare()
        store.rollup(T0 - 3600 * S)  # from now on all samples leave their marks
    elif request.param == "victoriametrics":
        store = open_store(request.getfixturevalue("deduplicating_victoria").new_url())
    else:
        store = open_store(f"sqlite://{tmp_path}/store.db")
    assert store.rolls_up
    yield store
    store.close()


def history(seed: int = 1, gpus: int = 3, every_s: float = 13.0) -> list[Sample]:
    """Uneven times, fields that come and go, counters that reset, a GPU that is away for half an hour, another that comes late."""
    rng = random.Random(seed)
    made: list[Sample] = []
    for gpu in range(gpus):
        xid, energy, t = 5, 1e6, float(gpu * 900)
        while t < HOURS * 3600:
            xid = 0 if rng.random() < 0.01 else xid + rng.randrange(4)
            energy = 0.0 if rng.random() < 0.003 else round(energy + 300 * rng.random(), 3)  # 12 digits at most
            fields: dict[str, float | int | str] = {
                "temp_c": round(40 + 50 * rng.random(), 1),
                "util_pct": 97.0,
                "throttle_reasons": 1 << rng.randrange(63),
                "state": int(rng.random() < 0.05) * rng.randrange(7),
                "xid_total": xid,
                "energy_j": energy,
            }
            kept = {name: value for name, value in fields.items() if rng.random() < 0.8}
            if kept and not (gpu == 0 and 2500 < t < 4300):
                tags = {"node": f"n{gpu // 2}", "gpu": str(gpu)}
                made.append(Sample("gpu", tags, kept, T0 + int(t * S) + rng.randrange(S)))
            t += every_s * (0.5 + rng.random())
    return made


def expected(samples: Sequence[Sample], name: str, how: str, over: Buckets) -> dict[str, list[float | None]]:
    """The rules, as plainly as they can be written."""
    if how == "auto":
        how = "mean"
    answer: dict[str, list[float | None]] = {}
    for gpu in sorted({sample.tags["gpu"] for sample in samples}):
        ordered = sorted((s for s in samples if s.tags["gpu"] == gpu and name in s.fields), key=lambda s: s.time_ns)
        points = [(s.time_ns, s.fields[name]) for s in ordered]
        if how == "rate":
            found = rates(((t, v) for t, v in points if over.first_ns - over.lookback_ns <= t < over.end_ns), over)  # type: ignore[misc]
        else:
            found = {}
            for bucket in range(over.count):
                first = over.first_ns + bucket * over.step_ns
                values = [v for t, v in points if first <= t < first + over.step_ns]
                if values:
                    found[bucket] = drawn(how, values)  # type: ignore[arg-type]
        if found:
            answer[gpu] = [found.get(bucket) for bucket in range(over.count)]
    return answer


def drawn(how: str, values: Sequence[float]) -> float:
    if how == "mean":
        return sum(values) / len(values)
    if how == "or":
        joined = 0
        for value in values:
            joined |= int(value)
        return float(joined)
    return float({"min": min, "max": max, "last": lambda v: v[-1]}[how](values))


def asked(store: Store, name: str, how: str, over: Buckets) -> dict[str, list[float | None]]:
    columns: list[Column] = store.range(
        "gpu", [name], start_ns=over.first_ns, end_ns=over.end_ns, step_ns=over.step_ns, aggregate=how
    )
    return {column.tags["gpu"]: column.values for column in columns}


def assert_same(store: Store, samples: Sequence[Sample], start_ns: int = T0, end_ns: int = END) -> None:
    for step_s in STEPS_S:
        over = buckets(start_ns, end_ns, step_s * S)
        for name, how in ASKED:
            got, wanted = asked(store, name, how, over), expected(samples, name, how, over)
            assert got.keys() == wanted.keys(), (step_s, name, how)
            for gpu in wanted:
                assert got[gpu] == [None if v is None else pytest.approx(v, rel=1e-12) for v in wanted[gpu]], (
                    step_s,
                    name,
                    how,
                    gpu,
                )
        for where in (None, {"node": "n0"}):
            among = [s for s in samples if where is None or s.tags["node"] == "n0"]
            found = store.spread(
                "gpu", ["temp_c", "util_pct"], start_ns=start_ns, end_ns=end_ns, step_ns=step_s * S, where=where
            )
            assert [spread.field for spread in found] == ["temp_c", "util_pct"]
            assert_spread(found[0], among, over)


def assert_spread(found: Spread, samples: Sequence[Sample], over: Buckets) -> None:
    several: dict[int, list[float]] = {}
    for s in samples:
        if found.field in s.fields and over.first_ns <= s.time_ns < over.end_ns:
            several.setdefault((s.time_ns - over.first_ns) // over.step_ns, []).append(float(s.fields[found.field]))
    for values, how in ((found.mean, "mean"), (found.low, "min"), (found.high, "max")):
        wanted = [drawn(how, several[b]) if b in several else None for b in range(over.count)]
        assert values == [None if v is None else pytest.approx(v, rel=1e-12) for v in wanted]


def finish(store: Store, now_ns: int = LONG_AFTER) -> None:
    while store.rollup(now_ns):
        pass


def test_answers_are_the_same_before_half_way_through_and_after_rolling_up(store: Store) -> None:
    samples = history()
    store.write(samples)
    assert_same(store, samples)
    finish(store, T0 + 3500 * S)
    assert_same(store, samples)
    finish(store)
    assert_same(store, samples)
    assert_same(store, samples, T0 + 1234 * S, END - 777 * S)


def test_answers_outlive_the_raw_samples_and_then_the_minutes(pruning_store: Store) -> None:
    store = pruning_store
    samples = history(2)
    store.write(samples)
    assert (
        0 < store.prune({"gpu": END}) <= len(samples)
    )  # never rolled up by itself: what leaves is drawn together first
    assert store.samples("gpu", start_ns=0, end_ns=LONG_AFTER) == []
    assert_same(store, samples)
    if store.url.startswith("influxdb"):
        return  # the server's own policies let cells go
    assert store.prune({"gpu": END}, MINUTE_NS) > 0
    over = buckets(T0, END, QUARTER_NS)
    for name, how in ASKED:
        got, wanted = asked(store, name, how, over), expected(samples, name, how, over)
        assert got.keys() == wanted.keys()
        for gpu, values in wanted.items():
            assert got[gpu] == [None if v is None else pytest.approx(v, rel=1e-12) for v in values], (name, how)
    assert asked(store, "temp_c", "mean", buckets(T0, END, MINUTE_NS)) == {}
    assert store.prune({"gpu": END}, QUARTER_NS) > 0
    assert asked(store, "temp_c", "mean", over) == {}


def _is_late(sample: Sample) -> bool:
    return sample.tags["gpu"] == "1" or T0 + 2000 * S < sample.time_ns < T0 + 4000 * S


def test_what_comes_late_newest_first_and_twice_is_drawn_in(store: Store) -> None:
    samples = history(3)
    late = [s for s in samples if _is_late(s)]
    store.write([s for s in samples if not _is_late(s)])
    finish(store)
    newest_first = sorted(late, key=lambda s: -s.time_ns)
    for begin in range(0, len(late), 200):
        store.write(newest_first[begin : begin + 200])
        if begin % 600 == 0:
            finish(store)
    assert_same(store, samples)  # some of it is marked only
    store.write(newest_first[100:500])
    finish(store)
    assert_same(store, samples)


def test_a_sample_that_is_overwritten_leaves_nothing_of_itself(pruning_store: Store) -> None:
    store = pruning_store
    wrong = [Sample("gpu", {"node": "n0", "gpu": "0"}, {"temp_c": 999.0, "throttle_reasons": 1 << 40}, T0 + S)]
    store.write(wrong)
    finish(store)
    store.write([Sample("gpu", {"node": "n0", "gpu": "0"}, {"temp_c": 50.0, "throttle_reasons": 4}, T0 + S)])
    finish(store)
    over = buckets(T0, T0 + 900 * S, QUARTER_NS)
    assert asked(store, "temp_c", "max", over) == {"0": [50.0]}
    assert asked(store, "throttle_reasons", "or", over) == {"0": [4.0]}
    assert store.spread("gpu", ["temp_c"], start_ns=T0, end_ns=T0 + S, step_ns=QUARTER_NS)[0].high == [50.0]


def test_what_comes_after_its_minute_was_pruned_does_not_replace_what_was_known(pruning_store: Store) -> None:
    store = pruning_store
    samples = history(4)
    store.write(samples)
    store.prune({"gpu": T0 + 3600 * S})
    odd = Sample("gpu", {"node": "n0", "gpu": "0"}, {"temp_c": 11.0}, T0 + 100 * S)
    store.write([odd])
    finish(store)
    over = buckets(T0, T0 + 300 * S, MINUTE_NS)
    got, wanted = asked(store, "temp_c", "mean", over), expected(samples, "temp_c", "mean", over)
    assert got["0"] == pytest.approx(wanted["0"], rel=1e-12)


def test_happenings_and_texts_are_not_drawn_together(store: Store) -> None:
    event = Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"text": "x", "code": 79}, T0)
    store.write([event, Sample("engine", {"node": "n1", "engine": "a"}, {"version": "0.31", "up": 1}, T0)])
    finish(store)
    assert store.samples("event", start_ns=T0, end_ns=T0 + S) == [event]
    assert store.range("event", ["code"], start_ns=T0, end_ns=T0 + S, step_ns=MINUTE_NS)[0].values == [79.0]
    assert store.series("engine") == [{"node": "n1", "engine": "a"}]
    with pytest.raises(ValueError, match="not a gauge"):
        store.spread("engine", ["up"], start_ns=T0, end_ns=T0 + S, step_ns=S)


def test_every_measurement_and_field_can_be_rolled_up(store: Store) -> None:
    samples = []
    for measurement in catalogue.MEASUREMENTS.values():
        fields: dict[str, float | int | str] = {
            field.name: field.type(number + 1) for number, field in enumerate(measurement.fields.values())
        }
        samples += [Sample(measurement.name, {"node": "n1"}, fields, T0 + second * S) for second in range(3)]
    assert store.write(samples) == []
    if isinstance(store, VictoriaStore):
        finish(store)
    else:
        store.prune({"*": T0 + 60 * S})
    for measurement in catalogue.MEASUREMENTS.values():
        numbers = [f.name for f in measurement.fields.values() if f.type is not str]
        found = store.range(measurement.name, numbers, start_ns=T0, end_ns=T0 + S, step_ns=QUARTER_NS)
        if measurement.name not in ("event", "alert"):
            wanted = {f.name: float(n + 1) for n, f in enumerate(measurement.fields.values()) if f.type is not str}
            assert {column.field: column.values for column in found} == {k: [v] for k, v in wanted.items()}
