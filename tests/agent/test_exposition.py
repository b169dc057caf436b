"""The parser keeps every intact line of whatever it is given, takes only what a number can be, and never more than its limits."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import exposition
from agent.exposition import Reader, TooLarge, Unreadable, inflate, parse


def test_names_labels_and_values_are_read() -> None:
    read = parse(
        "# HELP x what\n# TYPE x gauge\n"
        "x 3\n"
        'y_total{b="2", a="1",} 7.5e1 1796000000000\n'
        '  z { model = "a \\"b\\" \\\\ c\\nd" } -.5\r\n'
        "a:b_c{} +1.\n"
    )
    assert read.series == {
        "x": {(): 3.0},
        "y_total": {(("a", "1"), ("b", "2")): 75.0},
        "z": {(("model", 'a "b" \\ c\nd'),): -0.5},
        "a:b_c": {(): 1.0},
    }
    assert (read.samples, read.bad_lines, read.duplicates) == (4, 0, 0)


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "x ",
        "x one",
        "x 1_000",
        "x １２",
        "x 0x10",
        "x 1 2 3",
        "x 1 later",
        "1x 3",
        "x-y 3",
        'x{a="1" 3',
        'x{a="1"} ',
        "x{a=1} 3",
        'x{a="1",,b="2"} 3',
        'x{a="1"b="2"} 3',
        'x{a="1",a="2"} 3',
        'x{="1"} 3',
        'x{a="unclosed} 3',
        'x{a="1"}} 3',
        "x{ 3",
        "x" * 200 + " 3",
        'x{a="' + "v" * 2000 + '"} 3',
        "x{" + ",".join(f'l{n}="v"' for n in range(65)) + "} 3",
        "x " + "9" * 100,
        '{"quoted.name"} 3',
    ],
)
def test_a_bad_line_costs_that_line_only(line: str) -> None:
    read = parse(f"before 1\n{line}\nafter 2\n")
    assert read.bad_lines == 1
    assert read.series == {"before": {(): 1.0}, "after": {(): 2.0}}


def test_invalid_utf8_costs_its_line_only() -> None:
    read = parse(b'before 1\nx{a="\xff\xfe"} 1\nafter 2\n')
    assert (sorted(read.series), read.bad_lines) == (["after", "before"], 1)


@pytest.mark.parametrize("word", ["NaN", "nan", "-nan", "+Inf", "-Inf", "inf", "Infinity", "1e999", "-1e999"])
def test_nan_and_infinity_are_no_values(word: str) -> None:
    read = parse(f"x {word}\ny 1\n")
    assert "x" not in read.series
    assert (read.without_value, read.bad_lines) == (1, 0)


def test_of_duplicate_series_the_last_wins_and_is_counted() -> None:
    read = parse('x{a="1",b="2"} 1\nx{b="2",a="1"} 5\n')
    assert read.series["x"] == {(("a", "1"), ("b", "2")): 5.0}
    assert (read.samples, read.duplicates) == (1, 1)


@pytest.mark.parametrize(
    ("stamp", "kept"), [(0, False), (-5, False), (1_796_000_000_000, True), (9_999_999_999_999, False)]
)
def test_a_sample_of_another_time_is_not_of_now(stamp: int, kept: bool) -> None:
    read = parse(f"x 1 {stamp}\n", now_ms=1_796_000_100_000)
    assert ("x" in read.series) is kept
    assert read.outdated == (0 if kept else 1)


def test_an_exemplar_is_no_part_of_the_sample() -> None:
    read = parse('x_bucket{le="1"} 5 # {trace_id="a}b"} 0.3 1796000000.123\ny 2 # {t="1"} 3\n')
    assert read.series == {"x_bucket": {(("le", "1"),): 5.0}, "y": {(): 2.0}}


def test_a_label_value_may_hold_braces_and_spaces() -> None:
    assert parse('x{a="} 5 # {"} 7\n').series == {"x": {(("a", "} 5 # {"),): 7.0}}


def test_a_line_without_end_is_dropped_without_being_held() -> None:
    reader = Reader()
    reader.feed(b"a 1\nb")
    for _ in range(64):
        reader.feed(b"x" * 65536)
        assert len(reader._rest) <= exposition.LINE_LIMIT_BYTES
    reader.feed(b" 9\nc 3\n")
    read = reader.close()
    assert (read.series, read.bad_lines) == ({"a": {(): 1.0}, "c": {(): 3.0}}, 1)


def test_no_more_samples_than_the_limit_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "SAMPLE_LIMIT", 10)
    read = parse("".join(f"x{n} 1\n" for n in range(25)))
    assert (read.samples, read.over_limit) == (10, 15)


def test_the_same_lines_over_and_over_end_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "LINES_LIMIT", 100)
    read = parse("# a comment\n" * 500 + "x 1\n" * 130)
    assert (read.samples, read.duplicates, read.over_limit) == (1, 99, 30)


def mutated(text: str, dice: random.Random) -> tuple[str, set[str]]:
    """The text with some lines damaged; and the lines that are still as they were."""
    lines = text.splitlines()
    damaged = set(dice.sample(range(len(lines)), dice.randint(1, 6)))
    made = []
    for number, line in enumerate(lines):
        if number in damaged:
            cut = dice.randint(0, len(line))
            noise = "".join(
                chr(dice.choice([0, 9, 34, 44, 61, 92, 123, 125, 32, 0x660, 0xFF11, 120])) for _ in range(5)
            )
            line = dice.choice([line[:cut], line[:cut] + noise + line[cut:], line[cut:] + line[:cut], noise * 50])
        made.append(line)
    return "\n".join(made), {line for number, line in enumerate(lines) if number not in damaged}


def test_every_intact_line_of_a_damaged_text_is_kept() -> None:
    whole = "".join(
        f'vllm:family_{n}_bucket{{engine="0",le="{bound}",model_name="org/M"}} {n * 100 + bound}\n'
        for n in range(8)
        for bound in range(5)
    )
    dice = random.Random(20)
    for _ in range(1000):
        text, intact = mutated(whole, dice)
        read = parse(text)
        for line in intact:
            expected = parse(line)
            name, series = next(iter(expected.series.items()))
            labels, value = next(iter(series.items()))
            # a damaged line may have become a duplicate of an intact one; else the value is exactly there
            assert read.series[name][labels] == value or read.duplicates


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200)))
def test_any_bytes_are_read_without_an_error_and_alike_in_any_pieces(pieces: list[bytes]) -> None:
    reader = Reader()
    for piece in pieces:
        reader.feed(piece)
    assert reader.close() == parse(b"".join(pieces))


LABEL_VALUE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=20)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True), LABEL_VALUE, max_size=5),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_written_by_the_rules_is_read_back(labels: dict[str, str], value: float) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"')

    block = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
    assert parse(f"x{{{block}}} {value!r}\n").series == {"x": {tuple(sorted(labels.items())): value}}


def pieces_of(body: bytes, size: int = 4096) -> Iterator[bytes]:
    return (body[start : start + size] for start in range(0, len(body), size))


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("", bytes), ("identity", bytes), ("gzip", gzip.compress), ("deflate", zlib.compress), (" GZIP ", gzip.compress)],
)
def test_a_body_is_inflated_by_its_encoding(encoding: str, pack: object) -> None:
    body = b"x 1\n" * 50_000
    assert b"".join(inflate(pieces_of(pack(body)), encoding)) == body  # type: ignore[operator]


def test_a_gzip_bomb_ends_at_the_limit() -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    assert len(bomb) < 300_000
    taken = 0
    with pytest.raises(TooLarge, match="16 MiB when inflated"):
        for piece in inflate(pieces_of(bomb), "gzip"):
            assert len(piece) <= 65536
            taken += len(piece)
    assert taken <= exposition.INFLATED_LIMIT_BYTES


def test_an_endless_raw_body_ends_at_the_limit() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1 << 16)

    with pytest.raises(TooLarge, match="16 MiB"):
        for _ in inflate(endless(), ""):
            pass


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(b"not gzip at all", "gzip"), (gzip.compress(b"x 1\n" * 99)[:-9], "gzip"), (b"x 1", "br"), (b"x 1", "gzip, gzip")],
)
def test_a_broken_or_unknown_encoding_is_named(body: bytes, encoding: str) -> None:
    with pytest.raises(Unreadable, match=r"gzip|not supported"):
        list(inflate([body], encoding))


def test_the_timestamp_of_a_sample_is_kept_in_milliseconds() -> None:
    now_ms = 1_796_000_000_000
    read = parse(f'a{{i="1"}} 5 {now_ms - 7000}\na{{i="2"}} 6\nb 7 {now_ms / 1000 - 2.5}\n', now_ms)
    assert read.stamps_ms == {"a": {(("i", "1"),): now_ms - 7000}, "b": {(): now_ms - 2500}}
