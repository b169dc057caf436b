"""A signals file is read whole or refused in one line that names the key; what is unknown is named and not used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rules.signals.keys import KEYS
from rules.signals.reading import MOST_INCIDENTS, MOST_KEYS, SignalsError, near, parse, read_signals


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "told.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"tps_ratio": "fast"}, "tps_ratio should be a number, not a text"),
        ({"p2p": "PHB"}, "p2p should be true or false, not a text"),
        ({"xid": {"code": 79}}, "xid should be a list of numbers, not an object"),
        ({"flags": [3]}, "flags should be a list of the words (sw_power_cap"),
        ({"peers_affected": "many"}, "peers_affected should be one of the words (none, one, some, all), not a text"),
        ({"kv_used_kind": 7}, "kv_used_kind should be one of the words"),
        ({"rank_util": [90, "x"]}, "rank_util should be a list of numbers"),
        ({"nccl_transport": ["socket"]}, "nccl_transport should be a text"),
        ([1], "an incident is an object of signals"),
        ("text", "an incident is an object of signals"),
    ],
)
def test_a_wrong_type_is_one_line_that_names_the_key_and_what_it_should_be(told: object, words: str) -> None:
    with pytest.raises(SignalsError) as error:
        parse(told)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_of_a_list_the_line_names_the_incident(tmp_path: Path) -> None:
    with pytest.raises(SignalsError, match="incident 2: tps_ratio should be"):
        read_signals(written(tmp_path, '[{"tps_ratio": 1}, {"tps_ratio": []}]'))


def test_unknown_keys_and_reasons_are_named_and_nothing_else_is_lost() -> None:
    told = parse({"tps_rato": 0.5, "x\x1b[31m\ny": 1, "flags": ["hw_thermal", "moon"], "tps_ratio": 0.7})
    assert [name for name in told.unknown if "\n" in name or "\x1b" in name] == []
    assert len(told.unknown) == 3 and "flags: moon" in told.unknown
    assert told.numbers == {"tps_ratio": 0.7} and told.reasons == {"hw_thermal"}
    assert near("tps_rato") == "tps_ratio" and near("banana") is None


@pytest.mark.parametrize(
    ("printed", "meant"),
    [
        (["HW Slowdown", "HW Thermal Slowdown"], {"hw_slowdown", "hw_thermal"}),
        (["SW Power Cap: Active", "HW Power Brake Slowdown : Not Active"], {"sw_power_cap"}),
        (["clocks_event_reasons.sw_thermal_slowdown", "clocks_throttle_reasons.gpu_idle"], {"sw_thermal"}),
        ("nvmlClocksEventReasonHwPowerBrakeSlowdown", {"hw_power_brake"}),
        (["Sync Boost"], set()),
        (["moon"], None),
    ],
    ids=["smi", "smi with its state", "query", "header", "harmless", "not understood: nothing is known"],
)
def test_reasons_are_understood_as_tools_print_them(printed: object, meant: object) -> None:
    assert parse({"flags": printed}).reasons == meant


def test_a_key_may_be_written_with_capitals_blanks_and_hyphens() -> None:
    told = parse({"TPS-ratio": 0.4, " util pct ": 91, "tps_ratio_": 1})
    assert told.numbers == {"tps_ratio": 0.4, "util_pct": 91.0} and told.unknown == ("tps_ratio_",)


def test_a_count_says_that_a_thing_is_so_and_null_says_nothing() -> None:
    told = parse(
        {"cgroup_throttled": 31, "orphan_gpu_pid": 0, "ecc_uncorrectable": True, "util_pct": None, "kv_pct": "N/A"}
    )
    assert told.flags == {"cgroup_throttled": True, "orphan_gpu_pid": False}
    assert told.numbers == {"ecc_uncorrectable": 1.0}


def test_one_code_is_a_list_of_one_and_a_deploy_may_be_told_in_words() -> None:
    told = parse({"xid": 79, "deploy_event": "0.31 -> 0.32"})
    assert told.lists["xid"] == (79.0,) and told.flags["deploy_event"]


@pytest.mark.parametrize("value", [-1, 250, 1e300, 10**400, 2**63 - 1])
def test_a_reading_that_nothing_can_have_is_kept_apart(value: float) -> None:
    told = parse({"util_pct": value})
    assert told.impossible == ("util_pct",) and not told.numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        b"\xff\xfe\x00",
        '{"tps_ratio": NaN}',
        '{"tps_ratio": Infinity}',
        "[" * 100_000,
        '{"tps_ratio": ' + "9" * 10_000 + "}",
        json.dumps([{}] * (MOST_INCIDENTS + 1)),
        json.dumps({f"k{i}": 1 for i in range(MOST_KEYS + 1)}),
        json.dumps({"rank_util": [1] * 5000}),
        " " * (9 * 2**20),
        '{"temp_c": 50, "temp_c": 95}',
    ],
    ids=["empty", "half", "bytes", "nan", "infinity", "deep", "long number", "many", "keys", "list", "huge", "twice"],
)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(SignalsError) as error:
        read_signals(written(tmp_path, text))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SignalsError, match=r"none\.json can't be read"):
        read_signals(tmp_path / "none.json")


def test_a_list_is_read_as_one_and_so_is_an_object_with_a_mark_of_its_order(tmp_path: Path) -> None:
    listed, many = read_signals(written(tmp_path, '[{}, {"id": "night"}, null]'))
    assert many and [told.name for told in listed] == ["1", "night", "3"]
    (one,), many = read_signals(written(tmp_path, b"\xef\xbb\xbf{}"))
    assert not many and one.empty


def test_bounds_of_every_key_hold_its_ordinary_values() -> None:
    assert all(key.low < key.high for key in KEYS.values())
    assert all(KEYS[name].high >= 100 for name in KEYS if name.endswith("_pct"))
