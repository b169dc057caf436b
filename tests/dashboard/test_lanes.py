"""Lanes and their curves: holes stay holes, readings of slow sources are carried, several GPUs become one honest curve."""

from __future__ import annotations

import sys

from dashboard.fleet import PairNow, read_fleet
from dashboard.history import History, Series, incidents
from dashboard.history_reader import HistoryReader
from dashboard.lanes import carry_on, drawn_lanes, hold, throttle
from dashboard.selection import SECOND_NS, PairKey, Window
from telemetry.sample import Sample
from telemetry.store import Store

scene = sys.modules["scene"]
NOW = 1_767_225_600 * SECOND_NS
WINDOW = Window(NOW - 20 * SECOND_NS, NOW, 2 * SECOND_NS)


def gpus(*names: str) -> PairNow:
    return PairNow(PairKey("n1", "e"), NOW, gpus=names, effort="gpu")


def columns(**fields: list[tuple[str, list[float | None]]]) -> History:
    """gpu fields by name: [(gpu, values), ...]"""
    return History(
        WINDOW,
        {("gpu", name): [Series({"gpu": gpu}, values) for gpu, values in several] for name, several in fields.items()},
    )


def test_a_hole_longer_than_three_intervals_stays_a_hole() -> None:
    values = [1.0, 2.0, None, None, None, None, 7.0, 8.0]
    assert hold(values, 2 * SECOND_NS) == [1.0, 2.0, 2.0, None, None, None, 7.0, 8.0]


def test_a_source_read_each_five_seconds_fills_two_second_buckets_without_holes() -> None:
    values = [1.0, None, None, 2.0, None, 3.0, None, None, 4.0, None, 5.0]
    assert hold(values, 2 * SECOND_NS) == [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 5.0]


def test_a_slow_source_that_stops_ends_after_three_of_its_intervals() -> None:
    values = [1.0, None, None, 2.0, None, None, 3.0, *[None] * 12]
    held = hold(values, 2 * SECOND_NS)
    assert held[6:15] == [3.0] * 9
    assert held[15:] == [None] * 4


def test_wide_buckets_are_never_bridged() -> None:
    assert hold([1.0, None, 3.0, 4.0, 5.0, 6.0], 45 * SECOND_NS)[1] is None


def test_nothing_is_invented_before_the_first_reading() -> None:
    assert hold([None, None, 4.0, 5.0], 2 * SECOND_NS)[:2] == [None, None]


def test_limits_stand_over_the_whole_window() -> None:
    assert carry_on([None, 87.0, None, 90.0, None], 1) == [87.0, 87.0, 87.0, 90.0, 90.0]


def test_two_gpus_are_drawn_as_the_hottest_and_the_slowest() -> None:
    history = columns(
        temp_c=[("0", [70.0] * 10), ("1", [81.0] * 10)],
        sm_clock_mhz=[("0", [1905.0] * 10), ("1", [1290.0] * 10)],
        power_w=[("0", [500.0] * 10), ("1", [700.0] * 10)],
    )
    lanes = {lane.name: lane.curves for lane in drawn_lanes(gpus("0", "1"), history, "en")}
    assert lanes["temperature"][0].last == 81.0
    assert lanes["temperature"][0].which == "hottest of 2"
    assert lanes["clock"][0].last == 1290.0
    assert lanes["power"][0].last == 600.0


def test_a_zero_counts_in_a_mean_and_what_is_absent_does_not() -> None:
    history = columns(power_w=[("0", [0.0] * 10), ("1", [90.0] * 10), ("2", [None] * 10)])
    lanes = {lane.name: lane.curves for lane in drawn_lanes(gpus("0", "1", "2"), history, "en")}
    assert lanes["power"][0].last == 45.0


def test_a_single_gpu_is_not_called_the_hottest_of_one() -> None:
    lanes = drawn_lanes(gpus("0"), columns(temp_c=[("0", [70.0] * 10)]), "en")
    assert lanes[0].curves[0].which == ""


