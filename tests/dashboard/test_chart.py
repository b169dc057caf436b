"""The pair chart as the dict that plotly gets: honest about gaps, one time axis, nothing that is not JSON."""

from __future__ import annotations

import gzip
import json
import sys
from typing import Any

import pytest

from dashboard.chart import pair_chart
from dashboard.fleet import read_fleet
from dashboard.history import Incident
from dashboard.history_reader import HistoryReader
from dashboard.lost import gap_polygons, label_place
from dashboard.marks import bands, event_marks
from dashboard.palette import DARK, LIGHT
from dashboard.selection import SECOND_NS, PairKey, Selection, Window
from telemetry.sample import Sample
from telemetry.store import Store
from telemetry.store.rollup import level_ns

scene = sys.modules["scene"]
NOW = 1_767_225_600 * SECOND_NS
HOT = scene.Incident(NOW - 300 * SECOND_NS, NOW + 10**15)
SUBJECT = scene.tags_of("n1") | {"engine": "chat"}


def draw(store: Store, samples: list[Sample], **selected: Any) -> dict[str, Any]:
    store.write(samples)
    fleet = read_fleet(store, NOW, forget_s=3600, stale_s=15)
    pair = next(iter(fleet.pairs.values()))
    selection = Selection(pair=pair.key, **selected)
    return pair_chart(pair, HistoryReader(store).read(pair, selection.window(NOW)), selection)


def gpu_scene(**options: Any) -> list[Sample]:
    start = NOW - 900 * SECOND_NS
    return [
        *scene.gpu_pair("n1", "chat", (0, 1), start, NOW, HOT, **options),
        *scene.verdicts(SUBJECT, NOW - 600 * SECOND_NS, NOW, HOT),
    ]


def trace(figure: dict[str, Any], start: str) -> dict[str, Any]:
    return next(t for t in figure["data"] if t["name"].startswith(start))


def test_all_lanes_share_one_time_axis_and_one_crosshair(store: Store) -> None:
    figure = draw(store, gpu_scene())
    assert {t["xaxis"] for t in figure["data"]} == {"x"}
    assert [name for name in figure["layout"] if name.startswith("xaxis")] == ["xaxis"]
    assert len({t["yaxis"] for t in figure["data"]}) > 8
    assert figure["layout"]["hovermode"] == "x unified"
    assert figure["layout"]["hoversubplots"] == "axis"


