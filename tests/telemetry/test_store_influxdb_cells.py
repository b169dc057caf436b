"""Cells on InfluxDB: what is written is read, those of earlier versions too, and the fleet's minutes are of all nodes or not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from telemetry import catalogue, lineprotocol
from telemetry.sample import Sample
from telemetry.store import influxdb_rollup
from telemetry.store.influxdb import InfluxStore
from telemetry.store.influxdb_cells import Row, columns, is_part, line, minutes, read
from telemetry.store.influxdb_fleet import FleetMinutes, Sums, add
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS, Cell, Counter, Gauge
from tests.telemetry.test_store_rollup import LONG_AFTER, T0, S, assert_same, finish, history

if TYPE_CHECKING:
    from tests.store_servers import Influxd


@pytest.fixture
def store(influxd: Influxd, monkeypatch: pytest.MonkeyPatch) -> Iterator[InfluxStore]:
    monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 0)
    opened = InfluxStore(influxd.new_url())
    opened.prepare()
    opened.rollup(T0 - 3600 * S)
    yield opened
    opened.close()


def as_row(sample: Sample, names: list[str]) -> dict[str, Any]:
    """As the server gives it."""
    return {
        "columns": ["time", "samples", *names],
        "values": [[sample.time_ns, *(sample.fields.get(name) for name in ("samples", *names))]],
    }


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("temp_c", Gauge(60, 57.283333333333333, 40.0, 91.5)),
        ("temp_c", Gauge(60, -0.1, -0.1, -0.1)),
        ("temp_c", Gauge(1, 1e300, 1e300, 1e300)),
        ("energy_j", Counter(T0 + 1, 1.5, 1e-9, T0 + 59 * S, 7.25)),
        ("energy_j", Counter(T0 + 7, 1.5, 0.0, T0 + 7, 1.5)),
        ("energy_j", Counter(T0 + 7, 1.5, 0.0, T0 + 8, 1.5)),
        ("xid_total", Counter(T0, 2**63 - 1, 2**64, T0 + MINUTE_NS - 1, 2**62 + 1)),
        ("xid_total", Counter(T0, 2**63 - 1, 0, T0, 2**63 - 1)),
        ("state", 4),
        ("throttle_reasons", 1 << 62 | 1),
    ],
)
@pytest.mark.parametrize("by_part", [False, True])
def test_a_cell_is_read_as_it_was_written(name: str, cell: Cell, by_part: bool) -> None:
    field = catalogue.field("gpu", name)
    sample = lineprotocol.decode(line(Row(MINUTE_NS, "gpu", {"gpu": "1"}, T0, 61, {name: cell})))
    assert (sample.measurement, sample.time_ns) == ("1min:gpu", T0)
    assert list(read(as_row(sample, columns(field, by_part=by_part)), [field])) == [(T0, 61, {name: cell})]
    empty = as_row(Sample("1min:gpu", {}, {"samples": 3}, T0), columns(field, by_part=by_part))
    assert list(read(empty, [field])) == [(T0, 3, {})]


def test_cells_of_minutes_are_of_the_minutes_wanted_and_of_what_is_there() -> None:
    fields = catalogue.MEASUREMENTS["gpu"].fields
    rows = [
        [T0 + 1, 10, None, 7, None],
        [T0 + 2, None, None, 5, 1],
        [T0 + MINUTE_NS, 3, None, None, None],
        [T0 + 3 * MINUTE_NS - 1, 2.5, None, 4, 2],
        [T0 + 3 * MINUTE_NS, 99, None, 9, 3],
    ]
    series = {"columns": ["time", "temp_c", "power_w", "xid_total", "unknown"], "values": rows}
    wanted = {T0, T0 + 2 * MINUTE_NS, T0 + 9 * MINUTE_NS}
    assert list(minutes(series, fields, wanted)) == [
        (T0, 2, {"temp_c": Gauge(1, 10.0, 10.0, 10.0), "xid_total": Counter(T0 + 1, 7, 5, T0 + 2, 5)}),
        (
            T0 + 2 * MINUTE_NS,
            1,
            {
                "temp_c": Gauge(1, 2.5, 2.5, 2.5),
                "xid_total": Counter(T0 + 3 * MINUTE_NS - 1, 4, 0, T0 + 3 * MINUTE_NS - 1, 4),
            },
        ),
    ]


def test_the_fleets_minute_is_of_just_these_marks_of_all_nodes_or_unknown() -> None:
    def one(start_ns: int, low: float, high: float) -> Sums:
        sums: Sums = {}
        add(sums, start_ns, "gpu", {"temp_c": Gauge(2, (low + high) / 2, low, high), "state": 3}, ["temp_c", "power_w"])
        return sums

    fleet = FleetMinutes()
    fleet.put([("a", T0, 1)], one(T0, 10.0, 20.0), ())
    fleet.put([("b", T0, 2)], one(T0, 40.0, 50.0), ())
    assert fleet.holds(T0) and not fleet.holds(T0 + MINUTE_NS)
    assert fleet.take(T0, {"a": 1, "b": 2}) == {"gpu": {"temp_c": Gauge(4, 30.0, 10.0, 50.0)}}
    assert fleet.take(T0, {"a": 1, "b": 2}) is None  # forgotten

    for known in ({"a": 9}, {"a": 1, "b": 2}, {}):  # written to since; a node that is rolled up elsewhere
        fleet.put([("a", T0, 1)], one(T0, 10.0, 20.0), ())
        assert fleet.take(T0, known) is None
    fleet.put([("a", T0, 1)], one(T0, 10.0, 20.0), ())
    fleet.put([("a", T0, 2)], one(T0, 10.0, 30.0), ())  # rolled up twice: what it had before is in the sum
    assert fleet.take(T0, {"a": 2}) is None
    fleet.put([("a", T0, 1), ("a", T0 + MINUTE_NS, 1)], {}, {T0})  # older cells stayed in place of these
    assert fleet.take(T0, {"a": 1}) is None
    assert fleet.take(T0 + MINUTE_NS, {"a": 1}) == {}


@pytest.mark.server
@pytest.mark.parametrize("rows_at_once", [40, 700])
def test_answers_are_the_same_in_however_many_portions_it_is_rolled_up(
    store: InfluxStore, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(influxdb_rollup, "_ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(influxdb_rollup, "_DENSE", 5.0)
    samples = history(5)
    odd = random.Random(6).sample(samples, len(samples) // 3)
    store.write([s for s in samples if s not in odd])
    finish(store, T0 + 2000 * S)
    while store.rollup(LONG_AFTER, 0.0):
        if odd:  # late, between one portion and the next
            store.write([odd.pop() for _ in range(min(40, len(odd)))])
    store.write(odd)
    assert_same(store, samples)
    finish(store)
    assert_same(store, samples)


@pytest.mark.server
def test_cells_that_an_earlier_version_wrote_by_their_parts_are_read_until_they_are_written_anew(
    store: InfluxStore,
) -> None:
    own = {"node": "n0", "gpu": "0"}
    earlier = [
        Sample(
            f"{prefix}gpu",
            own,
            {"samples": 2, "temp_c": 50.0, "temp_c:min": 40.0, "temp_c:max": 60.0, "temp_c:n": 2}
            | {"xid_total": 9, "xid_total:first": 4, "xid_total:grown": 5}
            | {"xid_total:first_at": 5, "xid_total:last_at": 30 * S},
            T0,
        )
        for prefix in ("1min:", "15min:")
    ]
    store._put([lineprotocol.encode(earlier[0])], "pairscope_1min")
    store._put([lineprotocol.encode(earlier[1])], "pairscope_15min")
    for step_ns in (MINUTE_NS, QUARTER_NS):
        assert first(store, "temp_c", "max", step_ns) == 60.0
        assert first(store, "temp_c", "mean", step_ns) == 50.0
        assert first(store, "xid_total", "last", step_ns) == 9.0
        assert first(store, "xid_total", "rate", step_ns) == pytest.approx(5 / 30)
    store.write([Sample("gpu", own, {"temp_c": float(t), "xid_total": t}, T0 + t * S) for t in (1, 2, 3)])
    finish(store)
    for step_ns in (MINUTE_NS, QUARTER_NS):
        assert first(store, "temp_c", "max", step_ns) == 3.0
        assert first(store, "xid_total", "last", step_ns) == 3.0


def first(store: InfluxStore, name: str, how: str, step_ns: int) -> float | None:
    (column,) = store.range("gpu", [name], start_ns=T0, end_ns=T0 + 1, step_ns=step_ns, aggregate=how)
    return column.values[0]


def test_parts_are_told_from_other_fields() -> None:
    parts = [n for field in catalogue.MEASUREMENTS["gpu"].fields.values() for n in columns(field, by_part=True)[1:]]
    assert any(map(is_part, parts))
    assert not any(is_part(n) for f in catalogue.MEASUREMENTS["gpu"].fields.values() for n in columns(f, by_part=False))
