"""The window keeps what rules read, in order, no longer than it must, and names pairs rightly."""

from __future__ import annotations

import statistics
from array import array
from random import Random

import pytest

from rules.column import Steady
from rules.pair import pairs_of
from rules.window import SECOND, Device, Window
from telemetry.sample import Sample

T0 = 1_795_960_800_000_000_000


def gpu(t: float, index: str = "0", node: str = "n1", **fields: float | int) -> Sample:
    return Sample("gpu", {"node": node, "gpu": index, "uuid": f"{node}-{index}"}, fields, T0 + int(t * SECOND))


def engine(t: float, name: str, node: str = "n1", gpus: str = "", **fields: float | int | str) -> Sample:
    tags = {"node": node, "engine": name, "kind": "vllm", "model": "m"} | ({"gpus": gpus} if gpus else {})
    return Sample("engine", tags, fields, T0 + int(t * SECOND))


def test_an_absent_field_leaves_no_value_and_no_zero() -> None:
    window = Window()
    window.add([gpu(0, temp_c=60.0), gpu(1, util_pct=98.0), gpu(2, temp_c=62.0, util_pct=97.0)])
    (device,) = window.devices("n1", "gpu")
    assert device.values("temp_c", T0 - 1, T0 + 2 * SECOND) == [60.0, 62.0]
    assert device.points("util_pct", T0 - 1, T0 + 2 * SECOND) == [(T0 + SECOND, 98.0), (T0 + 2 * SECOND, 97.0)]
    assert device.values("power_w", T0 - 1, T0 + 2 * SECOND) == []


def test_parts_of_one_tick_merge_and_what_comes_late_is_let_go() -> None:
    window = Window()
    window.add([gpu(0, temp_c=60.0), gpu(0, util_pct=98.0), gpu(5, temp_c=61.0), gpu(3, temp_c=99.0)])
    (device,) = window.devices("n1", "gpu")
    assert list(device.times) == [T0, T0 + 5 * SECOND]
    assert device.values("util_pct", T0 - 1, T0) == [98.0]


def test_trimming_lets_go_of_the_past_and_keeps_the_last_known_limits() -> None:
    window = Window(horizon_s=60)
    window.add([gpu(0, temp_limit_c=87.0, temp_c=60.0)])
    window.add(gpu(t, temp_c=60.0) for t in range(1, 400))
    window.trim(T0 + 399 * SECOND)
    (device,) = window.devices("n1", "gpu")
    assert 60 <= len(device.times) <= 61
    assert device.values("temp_c", T0, T0 + 300 * SECOND) == []
    assert device.known("temp_limit_c", T0 + 399 * SECOND) == 87.0
    assert device.known("temp_limit_c", T0 + 7300 * SECOND) is None


def test_a_changed_text_is_an_event_once() -> None:
    window = Window()
    window.add([engine(0, "e", version="1", config_hash="a"), engine(1, "e", version="1", config_hash="a")])
    assert window.events == []
    window.add([engine(2, "e", version="2", config_hash="a"), engine(3, "e", version="2", config_hash="b")])
    window.add([engine(3, "e", version="2", config_hash="b")])
    assert [(event.kind, event.text) for event in window.events] == [("deploy", "1 -> 2"), ("config", "a -> b")]


def test_the_same_event_read_twice_is_one() -> None:
    event = Sample("event", {"node": "n1", "kind": "deploy", "subject": "e"}, {"text": "x", "code": 0}, T0)
    window = Window()
    window.add([event, event])
    window.add([event])
    assert len(window.events) == 1


def test_pairs_are_engines_with_their_gpus_and_nodes_without_an_engine() -> None:
    window = Window()
    window.add([gpu(0, str(i), util_pct=1.0) for i in range(4)])
    window.add([engine(0, "a", gpus="0+1", up=1), engine(0, "b", gpus="3", up=1)])
    window.add([gpu(0, "0", node="n2", util_pct=1.0), Sample("host", {"node": "n3"}, {"cpu_pct": 3.0}, T0)])
    found = {(p.node, p.subject.get("engine", "")): [g.tags["gpu"] for g in p.gpus] for p in pairs_of(window)}
    assert found == {
        ("n1", "a"): ["0", "1"],
        ("n1", "b"): ["3"],
        ("n1", ""): ["2"],
        ("n2", ""): ["0"],
        ("n3", ""): [],
    }


