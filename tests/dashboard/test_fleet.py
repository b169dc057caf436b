"""The fleet now: who is a pair, what is fresh, who is shown first, and how the map and the table tell it."""

from __future__ import annotations

import sys

from dashboard.fleet import Fleet, PairNow, read_fleet
from dashboard.fleet_map import cpu_hosts, fleet_map, gpu_count, has_map
from dashboard.fleet_table import columns, rows
from dashboard.selection import SECOND_NS, PairKey, Selection
from dashboard.view import first_pair, named_pair
from telemetry.sample import Sample
from telemetry.store import Store

scene = sys.modules["scene"]
NOW = 1_767_225_600 * SECOND_NS
HOT = scene.Incident(NOW - 300 * SECOND_NS, NOW + 10**15)


def fleet_of(store: Store, samples: list[Sample], now: int = NOW) -> Fleet:
    store.write(samples)
    return read_fleet(store, now, forget_s=3600, stale_s=15)


def two_nodes(**options: bool) -> list[Sample]:
    start = NOW - 6 * SECOND_NS
    found: list[Sample] = []
    for node, incident in (("n1", HOT), ("n2", scene.NONE)):
        found += scene.gpu_pair(node, "chat-a", (0, 1), start, NOW, incident, **options)
        found += scene.gpu_pair(node, "chat-b", (2, 3), start, NOW, **options)
        subject = scene.tags_of(node) | {"engine": "chat-a"}
        found += scene.verdicts(subject, NOW - 5 * SECOND_NS, NOW, incident)
    return found


def test_an_engine_with_its_gpus_is_a_pair(store: Store) -> None:
    pair = fleet_of(store, two_nodes()).pairs[PairKey("n1", "chat-a")]
    assert pair.gpus == ("0", "1")
    assert pair.model == "qwen2-7b"
    assert pair.output_pct is not None and 60 < pair.output_pct < 80
    assert pair.clock_mhz is not None and pair.clock_mhz < 1600
    assert pair.cause == "thermal"


def test_an_engine_that_names_no_gpus_has_those_that_nobody_names(store: Store) -> None:
    engine = {"node": "n1", "engine": "e", "kind": "vllm", "model": "m"}
    gpus = [
        Sample("gpu", {"node": "n1", "gpu": str(i), "uuid": f"u{i}"}, {"temp_c": 50.0 + i}, NOW) for i in (10, 9, 2)
    ]
    fleet = fleet_of(store, [Sample("engine", engine, {"up": 1}, NOW), *gpus])
    assert fleet.pairs[PairKey("n1", "e")].gpus == ("2", "9", "10")
    assert list(fleet.pairs) == [PairKey("n1", "e")]


def test_a_host_without_an_engine_is_a_pair_of_its_own(store: Store) -> None:
    fleet = fleet_of(store, [Sample("host", {"node": "n1"}, {"cpu_pct": 5.0}, NOW)])
    assert fleet.pairs[PairKey("n1")].util_pct == 5.0
    assert fleet.pairs[PairKey("n1")].effort == "cpu"


def test_gpus_that_no_engine_uses_are_shown_with_the_node(store: Store) -> None:
    samples = [*scene.gpu_pair("n1", "e", (0,), NOW - SECOND_NS, NOW)]
    samples += [Sample("gpu", {"node": "n1", "gpu": "7", "uuid": "u7"}, {"temp_c": 40.0}, NOW - SECOND_NS)]
    fleet = fleet_of(store, samples)
    assert fleet.pairs[PairKey("n1")].gpus == ("7",)
    assert fleet.pairs[PairKey("n1", "e")].gpus == ("0",)


def test_stale_readings_are_no_readings(store: Store) -> None:
    pair = fleet_of(store, two_nodes(), NOW + 60 * SECOND_NS).pairs[PairKey("n1", "chat-a")]
    assert (pair.output_pct, pair.tokens_per_s, pair.temp_c, pair.kv_pct) == (None, None, None, None)
    assert 60 <= pair.age_s(NOW + 60 * SECOND_NS) < 63


def test_a_pair_that_has_been_silent_too_long_is_forgotten(store: Store) -> None:
    assert fleet_of(store, two_nodes(), NOW + 7200 * SECOND_NS).pairs == {}


def test_a_renamed_model_is_not_a_second_pair(store: Store) -> None:
    start = NOW - 10 * SECOND_NS
    samples = [*scene.gpu_pair("n1", "e", (0,), start, NOW - 5 * SECOND_NS, model="old")]
    samples += scene.gpu_pair("n1", "e", (0,), NOW - 5 * SECOND_NS, NOW, model="new")
    assert [pair.model for pair in fleet_of(store, samples).pairs.values()] == ["new"]


def test_the_worst_pair_is_shown_to_a_viewer_who_names_nobody(store: Store) -> None:
    first = first_pair(fleet_of(store, two_nodes()))
    assert first is not None and first.key == PairKey("n1", "chat-a")


def test_an_address_that_names_only_a_node_gets_that_nodes_worst_pair() -> None:
    good, bad, other = PairKey("n1", "a"), PairKey("n1", "b"), PairKey("n2", "c")
    outputs = {good: 99.0, bad: 60.0, other: 20.0}
    fleet = Fleet(NOW, {key: PairNow(key, NOW, output_pct=output) for key, output in outputs.items()})
    found = named_pair(fleet, PairKey("n1"))
    assert found is not None and found.key == bad
    assert named_pair(fleet, PairKey("n1", "gone")) is None
    assert named_pair(fleet, PairKey("n3")) is None