def test_a_lane_with_only_its_limit_is_left_out() -> None:
    names = [lane.name for lane in drawn_lanes(gpus("0"), columns(temp_limit_c=[("0", [87.0] * 10)]), "en")]
    assert names == []


def test_without_gpus_no_hardware_lane_is_drawn_and_cpu_use_is_the_effort() -> None:
    history = History(
        WINDOW,
        {
            ("host", "cpu_pct"): [Series({}, [55.0] * 10)],
            ("engine", "tokens_per_s"): [Series({}, [100.0] * 10)],
            ("gpu", "temp_c"): [Series({"gpu": "0"}, [70.0] * 10)],
        },
    )
    lanes = {lane.name: lane for lane in drawn_lanes(PairNow(PairKey("n1", "e"), NOW), history, "en")}
    assert set(lanes) == {"pair", "tokens", "cpu"}
    assert [curve.title for curve in lanes["pair"].curves] == ["CPU use"]
    assert lanes["pair"].curves[0].last == 55.0


def test_a_throttle_reason_is_as_strong_as_the_share_of_time_that_its_counter_says() -> None:
    history = History(
        WINDOW,
        {("gpu", "throttle_reasons"): [Series({"gpu": "0"}, [0x40] * 10)]},
        {"hw_thermal": [Series({"gpu": "0"}, [0.5] * 10)]},
    )
    assert throttle(history)["hw_thermal"] == [0.5] * 10
    assert throttle(history)["hw_power_brake"] == [0.0] * 10


def test_a_mask_without_counters_counts_the_gpus_that_show_it() -> None:
    masks = [("0", [float(0x80)] * 10), ("1", [0.0] * 10)]
    assert throttle(columns(throttle_reasons=masks))["hw_power_brake"] == [0.5] * 10


def test_buckets_without_a_mask_are_unknown_and_not_unthrottled() -> None:
    masks: list[tuple[str, list[float | None]]] = [("0", [0.0, 0.0, *[None] * 8])]
    assert throttle(columns(throttle_reasons=masks))["hw_thermal"][-1] is None


def test_a_moving_window_reads_its_tail_only_and_equals_a_whole_read(store: Store) -> None:
    asked: list[int] = []

    class Counting:
        url = ""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def range(self, *args: object, **options: object) -> object:
            asked.append(int(str(options["end_ns"])) - int(str(options["start_ns"])))
            return store.range(*args, **options)  # type: ignore[arg-type]

    start = NOW - 600 * SECOND_NS
    store.write(list(scene.gpu_pair("n1", "chat", (0, 1), start, NOW)))
    fleet = read_fleet(store, NOW, forget_s=3600, stale_s=15)
    pair = fleet.pairs[PairKey("n1", "chat")]
    reader = HistoryReader(Counting(), clock=lambda: 0.0)  # type: ignore[arg-type]
    first = Window(start, NOW - 120 * SECOND_NS, 2 * SECOND_NS)
    later = Window(start + 60 * SECOND_NS, NOW - 60 * SECOND_NS, 2 * SECOND_NS)
    reader.read(pair, first)
    asked.clear()
    moved = reader.read(pair, later)
    assert max(asked) <= 92 * SECOND_NS
    whole = HistoryReader(store).read(pair, later)
    assert moved == whole
    assert moved.columns


def test_late_samples_are_seen_after_the_next_whole_read(store: Store) -> None:
    time_s = [0.0]
    engine = {"node": "n1", "engine": "e", "kind": "vllm", "model": "m"}
    host = Sample("host", {"node": "n1"}, {"cpu_pct": 5.0}, NOW - SECOND_NS)
    store.write([host, Sample("engine", engine, {"tokens_per_s": 1.0}, NOW - 2 * SECOND_NS)])
    pair = read_fleet(store, NOW, forget_s=3600, stale_s=15).pairs[PairKey("n1", "e")]
    reader = HistoryReader(store, clock=lambda: time_s[0])
    window = Window(NOW - 600 * SECOND_NS, NOW, 2 * SECOND_NS)
    reader.read(pair, window)
    store.write([Sample("engine", engine, {"tokens_per_s": 9.0}, window.start_ns)])
    assert reader.read(pair, window).columns["engine", "tokens_per_s"][0].values[0] is None
    time_s[0] = 61.0
    assert reader.read(pair, window).columns["engine", "tokens_per_s"][0].values[0] == 9.0