def test_an_engine_that_names_no_gpus_has_those_that_nobody_names() -> None:
    window = Window()
    window.add([gpu(0, str(i), util_pct=1.0) for i in range(3)])
    window.add([engine(0, "a", up=1), engine(0, "b", gpus="2", up=1)])
    found = {p.subject["engine"]: [g.tags["gpu"] for g in p.gpus] for p in pairs_of(window)}
    assert found == {"a": ["0", "1"], "b": ["2"]}


def test_ten_gpus_sort_as_numbers_and_a_gpu_whose_uuid_changed_is_one() -> None:
    window = Window()
    window.add([gpu(0, str(i), util_pct=1.0) for i in range(11)])
    window.add([Sample("gpu", {"node": "n1", "gpu": "4", "uuid": "new"}, {"util_pct": 7.0}, T0 + SECOND)])
    (pair,) = pairs_of(window)
    assert [g.tags["gpu"] for g in pair.gpus] == [str(i) for i in range(11)]
    assert pair.gpus[4].tags["uuid"] == "new"


def test_a_counter_grows_over_gaps_and_from_zero_after_a_reset() -> None:
    window = Window()
    counts = [None, 5, 9, None, 2**40, 3, 3, 10, None]
    window.add(
        engine(t, "e", up=1, **({} if count is None else {"generation_tokens_total": count}))
        for t, count in enumerate(counts)
    )
    (device,) = window.devices("n1", "engine")
    assert device.grown("generation_tokens_total", T0 - 1, T0 + 4 * SECOND) == (2**40 - 5, 3.0)
    assert device.grown("generation_tokens_total", T0 - 1, T0 + 8 * SECOND) == (2**40 - 5 + 3 + 7, 6.0)
    assert device.grown("generation_tokens_total", T0 + 4 * SECOND, T0 + 5 * SECOND) is None
    assert device.grown("steps_total", T0 - 1, T0 + 8 * SECOND) is None
    assert device.ends("generation_tokens_total", T0 - 1, T0 + 8 * SECOND) == (5.0, 10.0)


def test_backwards_is_points_from_the_newest_on_and_an_old_span_is_not_answered_from_before() -> None:
    window = Window()
    window.add(gpu(t, temp_c=60.0 + t, **({"util_pct": 90.0} if t % 3 else {})) for t in range(10))
    (device,) = window.devices("n1", "gpu")
    span = (T0 + 2 * SECOND, T0 + 12 * SECOND)
    assert list(device.backwards("util_pct", *span)) == device.points("util_pct", *span)[::-1]
    assert list(device.backwards("power_w", *span)) == []
    window.add([gpu(11, temp_c=99.0)])
    assert device.values("temp_c", *span)[-1] == 99.0
    window.trim(T0 + 305 * SECOND)
    assert device.values("temp_c", *span) == [66.0, 67.0, 68.0, 69.0, 99.0]


def test_counters_times_and_masks_lose_no_digit_and_readings_keep_seven() -> None:
    window = Window()
    mask, energy = 2**30 + 1, 123_456_789.125
    window.add([gpu(0, throttle_reasons=mask, throttle_sw_power_s=energy, power_w=612.34567, pcie_rx_bytes_s=1.25e10)])
    (device,) = window.devices("n1", "gpu")
    read = {name: device.values(name, T0 - 1, T0) for name in device.columns}
    assert read["throttle_reasons"] == [mask] and read["throttle_sw_power_s"] == [energy]
    assert abs(read["power_w"][0] - 612.34567) < 1e-4 and abs(read["pcie_rx_bytes_s"][0] - 1.25e10) < 1e3
    window.add([gpu(1, power_w=612.4, pcie_rx_bytes_s=1.5e10)])
    columns = [device.columns[name] for name in ("power_w", "pcie_rx_bytes_s")]
    assert [column.itemsize for column in columns if isinstance(column, array)] == [4, 4]