def test_the_figure_is_plain_json_without_nan_and_small_enough(store: Store) -> None:
    text = json.dumps(draw(store, gpu_scene()), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    assert len(text.encode()) < 100_000
    assert len(gzip.compress(text.encode(), 5)) < 25_000


def test_output_and_utilisation_are_on_the_same_axis(store: Store) -> None:
    figure = draw(store, gpu_scene())
    assert trace(figure, "output")["yaxis"] == trace(figure, "GPU-Util")["yaxis"] == "y"


def test_every_line_leaves_holes_open(store: Store) -> None:
    samples = [s for s in gpu_scene() if not NOW - 500 * SECOND_NS <= s.time_ns < NOW - 400 * SECOND_NS]
    figure = draw(store, samples)
    for line in figure["data"]:
        if line["type"] == "scatter" and line["mode"] == "lines" and line.get("opacity") != 0 and "x0" in line:
            assert line["connectgaps"] is False
    hole = trace(figure, "output tokens/s")["y"][201:249]
    assert hole == [None] * 48


def test_the_edges_of_the_window_are_not_smoothed(store: Store) -> None:
    tags = {"node": "n1", "engine": "e", "kind": "vllm", "model": "m"}
    start = NOW - 1000 * SECOND_NS
    samples = [Sample("engine", tags, {"tokens_per_s": 500.0}, start + i * SECOND_NS) for i in range(1000)]
    values = trace(draw(store, samples), "output tokens/s")["y"]
    assert values == [500.0] * 450


def test_the_bucket_that_is_still_filling_is_not_drawn() -> None:
    window = Selection(range="6h").window(NOW + 59 * SECOND_NS)
    assert window.end_ns == NOW
    assert Selection(range="6h").window(NOW + 60 * SECOND_NS).end_ns == NOW + 60 * SECOND_NS


def test_each_range_has_some_hundred_buckets() -> None:
    for name in ("15m", "1h", "6h", "24h", "7d"):
        assert 350 <= Selection(range=name).window(NOW).count <= 680


def test_from_six_hours_on_a_window_is_of_buckets_that_the_store_has_drawn_together() -> None:
    hours = [*range(6, 48), 24 * 7, 24 * 31]
    start_ms = NOW // 10**6
    windows = [Selection(range=name).window(NOW) for name in ("6h", "24h", "7d")]
    windows += [Selection(start_ms=start_ms - hour * 3_600_000, end_ms=start_ms).window(NOW) for hour in hours]
    assert all(level_ns(window.step_ns) for window in windows)


def test_the_time_axis_spans_the_window_also_where_nothing_was_recorded(store: Store) -> None:
    figure = draw(store, list(scene.gpu_pair("n1", "chat", (0,), NOW - 60 * SECOND_NS, NOW)))
    start, end = figure["layout"]["xaxis"]["range"]
    assert (end - start) / 1000 == 900


def test_lost_throughput_is_filled_only_where_utilisation_is_above_output() -> None:
    polygons = gap_polygons([100.0, 70.0, 70.0, 100.0], [98.0, 98.0, 98.0, 98.0])
    assert len(polygons) == 1
    xs, ys = [x for x, _ in polygons[0]], [y for _, y in polygons[0]]
    assert min(xs) == pytest.approx(2 / 30)
    assert max(xs) == pytest.approx(3 - 2 / 30)
    assert (min(ys), max(ys)) == (70.0, 98.0)


def test_the_fill_does_not_cross_a_hole() -> None:
    polygons = gap_polygons([70.0, 70.0, None, 70.0, 70.0], [98.0, 98.0, 98.0, 98.0, 98.0])
    assert [sorted({x for x, _ in polygon}) for polygon in polygons] == [[0, 1], [3, 4]]


def test_the_gap_is_named_where_there_is_room_for_the_words() -> None:
    output = [98.0] * 50 + [60.0] * 50
    place = label_place(output, [98.0] * 100)
    assert place is not None
    assert place[0] - 6 >= 50 and place[0] + 6 <= 100
    assert place[1] == 79.0
    assert label_place([98.0, 60.0] * 50, [98.0] * 100) is None
    assert label_place([None] * 100, [98.0] * 100) is None
    assert label_place([], []) is None


def test_no_fill_where_output_is_above_utilisation() -> None:
    assert gap_polygons([100.0, 101.0, 99.0], [55.0, 60.0, 50.0]) == []


def test_local_time_is_shifted_by_the_server_because_plotly_knows_no_zones(store: Store) -> None:
    samples = gpu_scene()
    utc = draw(store, samples)
    local = draw(store, samples, local=True, zone="Asia/Shanghai", offset_s=8 * 3600)
    shift = 8 * 3600 * 1000
    assert trace(local, "output tokens/s")["x0"] - trace(utc, "output tokens/s")["x0"] == shift
    assert local["layout"]["meta"]["offset_ms"] == shift
    assert any("UTC+08:00 Asia/Shanghai" in note["text"] for note in local["layout"]["annotations"])


def test_uirevision_keeps_the_view_over_refreshes_and_gives_way_to_a_new_range(store: Store) -> None:
    samples = gpu_scene()
    first, second = draw(store, samples), draw(store, [])
    other = draw(store, [], range="1h")
    axis = [figure["layout"]["xaxis"]["uirevision"] for figure in (first, second, other)]
    assert axis[0] == axis[1] != axis[2]


def test_an_incident_is_a_band_through_all_lanes_from_its_start(store: Store) -> None:
    figure = draw(store, gpu_scene())
    band = [shape for shape in figure["layout"]["shapes"] if shape["type"] == "rect"]
    assert len(band) == 1
    assert band[0]["yref"] == "paper"
    assert abs(band[0]["x0"] - HOT.start_ns / 1e6) <= 5000


def test_only_the_newest_bands_are_drawn(store: Store) -> None:
    history = HistoryReader(store)
    store.write(gpu_scene())
    fleet = read_fleet(store, NOW, forget_s=3600, stale_s=15)
    window = Window(NOW - 900 * SECOND_NS, NOW, 2 * SECOND_NS)
    read = history.read(fleet.pairs[PairKey("n1", "chat")], window)
    many = [Incident("thermal", window.start_ns + i, window.start_ns + i + 1) for i in range(100)]
    drawn = bands(type(read)(window, incidents=many), 0, LIGHT)
    assert [band["x0"] for band in drawn] == [many[80 + i].start_ns / 1e6 for i in range(20)]


def test_events_are_marked_and_hostile_words_are_text(store: Store) -> None:
    bad = '<img src=x onerror=alert(1)><a href="javascript:x">'
    samples = [*gpu_scene(), scene.event("n1", "deploy", "chat", bad, NOW - 700 * SECOND_NS)]
    figure = draw(store, samples)
    marks = trace(figure, "event")
    assert "&lt;img" in marks["text"][0]
    assert "<img" not in json.dumps(figure)
    assert any("◆ deploy" in note["text"] for note in figure["layout"]["annotations"])


def test_events_of_another_engine_on_the_node_are_not_marked(store: Store) -> None:
    samples = [*gpu_scene(), scene.event("n1", "restart", "other", "died", NOW - 700 * SECOND_NS)]
    assert not any(t["name"] == "event" for t in draw(store, samples)["data"])


def test_labels_that_would_overlap_are_not_written_twice() -> None:
    layout: dict[str, Any] = {"shapes": [], "annotations": [], "yaxis": {"range": [0, 110]}}
    store_window = Window(NOW - 900 * SECOND_NS, NOW, 2 * SECOND_NS)
    events = [scene.event("n1", "deploy", "chat", "v", NOW - 500 * SECOND_NS + i * SECOND_NS) for i in range(5)]
    history = type("H", (), {"window": store_window, "events": events, "incidents": ()})()
    marks = event_marks(history, Selection(), layout, LIGHT)
    assert len(layout["annotations"]) == 1
    assert len(marks[0]["x"]) == len(layout["shapes"]) == 5


def test_labels_of_causes_near_in_time_stand_in_rows_and_each_mark_at_its_own_time() -> None:
    layout: dict[str, Any] = {"shapes": [], "annotations": [], "yaxis": {"range": [0, 110]}}
    window = Window(NOW - 900 * SECOND_NS, NOW, 2 * SECOND_NS)
    starts = [NOW - before * SECOND_NS for before in (500, 440, 380, 30)]
    causes = ("thermal", "power", "kv_full", "thermal")
    incidents = [Incident(cause, start, start + 1) for cause, start in zip(causes, starts, strict=True)]
    history = type("H", (), {"window": window, "events": (), "incidents": incidents})()
    event_marks(history, Selection(), layout, LIGHT)
    arrows = {note["x"] for note in layout["annotations"] if note["text"] == "▼"}
    assert arrows == {start / 1e6 for start in starts}
    labels = {note["x"] * 1e6: note for note in layout["annotations"] if note["text"] != "▼"}
    assert set(labels) == set(starts[1:])  # the oldest of three has no room
    assert labels[starts[1]]["yshift"] > labels[starts[2]]["yshift"] > 0
    assert [labels[start]["xanchor"] for start in starts[1:]] == ["left", "left", "right"]


@pytest.mark.parametrize("simulated", [True, False])
def test_simulated_data_is_badged_on_the_chart_and_real_data_is_not(store: Store, simulated: bool) -> None:
    assert ("SIMULATED" in json.dumps(draw(store, gpu_scene(simulated=simulated)))) is simulated


def test_the_throttle_lane_is_one_heatmap_whose_rows_have_their_own_colours(store: Store) -> None:
    figure = draw(store, gpu_scene())
    maps = [t for t in figure["data"] if t["type"] == "heatmap"]
    assert len(maps) == 1
    hot = maps[0]["z"][0][-20:]
    assert all(level is not None and 0.3 < level < 1 for level in hot)
    assert maps[0]["zmax"] == len(maps[0]["z"]) + 1


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_text_colours_have_a_contrast_of_four_and_a_half(colours: Any) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper = luminance(colours.paper)
    for name, colour in {**colours.text, "ink": colours.ink, "dim": colours.dim}.items():
        high, low = sorted((luminance(colour), paper), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