def test_a_gpu_whose_tags_changed_is_still_one_gpu(store: Store) -> None:
    half = NOW - 20 * SECOND_NS
    for rack, start, end in (("a", NOW - 40 * SECOND_NS, half), ("b", half, NOW)):
        store.write(list(scene.gpu_pair("n1", "chat", (0,), start, end, rack=rack)))
    pair = read_fleet(store, NOW, forget_s=3600, stale_s=15).pairs[PairKey("n1", "chat")]
    history = HistoryReader(store).read(pair, Window(NOW - 40 * SECOND_NS, NOW, 2 * SECOND_NS))
    assert len(history.columns["gpu", "temp_c"]) == 1
    assert None not in history.columns["gpu", "temp_c"][0].values


def incidents_of(*said: tuple[str, list[int]]) -> list[tuple[str, int, int]]:
    """(cause, buckets with its verdict) -> (cause, first bucket, end bucket); 60 buckets of 2 s."""
    window = Window(NOW - 120 * SECOND_NS, NOW, 2 * SECOND_NS)
    series = [
        Series({"cause": cause}, [0.9 if place in places else None for place in range(60)]) for cause, places in said
    ]
    return [
        (i.cause, (i.start_ns - window.start_ns) // window.step_ns, (i.end_ns - window.start_ns) // window.step_ns)
        for i in incidents(series, window)
    ]


def test_an_incident_ends_when_triage_says_that_nothing_is_wrong() -> None:
    assert incidents_of(("thermal", [10, 25, 40]), ("none", [5, 45])) == [("thermal", 10, 45)]


def test_a_verdict_that_is_repeated_each_half_minute_is_one_incident_until_now() -> None:
    assert incidents_of(("thermal", [10, 25, 40, 55])) == [("thermal", 10, 60)]


def test_an_incident_that_triage_stops_repeating_ends() -> None:
    assert incidents_of(("thermal", [10])) == [("thermal", 10, 32)]


def test_another_cause_begins_another_incident() -> None:
    assert incidents_of(("thermal", [10, 40]), ("power", [20])) == [
        ("thermal", 10, 20),
        ("power", 20, 40),
        ("thermal", 40, 60),
    ]


def test_a_long_window_is_read_newest_first_over_several_looks(store: Store) -> None:
    time_s = [0.0]

    class Slow:
        url = ""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def range(self, *args: object, **options: object) -> object:
            time_s[0] += (int(str(options["end_ns"])) - int(str(options["start_ns"]))) / SECOND_NS / 1000
            return store.range(*args, **options)  # type: ignore[arg-type]

    start = NOW - 3600 * SECOND_NS
    store.write(list(scene.cpu_pair("n1", "e", start, NOW, step_s=5.0)))
    pair = read_fleet(store, NOW, forget_s=3600, stale_s=15).pairs[PairKey("n1", "e")]
    reader = HistoryReader(Slow(), clock=lambda: time_s[0])  # type: ignore[arg-type]
    window = Window(start, NOW, 8 * SECOND_NS)
    first = reader.read(pair, window)
    assert first.partial
    cpu = first.columns["host", "cpu_pct"][0].values
    assert cpu[-1] is not None and cpu[0] is None
    looks = 1
    while reader.read(pair, window).partial:
        looks += 1
    assert 2 < looks <= 32
    assert reader.read(pair, window) == HistoryReader(store).read(pair, window)