def test_a_median_is_of_the_readings_that_are_there_now() -> None:
    window = Window()
    host = {"node": "n1"}
    window.add(Sample("host", host, {"cpu_pct": float(t**2)}, T0 + t * SECOND) for t in range(4))
    (device,) = window.devices("n1", "host")
    span = (T0 - 1, T0 + 9 * SECOND)
    assert device.median("cpu_pct", *span) == 2.5
    assert device.newest("cpu_pct", *span) == 9.0
    window.add([Sample("host", host, {"load1": 2.0}, T0 + 4 * SECOND)])
    assert (device.median("cpu_pct", *span), device.newest("cpu_pct", *span)) == (2.5, 9.0)
    window.add([Sample("host", host, {"cpu_pct": 50.0}, T0 + 5 * SECOND)])
    assert device.median("cpu_pct", *span) == 4.0
    assert device.median("iowait_pct", *span) is None


def test_names_of_gpus_that_only_look_like_numbers_sort_behind_the_numbers() -> None:
    window = Window()
    for index in ("²", "9" * 5000, "10", "٣", "2"):
        window.add([gpu(1, index, util_pct=90.0)])
    assert [device.tags["gpu"] for device in pairs_of(window)[0].gpus][:2] == ["2", "10"]
    assert len(pairs_of(window)[0].gpus) == 5


def test_what_names_no_node_is_nobodys_and_an_event_without_a_number_has_no_code() -> None:
    window = Window()
    window.add([gpu(1, node="", util_pct=90.0), Sample("gpu", {"gpu": "1"}, {"util_pct": 91.0}, T0)])
    assert window.nodes() == [] and pairs_of(window) == []
    for code in (float("nan"), float("inf"), 1e300):
        window.add([Sample("event", {"node": "n1", "kind": "xid"}, {"text": str(code), "code": code}, T0)])
    assert [event.code for event in window.events] == [None, None, None]


READINGS = ([None, 0.0], [33.3], [None, 33.3], [None, 5.0, 5.0, 5.0, 5.0, 7.0], [1.0, 2.0], [None])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["power_w", "xid_total"])
def test_what_stands_still_reads_like_what_moves_over_gaps_trims_and_parts_of_a_tick(seed: int, name: str) -> None:
    random = Random(seed)
    device, rows = Device("gpu", {}), dict[int, float | None]()
    readings = random.choice(READINGS)
    for t in range(1, 120):
        if random.random() < 0.1:
            readings = random.choice(READINGS)
        for _ in range(random.choice((1, 1, 2))):
            reading = random.choice(readings)
            device.add(t, {"temp_c": 1.0 * t} if reading is None else {"temp_c": 1.0 * t, name: reading})
            rows[t] = rows.get(t) if reading is None else reading
        if random.random() < 0.1:
            before = random.randrange(t)
            device.trim(before)
            rows = {at: reading for at, reading in rows.items() if at > before}
        start, end = sorted((random.randrange(-1, t + 2), random.randrange(-1, t + 2)))
        exact = [(at, reading) for at, reading in rows.items() if start < at <= end and reading is not None]
        points = [(at, reading if name == "xid_total" else array("f", [reading])[0]) for at, reading in exact]
        values = [reading for _, reading in points]
        assert device.points(name, start, end) == points
        assert list(device.backwards(name, start, end)) == points[::-1]
        assert device.values(name, start, end) == values
        assert device.median(name, start, end) == (statistics.median(values) if values else None)
        assert device.newest(name, start, end) == (values[-1] if values else None)
        assert device.ends(name, start, end) == ((values[0], values[-1]) if len(values) > 1 else None)
        if len(values) < 2:
            assert device.grown(name, start, end) is None
        elif values == sorted(values):
            seconds = (points[-1][0] - points[0][0]) / SECOND
            assert device.grown(name, start, end) == (values[-1] - values[0], pytest.approx(seconds))


def test_a_reading_that_stands_still_takes_a_byte_a_row_and_again_after_it_has_moved() -> None:
    device = Device("gpu", {})
    for t in range(1, 400):
        device.add(t, {"power_limit_w": 700.1 if t < 50 else 350.3, "power_w": 600.0 + t % 2, "state": 0})
    assert isinstance(device.columns["state"], Steady)
    assert not isinstance(device.columns["power_limit_w"], Steady)
    device.trim(60)
    device.add(400, {"power_limit_w": 350.3, "state": 0})
    assert [name for name, column in device.columns.items() if isinstance(column, Steady)] == ["power_limit_w", "state"]
    assert device.values("power_limit_w", 60, 400) == [pytest.approx(350.3)] * 340
