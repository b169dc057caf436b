"""One contract, every backend: the same samples in, the same answers out. What a backend can't is named in WEAKER."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telemetry.sample import Sample
from telemetry.store import Store, StoreError, Where, influxdb_rollup, open_store, public_url

S = 10**9
# a multiple of an hour, so that buckets of any usual width start here; half a day ago, since a server may keep only recent samples
T0 = (int(time.time()) // 3600 - 12) * 3600 * S
Fields = dict[str, float | int | str]
MOMENTS = itertools.count()


@dataclass(frozen=True)
class Promise:
    """What a backend keeps, where they differ."""

    float_error: float = 0.0  # relative
    later_value_wins: bool = True  # of two different ones at one time; else either
    prunes: bool = True


WEAKER = {"victoriametrics": Promise(float_error=1e-12, later_value_wins=False, prunes=False)}
"""A float of VictoriaMetrics has 12 digits, of two values at one time it keeps either, and only its retention deletes."""

SERVERS = {"influxdb": "influxd", "victoriametrics": "victoria", "victoriametrics-dedup": "deduplicating_victoria"}


@pytest.fixture(params=["sqlite", *(pytest.param(name, marks=pytest.mark.server) for name in SERVERS)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 0)  # nothing is pruned while it is written
    if request.param in SERVERS:
        opened = open_store(request.getfixturevalue(SERVERS[request.param]).new_url())
    else:
        opened = open_store(f"sqlite://{tmp_path}/store.db")
    yield opened
    opened.close()


@pytest.fixture
def promise(store: Store) -> Promise:
    return WEAKER.get(store.url.split(":")[0], Promise())


def gpu(second: float, fields: Fields, index: int = 0, node: str = "n1") -> Sample:
    return Sample("gpu", {"node": node, "gpu": str(index)}, fields, T0 + round(second * S))


def column(store: Store, field: str, seconds: int, step: int, aggregate: str = "auto") -> list[float | None]:
    found = store.range("gpu", [field], start_ns=T0, end_ns=T0 + seconds * S, step_ns=step * S, aggregate=aggregate)
    assert len(found) == 1
    return found[0].values


def test_what_was_written_is_read_with_its_types_and_time(store: Store) -> None:
    sample = Sample(
        "gpu",
        {"node": "n 1", "rack": "r=2,x", "gpu": "0"},
        {"util_pct": 98.0, "throttle_reasons": 2**62 + 1, "energy_j": 0.3, "xid_total": 0, "state": 0},
        T0 + 123_456_789,
    )
    event = Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"text": '中 "q" \\ ,=', "code": 79}, T0)
    assert store.write([sample, event]) == []
    read = store.samples("gpu", start_ns=T0, end_ns=T0 + S)
    assert read == [sample]
    assert {name: type(value) for name, value in read[0].fields.items()} == {
        name: type(value) for name, value in sample.fields.items()
    }
    assert store.samples("event", start_ns=T0, end_ns=T0 + 1) == [event]


@pytest.mark.parametrize("value", [0.1 + 0.2, 1 / 3, 123456789.987654321, 1e-9 / 7, 4.0e14 / 3])
def test_a_float_is_read_as_it_was_written_or_as_near_as_promised(store: Store, promise: Promise, value: float) -> None:
    store.write([gpu(0, {"energy_j": value})])
    (read,) = store.samples("gpu", start_ns=T0, end_ns=T0 + S)
    assert read.fields["energy_j"] == pytest.approx(value, rel=promise.float_error, abs=0.0)


@pytest.mark.parametrize("value", [2**53 - 1, 2**53 + 1, 2**63 - 1, -(2**63), -1, 0x8000_0001_0000_0003])
def test_a_whole_number_is_exact_to_its_64th_bit(store: Store, value: int) -> None:
    signed = value if value < 2**63 else value - 2**64
    store.write([gpu(0, {"throttle_reasons": signed}), gpu(1, {"throttle_reasons": 5})])
    read = store.samples("gpu", start_ns=T0, end_ns=T0 + 2 * S)
    assert [sample.fields["throttle_reasons"] for sample in read] == [signed, 5]


@pytest.mark.parametrize("length", [0, 1, 7_999, 8_001, 40_000])
def test_a_text_is_kept_whole_however_long(store: Store, length: int) -> None:
    event = Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"text": "é" * length, "detail": "x"}, T0)
    store.write([event])
    assert store.samples("event", start_ns=T0, end_ns=T0 + 1) == [event]
    assert store.latest("event", since_ns=T0) == [event]


def test_times_are_kept_to_the_nanosecond(store: Store) -> None:
    batch = [Sample("host", {"node": "n1"}, {"load1": 1.0}, T0 + ns) for ns in (0, 1_999_999, 2_000_000, 10_000_001)]
    store.write(batch)
    assert store.samples("host", start_ns=T0, end_ns=T0 + S) == batch
    assert store.samples("host", start_ns=T0 + 1, end_ns=T0 + 2_000_000) == batch[1:2]
    assert store.samples("host", start_ns=T0 + 10_000_001, end_ns=T0 + S) == batch[3:]
    assert store.latest("host", since_ns=T0 + 10_000_001) == batch[3:]
    assert store.latest("host", since_ns=T0 + 10_000_002) == []
    assert store.series("host", since_ns=T0 + 10_000_002) == []


def test_an_empty_store_answers_with_nothing(store: Store) -> None:
    assert store.latest("gpu", since_ns=0) == []
    assert store.samples("gpu", start_ns=0, end_ns=T0) == []
    assert store.range("gpu", ["util_pct"], start_ns=T0, end_ns=T0 + S, step_ns=S) == []
    assert store.series("gpu") == []
    assert store.prune({"*": T0}) == 0


def test_same_tags_and_time_overwrite_and_merge(store: Store) -> None:
    store.write([gpu(0, {"util_pct": 20.0, "temp_c": 50.0})])
    store.write([gpu(0, {"util_pct": 20.0, "power_w": 300.0})])
    assert store.samples("gpu", start_ns=T0, end_ns=T0 + S) == [
        gpu(0, {"util_pct": 20.0, "temp_c": 50.0, "power_w": 300.0})
    ]
    store.write([gpu(1, {"util_pct": 1.0}), gpu(1, {"util_pct": 2.0, "temp_c": 3.0}), gpu(1, {"util_pct": 4.0})])
    assert store.samples("gpu", start_ns=T0 + S, end_ns=T0 + 2 * S) == [gpu(1, {"util_pct": 4.0, "temp_c": 3.0})]


def test_a_later_value_of_one_time_replaces_an_earlier_one_or_either_stays_alone(
    store: Store, promise: Promise
) -> None:
    store.write([gpu(0, {"util_pct": 20.0, "temp_c": 3.0})])
    store.write([gpu(0, {"util_pct": 10.0, "power_w": 4.0})])
    (read,) = store.samples("gpu", start_ns=T0, end_ns=T0 + S)
    assert read.fields["util_pct"] in ([10.0] if promise.later_value_wins else [10.0, 20.0])
    assert (read.fields["temp_c"], read.fields["power_w"]) == (3.0, 4.0)
    for aggregate in ("mean", "last", "min"):
        assert column(store, "util_pct", 1, 1, aggregate) == [read.fields["util_pct"]]


def test_a_replay_changes_nothing(store: Store) -> None:
    batch = [gpu(i, {"util_pct": float(i), "xid_total": i}) for i in range(50)]
    store.write(batch)
    before = store.range("gpu", ["util_pct", "xid_total"], start_ns=T0, end_ns=T0 + 50 * S, step_ns=7 * S)
    store.write(batch[10:40])
    assert store.samples("gpu", start_ns=T0, end_ns=T0 + 50 * S) == batch
    assert store.range("gpu", ["util_pct", "xid_total"], start_ns=T0, end_ns=T0 + 50 * S, step_ns=7 * S) == before


def test_a_bad_sample_is_refused_by_name_and_the_others_are_stored(store: Store) -> None:
    good = gpu(0, {"util_pct": 1.0})
    refused = store.write(
        [
            good,
            Sample("nonsense", {"node": "n"}, {"x": 1.0}, T0),
            gpu(1, {"no_such_field": 1.0}),
            Sample("gpu", {"node": "a\nb"}, {"util_pct": 1.0}, T0),
            gpu(2, {"util_pct": math.nan, "temp_c": 40.0}),
            gpu(3, {"xid_total": 2**63}),
            gpu(4, {"xid_total": "many"}),
            gpu(5, {}),
            Sample("gpu", {"node": 7}, {"util_pct": 1.0}, T0),  # type: ignore[dict-item]
            Sample("gpu", {"node": ["n"]}, {"util_pct": 1.0}, T0),  # type: ignore[dict-item]
            Sample("gpu", {"node": "n"}, {"util_pct": 1.0}, T0 + 0.5),  # type: ignore[arg-type]
            Sample("gpu", {"node": "n"}, {"util_pct": 1.0}, -1),
        ]
    )
    assert store.samples("gpu", start_ns=T0, end_ns=T0 + 9 * S) == [good, gpu(2, {"temp_c": 40.0})]
    named = [
        "nonsense",
        "no_such_field",
        "node",
        "util_pct",
        "xid_total",
        "xid_total",
        "no fields",
        "",
        "tags",
        "time",
        "time",
    ]
    assert [name in entry.reason for name, entry in zip(named, refused, strict=True)] == [True] * len(named)


def test_a_gauge_stays_a_float_and_a_counter_an_int_whatever_was_written(store: Store) -> None:
    store.write([gpu(0, {"util_pct": 1, "xid_total": 3.0}), gpu(1, {"util_pct": 1.5, "xid_total": 4})])
    rows = store.samples("gpu", start_ns=T0, end_ns=T0 + 2 * S)
    assert [row.fields for row in rows] == [{"util_pct": 1.0, "xid_total": 3}, {"util_pct": 1.5, "xid_total": 4}]
    assert [type(row.fields["xid_total"]) for row in rows] == [int, int]
    assert [type(row.fields["util_pct"]) for row in rows] == [float, float]


def test_an_empty_tag_is_no_tag(store: Store) -> None:
    store.write([Sample("engine", {"node": "n1", "engine": "a", "gpus": ""}, {"up": 1}, T0)])
    assert store.series("engine") == [{"node": "n1", "engine": "a"}]


def test_latest_is_the_newest_sample_of_each_series_with_its_own_time(store: Store) -> None:
    store.write([gpu(t, {"util_pct": float(t + g)}, index=g) for t in range(5) for g in range(3) if t + g < 5])
    assert store.latest("gpu", since_ns=T0 + 3 * S) == [gpu(4, {"util_pct": 4.0}), gpu(3, {"util_pct": 4.0}, index=1)]
    assert len(store.latest("gpu", since_ns=0)) == 3
    assert store.latest("gpu", since_ns=T0, where={"gpu": "2"}) == [gpu(2, {"util_pct": 4.0}, index=2)]
    assert store.latest("gpu", since_ns=T0 + 5 * S) == []


def test_latest_holds_the_newest_row_only(store: Store) -> None:
    store.write([gpu(0, {"temp_c": 50.0}), gpu(1, {"util_pct": 9.0})])
    assert store.latest("gpu", since_ns=0) == [gpu(1, {"util_pct": 9.0})]


def test_latest_of_some_fields_has_no_others_and_never_an_older_value(store: Store) -> None:
    text = Sample("engine", {"node": "n1", "engine": "a"}, {"up": 1, "version": "0.32"}, T0)
    store.write(
        [gpu(0, {"util_pct": 8.0, "temp_c": 50.0}), gpu(1, {"util_pct": 9.0, "power_w": 300.0, "xid_total": 3}), text]
    )
    store.write([gpu(0, {"temp_c": 60.0}, index=1), gpu(1, {"util_pct": 7.0}, index=1)])
    assert store.latest("gpu", since_ns=T0, fields=["power_w", "xid_total", "temp_c"]) == [
        gpu(1, {"power_w": 300.0, "xid_total": 3})
    ]
    assert store.latest("gpu", since_ns=T0, fields=["temp_c"]) == []
    assert len(store.latest("gpu", since_ns=T0, fields=["util_pct", "util_pct"])) == 2
    assert store.latest("engine", since_ns=T0, fields=["version"]) == [replace(text, fields={"version": "0.32"})]
    assert store.latest("gpu", since_ns=T0, fields=[]) == []
    with pytest.raises(ValueError, match="utilisation"):
        store.latest("gpu", since_ns=T0, fields=["utilisation"])


def test_a_where_that_no_tag_can_meet_finds_nothing(store: Store) -> None:
    store.write([gpu(0, {"util_pct": 1.0}, node="b")])
    span = {"start_ns": T0, "end_ns": T0 + 60 * 10**9}
    for value in ("\ud800", "a\udcffb", "b\n", ["\ud800"], []):
        where = {"node": value}
        assert store.latest("gpu", since_ns=T0, where=where) == []
        assert store.samples("gpu", **span, where=where) == []
        assert store.range("gpu", ["util_pct"], **span, step_ns=10**9, where=where) == []
        assert store.spread("gpu", ["util_pct"], **span, step_ns=10**9, where=where) == []
    assert len(store.latest("gpu", since_ns=T0, where={"node": ["\ud800", "b"]})) == 1


def test_where_takes_a_value_any_of_several_and_an_absent_tag(store: Store) -> None:
    store.write([gpu(0, {"util_pct": 1.0}, index=g, node=n) for n in ("a'b", "b") for g in range(3)])
    store.write([Sample("gpu", {"node": "c"}, {"util_pct": 1.0}, T0)])

    def found(where: dict[str, str | list[str]]) -> list[tuple[str, str]]:
        return [(s.tags["node"], s.tags.get("gpu", "")) for s in store.latest("gpu", since_ns=0, where=where)]

    assert found({"node": "a'b", "gpu": ["0", "2"]}) == [("a'b", "0"), ("a'b", "2")]
    assert found({"node": ["b", "c"], "gpu": ["1", ""]}) == [("b", "1"), ("c", "")]
    assert found({"node": []}) == []
    assert found({"node": "' OR 1=1 --"}) == []
    for hostile in ("b\n", "b\x00", "\r", "\x1b[0m", "b\\"):
        assert found({"node": hostile}) == found({"node": [hostile]}) == []
        assert found({"node": ["b", hostile], "gpu": "1"}) == [("b", "1")]
        assert store.range("gpu", ["util_pct"], start_ns=T0, end_ns=T0 + S, step_ns=S, where={"node": hostile}) == []
        assert store.samples("gpu", start_ns=T0, end_ns=T0 + S, where={"node": hostile}) == []


def test_samples_are_oldest_first_within_the_half_open_range_and_limit_keeps_the_newest(store: Store) -> None:
    batch = [gpu(t, {"util_pct": 1.0}, index=g) for t in range(6) for g in range(2)]
    store.write(batch[::-1])
    assert store.samples("gpu", start_ns=T0 + S, end_ns=T0 + 3 * S) == batch[2:6]
    assert store.samples("gpu", start_ns=T0, end_ns=T0 + 6 * S, limit=4) == batch[8:]
    assert store.samples("gpu", start_ns=T0, end_ns=T0 + 6 * S, where={"gpu": "1"}, limit=2) == batch[9::2]


def test_buckets_start_at_multiples_of_the_step_and_gaps_stay_empty(store: Store) -> None:
    store.write([gpu(t, {"util_pct": float(t)}) for t in (0, 4, 5, 9, 20)])
    found = store.range("gpu", ["util_pct"], start_ns=T0 + 3 * S, end_ns=T0 + 21 * S, step_ns=5 * S)
    assert found[0].values == [2.0, 7.0, None, None, 20.0]
    assert found[0].field == "util_pct" and found[0].tags == {"node": "n1", "gpu": "0"}


def test_what_was_written_a_moment_ago_is_in_every_answer_and_a_gap_is_not_filled(store: Store) -> None:
    now = time.time_ns() // S * S
    rows = [
        Sample("host", {"node": "n1"}, {"load1": float(-t), "cpu_pct": float(t + 9)}, now + t * S)
        for t in (-9, -8, -4, -1, 0)
    ]
    store.write(rows)
    assert store.latest("host", since_ns=now - 5 * S) == rows[-1:]
    assert store.samples("host", start_ns=now - 9 * S, end_ns=now + S) == rows
    assert store.series("host", since_ns=now) == [{"node": "n1"}]
    gaps = {0: 9.0, 1: 8.0, 5: 4.0, 8: 1.0, 9: 0.0}
    for aggregate in ("mean", "min", "max", "last"):
        (drawn,) = store.range(
            "host", ["load1"], start_ns=now - 9 * S, end_ns=now + 3 * S, step_ns=S, aggregate=aggregate
        )
        assert drawn.values == [gaps.get(place) for place in range(12)]
    (rate,) = store.range("host", ["cpu_pct"], start_ns=now, end_ns=now + S, step_ns=S, aggregate="rate")
    assert rate.values == [1.0]


def test_steps_below_a_second_and_across_many_buckets(store: Store) -> None:
    store.write([gpu(t / 4, {"util_pct": float(t)}) for t in range(40)])
    halves = store.range("gpu", ["util_pct"], start_ns=T0, end_ns=T0 + 10 * S, step_ns=S // 2)
    assert halves[0].values == [2.0 * t + 0.5 for t in range(20)]
    odd = store.range("gpu", ["util_pct"], start_ns=T0, end_ns=T0 + S, step_ns=333_333_333, aggregate="last")
    first = T0 // 333_333_333
    expected: dict[int, float] = {}
    for t in range(40):
        expected[(T0 + t * S // 4) // 333_333_333 - first] = float(t)
    assert odd[0].values == [expected.get(place) for place in range(len(odd[0].values))]
    many = store.range("gpu", ["util_pct"], start_ns=T0, end_ns=T0 + 3000 * S, step_ns=S // 8, aggregate="max")
    assert len(many[0].values) == 24_000
    assert [place for place, value in enumerate(many[0].values) if value is not None] == list(range(0, 80, 2))


@pytest.mark.parametrize(("aggregate", "expected"), [("mean", 3.0), ("min", 1.0), ("max", 6.0), ("last", 2.0)])
def test_each_aggregate_of_a_gauge(store: Store, aggregate: str, expected: float) -> None:
    store.write([gpu(t, {"temp_c": v}) for t, v in ((0, 1.0), (1, 6.0), (2, 2.0))])
    store.write([gpu(3, {"util_pct": 1.0})])  # a later row without the field is not its last value
    assert column(store, "temp_c", 10, 10, aggregate) == [expected]


def test_auto_draws_each_kind_its_own_way(store: Store) -> None:
    rows: list[Fields] = [
        {"util_pct": 10.0, "xid_total": 7, "state": 4, "throttle_reasons": 0x44, "energy_j": 1.5},
        {"util_pct": 30.0, "xid_total": 2, "state": 1, "throttle_reasons": 0x120, "energy_j": 0.5},
        {"util_pct": 50.0, "state": 0, "throttle_reasons": 0x4},
    ]
    store.write([gpu(t, fields) for t, fields in enumerate(rows)])
    names = ["util_pct", "xid_total", "state", "throttle_reasons", "energy_j"]
    found = store.range("gpu", names, start_ns=T0, end_ns=T0 + 60 * S, step_ns=60 * S)
    assert [(c.field, c.values) for c in found] == [
        ("util_pct", [30.0]),
        ("xid_total", [2.0]),
        ("state", [4.0]),
        ("throttle_reasons", [float(0x164)]),
        ("energy_j", [0.5]),
    ]


def test_a_rate_counts_from_zero_after_a_reset_and_is_never_negative(store: Store) -> None:
    store.write([gpu(t, {"xid_total": v}) for t, v in ((0, 100), (1, 110), (2, 130), (3, 4), (4, 10))])
    assert column(store, "xid_total", 5, 1, "rate") == [None, 10.0, 20.0, 4.0, 6.0]
    assert column(store, "xid_total", 4, 4, "rate") == [pytest.approx(34 / 3)]


def test_a_rate_looks_back_over_the_start_and_not_across_a_long_gap(store: Store) -> None:
    points = ((-10, 0), (10, 40), (1000, 5000), (1010, 5020))
    store.write([gpu(t, {"xid_total": v}) for t, v in points])
    values = column(store, "xid_total", 1020, 20, "rate")
    assert values[0] == 2.0 and values[50] == 2.0
    assert [v for i, v in enumerate(values) if i not in (0, 50)] == [None] * 49


def test_a_range_covers_whole_buckets_and_only_series_with_values(store: Store) -> None:
    store.write([gpu(0, {"util_pct": 1.0}), gpu(9, {"util_pct": 3.0}), gpu(5, {"temp_c": 1.0}, index=1)])
    found = store.range("gpu", ["util_pct", "temp_c"], start_ns=T0 + 2 * S, end_ns=T0 + 7 * S, step_ns=10 * S)
    assert [(c.tags["gpu"], c.field, c.values) for c in found] == [("0", "util_pct", [2.0]), ("1", "temp_c", [1.0])]


def test_a_spread_is_of_every_value_of_every_series_that_is_meant(store: Store) -> None:
    store.write([gpu(t, {"util_pct": float(10 * g + t)}, index=g) for g in range(3) for t in range(4 if g else 1)])
    store.write([gpu(1, {"util_pct": 11.0}, index=1), gpu(0, {"util_pct": 90.0}, node="n2"), gpu(9, {"temp_c": 5.0})])

    def spread(where: Where | None) -> list[tuple[str, list[float | None], list[float | None], list[float | None]]]:
        found = store.spread("gpu", ["util_pct", "temp_c"], start_ns=T0, end_ns=T0 + 6 * S, step_ns=2 * S, where=where)
        return [(s.field, s.mean, s.low, s.high) for s in found]

    assert spread({"node": "n1"}) == [
        ("util_pct", [pytest.approx(12.4), 17.5, None], [0.0, 12.0, None], [21.0, 23.0, None])
    ]
    assert spread({"gpu": ["0", "2"], "node": ["n2", ""]}) == [("util_pct", *[[90.0, None, None]] * 3)]
    assert spread({"node": []}) == spread({"node": "n9"}) == []


@pytest.mark.parametrize(
    ("measurement", "field", "aggregate", "step"),
    [
        ("nonsense", "x", "auto", S),
        ("gpu", "nonsense", "auto", S),
        ("event", "text", "auto", S),
        ("gpu", "util_pct", "median", S),
        ("gpu", "util_pct", "or", S),
        ("gpu", "util_pct", "auto", 0),
        ("gpu", "util_pct", "auto", 1),
    ],
)
def test_a_range_that_makes_no_sense_is_a_value_error(
    store: Store, measurement: str, field: str, aggregate: str, step: int
) -> None:
    with pytest.raises(ValueError, match=r"."):
        store.range(measurement, [field], start_ns=T0, end_ns=T0 + S, step_ns=step, aggregate=aggregate)


def test_series_lists_tag_sets_that_are_alive_since(store: Store) -> None:
    store.write([gpu(0, {"util_pct": 1.0}), gpu(10, {"util_pct": 1.0}, index=1)])
    assert store.series("gpu") == [{"node": "n1", "gpu": "0"}, {"node": "n1", "gpu": "1"}]
    assert store.series("gpu", since_ns=T0 + 10 * S) == [{"node": "n1", "gpu": "1"}]


def test_prune_removes_what_is_older_and_nothing_else_or_says_that_it_cannot(store: Store, promise: Promise) -> None:
    if promise.prunes:
        prunes_what_is_older(store)
    else:
        says_that_it_cannot_prune(store)


def says_that_it_cannot_prune(store: Store) -> None:
    """Only when something would have to go."""
    store.write([gpu(0, {"util_pct": 1.0})])
    assert store.prune({"*": T0}) == 0
    assert store.prune({"*": T0 + S, "gpu": T0}) == 0
    with pytest.raises(StoreError, match="retention"):
        store.prune({"gpu": T0 + S})
    assert store.samples("gpu", start_ns=T0, end_ns=T0 + S) == [gpu(0, {"util_pct": 1.0})]


def prunes_what_is_older(store: Store) -> None:
    hour = 3600
    store.write([gpu(t * hour, {"util_pct": float(t)}, index=g) for t in range(5) for g in range(10)])
    store.write([Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"code": 1}, T0)])
    assert store.prune({"gpu": T0 + 3 * hour * S}) == 30
    assert {s.time_ns for s in store.samples("gpu", start_ns=0, end_ns=T0 + 9 * hour * S)} == {
        T0 + 3 * hour * S,
        T0 + 4 * hour * S,
    }
    assert len(store.samples("event", start_ns=0, end_ns=T0 + S)) == 1
    assert store.prune({"*": T0 + 9 * hour * S, "gpu": T0}) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tags=st.dictionaries(st.sampled_from(["node", "gpu", "uuid"]), st.text(min_size=1, max_size=12), min_size=1),
    text=st.text(max_size=40),
)
def test_hostile_strings_come_back_the_same_or_are_refused(store: Store, tags: dict[str, str], text: str) -> None:
    time_ns = T0 + next(MOMENTS) * 1_000_000
    sample = Sample("event", {**tags, "kind": "config"}, {"text": text, "code": 1}, time_ns)
    refused = store.write([sample])
    found = store.samples("event", start_ns=time_ns, end_ns=time_ns + 1, where=None if refused else tags)
    read = [s for s in found if s.tags == sample.tags]
    if refused:
        assert len(refused) == 1 and (read == [] or read[0].fields == {"code": 1})
    else:
        assert read == [sample]


def test_many_threads_write_and_read_at_once_and_nothing_is_mixed_up(store: Store) -> None:
    failures: list[BaseException] = []

    def guard(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write(index: int) -> Callable[[], None]:
        def run() -> None:
            for t in range(20):
                store.write([gpu(t, {"util_pct": float(t), "temp_c": float(t)}, index=index)])

        return run

    def read() -> None:
        for _ in range(20):
            for sample in store.latest("gpu", since_ns=0):
                assert sample.fields["util_pct"] == sample.fields["temp_c"]

    threads = [guard(write(i)) for i in range(3)] + [guard(read) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.samples("gpu", start_ns=T0, end_ns=T0 + 60 * S)) == 60


def test_a_survey_tells_the_span_that_is_held_and_that_it_can_be_written(store: Store) -> None:
    empty = store.survey()
    assert (empty.oldest_ns, empty.newest_ns, empty.write_problem) == (None, None, "")
    assert empty.server.split(" ")[0] in ("SQLite", "InfluxDB", "VictoriaMetrics")
    store.write([gpu(5, {"util_pct": 1.0}), gpu(7, {"util_pct": 1.0}, index=1)])
    store.write([Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"code": 1}, T0 + 2 * S)])
    full = store.survey()
    assert (full.oldest_ns, full.newest_ns) == (T0 + 2 * S, T0 + 7 * S)
    assert store.samples("gpu", start_ns=0, end_ns=T0 + 9 * S) == [
        gpu(5, {"util_pct": 1.0}),
        gpu(7, {"util_pct": 1.0}, index=1),
    ]


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.write([gpu(0, {"util_pct": 1.0})])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("influxdb://u:s3cret@h:8086/d?token=s3cret", "influxdb://h:8086/d"),
        ("influxdb://u:s3@cret@h:8086/d", "influxdb://h:8086/d"),
        ("influxdb://u:s3cret?x@h/d", "influxdb://***"),
        ("influxdb://u:s3cret#x@h/d", "influxdb://***"),
        ("influxdb://u:s3cret@[h/d", "influxdb://[h/d"),
        ("u:s3cret@h", "h"),
        ("sqlite:///var/store.db", "sqlite:///var/store.db"),
    ],
)
def test_an_address_is_shown_without_what_is_secret_in_it(url: str, shown: str) -> None:
    assert public_url(url) == shown


def test_an_address_whose_kind_was_forgotten_is_refused_without_its_password() -> None:
    with pytest.raises(StoreError, match="unknown kind") as refused:
        open_store("u:s3cret@h:8086/d")
    assert "s3cret" not in str(refused.value)