def test_a_healthy_real_engine_comes_before_a_healthy_simulated_one() -> None:
    real, made = PairKey("z", "e"), PairKey("a", "e")
    pairs = {
        real: PairNow(real, NOW, output_pct=100.0),
        made: PairNow(made, NOW, output_pct=97.0, simulated=True),
    }
    first = first_pair(Fleet(NOW, pairs))
    assert first is not None and first.key == real


def test_the_table_is_worst_first_and_leaves_unknown_cells_empty(store: Store) -> None:
    fleet = fleet_of(store, [*two_nodes(), Sample("host", {"node": "n0"}, {"cpu_pct": 5.0}, NOW)])
    table = rows(fleet, PairKey("n2", "chat-a"), "en", 15)
    assert (table[0]["node"], table[0]["engine"], table[0]["verdict"]) == ("n1", "chat-a", "Thermal throttling")
    assert table[-1]["node"] == "n0"
    assert table[-1]["tokens"] is None
    assert [row["id"] for row in table if row["selected"]] == ["n2\x1fchat-a"]
    assert {column["field"] for column in columns("en")} <= set(table[0])


def test_a_silent_pair_says_so_in_the_table(store: Store) -> None:
    fleet = fleet_of(store, two_nodes(), NOW + 120 * SECOND_NS)
    assert all(row["verdict"].startswith("silent for 2 min") and row["silent"] for row in rows(fleet, None, "en", 15))


def test_simulated_pairs_are_badged_in_each_row_and_real_ones_are_not(store: Store) -> None:
    start = NOW - 2 * SECOND_NS
    samples = [
        *scene.gpu_pair("n1", "e", (0,), start, NOW, simulated=True),
        *scene.gpu_pair("n2", "e", (0,), start, NOW),
    ]
    badges = {row["node"]: row["simulated"] for row in rows(fleet_of(store, samples), None, "en", 15)}
    assert badges == {"n1": "SIMULATED", "n2": ""}


def test_the_map_shows_gpus_by_node_and_leaves_silent_ones_grey(store: Store) -> None:
    fleet = fleet_of(store, two_nodes())
    figure = fleet_map(fleet, Selection(), PairKey("n1", "chat-a"), 15)
    cells = figure["data"][0]["z"]
    assert len(cells) == 4 and len(cells[0]) == 2
    assert cells[0][0] == cells[1][0] < 80 < cells[2][0]
    late = fleet_map(read_fleet(store, NOW + 60 * SECOND_NS, forget_s=3600, stale_s=15), Selection(), None, 15)
    assert all(cell is None for line in late["data"][0]["z"] for cell in line)
    assert len([shape for shape in late["layout"]["shapes"] if shape["fillcolor"] != "rgba(0,0,0,0)"]) == 4


def test_a_host_without_a_gpu_is_counted_as_a_host_and_has_no_gpu_cells(store: Store) -> None:
    start = NOW - 6 * SECOND_NS
    samples = [*two_nodes(), *scene.cpu_pair("n3", "e", start, NOW), *scene.cpu_pair("n3", "f", start, NOW)]
    fleet = fleet_of(store, samples)
    assert (gpu_count(fleet), cpu_hosts(fleet)) == (8, ["n3"])
    figure = fleet_map(fleet, Selection(), None, 15)
    layout, cells = figure["layout"], figure["data"][0]["z"]
    assert layout["yaxis"]["ticktext"] == ["0", "1", "2", "3", "CPU", "CPU 2"]
    assert [[level is not None for level in line] for line in cells] == [[False, True, True]] * 4 + [
        [True, False, False]
    ] * 2
    assert layout["shapes"] == []
    assert "GPU" not in figure["data"][0]["text"][4][0]


def test_the_map_is_centred_on_what_is_expected() -> None:
    from dashboard.palette import DARK, LIGHT

    for colours in (LIGHT, DARK):
        assert any(abs(stop - (100 - 60) / (120 - 60)) < 0.001 for stop, _ in colours.scale)


def test_a_single_node_has_no_map() -> None:
    key = PairKey("n1", "e")
    assert not has_map(Fleet(NOW, {key: PairNow(key, NOW)}))


def test_without_gpus_the_map_has_a_row_for_each_engine(store: Store) -> None:
    start = NOW - 6 * SECOND_NS
    samples = [
        *scene.cpu_pair("n1", "a", start, NOW),
        *scene.cpu_pair("n1", "b", start, NOW),
        *scene.cpu_pair("n2", "a", start, NOW),
    ]
    figure = fleet_map(fleet_of(store, samples), Selection(), None, 15)
    assert [len(line) for line in figure["data"][0]["z"]] == [2, 2]
    assert figure["data"][0]["z"][1][1] is None


def test_hostile_names_are_text_in_the_map(store: Store) -> None:
    start = NOW - 2 * SECOND_NS
    samples = [s for node in ("<b>x</b>", "n2") for s in scene.gpu_pair(node, "<i>", (0,), start, NOW)]
    figure = fleet_map(fleet_of(store, samples), Selection(), None, 15)
    assert figure["layout"]["xaxis"]["ticktext"][0] == "&lt;b&gt;x&lt;/b&gt;"
    assert "<i>" not in figure["data"][0]["text"][0][0]
