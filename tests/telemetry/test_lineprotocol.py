"""Line protocol: what is written is read back the same, or refused by name; a damaged recording costs its bad lines only."""

from __future__ import annotations

import gzip
import io
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telemetry.lineprotocol import _decode_any, _decode_plain, decode, encode, encode_many, printable, read
from telemetry.sample import Sample

GPU = Sample(
    "gpu",
    {"node": "n07", "rack": "r2", "gpu": "3"},
    {"util_pct": 98.0, "throttle_reasons": 32, "energy_j": 1e16},
    1795960800000000000,
)
SEPARATORS = st.text(st.sampled_from("\\,= \"'#abc\t\n\r\0é中😀\x85\u2028"), max_size=12)
NASTY = st.one_of(SEPARATORS, st.text(max_size=20))
VALUES = st.one_of(
    st.floats(), st.integers(min_value=-(2**64), max_value=2**64), SEPARATORS, st.text(max_size=40), st.booleans()
)


def test_a_line_is_the_documented_text() -> None:
    assert encode(GPU) == (
        "gpu,gpu=3,node=n07,rack=r2 util_pct=98.0,throttle_reasons=32i,energy_j=1e+16 1795960800000000000"
    )


def test_a_design_example_reads_as_floats_ints_and_text() -> None:
    sample = decode('event,node=n07,kind=deploy,subject=chat-a text="vllm 0.31 -> 0.32, \\"new\\"",code=0i,x=7 42\n')
    assert sample == Sample(
        "event",
        {"node": "n07", "kind": "deploy", "subject": "chat-a"},
        {"text": 'vllm 0.31 -> 0.32, "new"', "code": 0, "x": 7.0},
        42,
    )
    assert isinstance(sample.fields["code"], int) and isinstance(sample.fields["x"], float)


@settings(max_examples=800, deadline=None)
@given(
    NASTY,
    st.dictionaries(NASTY, NASTY, max_size=4),
    st.dictionaries(NASTY, VALUES, max_size=4),
    st.integers(min_value=-(2**64), max_value=2**64),
)
@example("m", {"t": "a\\,b"}, {"f\\=": "\\"}, 1)
@example("m", {"t\\": "v"}, {"f": 1}, 1)
@example("m", {"t": "v\\"}, {"f": 1}, 1)
@example("#m", {}, {"f": 1}, 1)
def test_a_hostile_sample_comes_back_the_same_or_is_refused(
    measurement: str, tags: dict[str, str], fields: dict[str, float | int | str], time_ns: int
) -> None:
    sample = Sample(measurement, tags, fields, time_ns)
    try:
        line = encode(sample)
    except ValueError:
        return
    assert "\n" not in line and "\r" not in line
    back = decode(line)
    assert back == Sample(measurement, {k: v for k, v in tags.items() if v}, fields, time_ns)
    assert {k: type(v) for k, v in back.fields.items()} == {k: type(v) for k, v in fields.items()}


@settings(max_examples=1000, deadline=None)
@given(st.one_of(st.text(max_size=80), st.text(st.sampled_from('m,=t1i "\\x.e-'), max_size=40)))
def test_any_text_is_a_sample_or_a_value_error(text: str) -> None:
    try:
        sample = decode(text)
    except ValueError:
        return
    assert sample.fields and all(not isinstance(v, float) or math.isfinite(v) for v in sample.fields.values())


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (Sample("gpu", {"node": "a\nb"}, {"x": 1}, 1), "node"),
        (Sample("gpu", {"node": "a\\"}, {"x": 1}, 1), "backslash"),
        (Sample("gpu", {}, {"temp_c": math.nan}, 1), "temp_c"),
        (Sample("gpu", {}, {"temp_c": -math.inf}, 1), "temp_c"),
        (Sample("gpu", {}, {"xid_total": 2**63}, 1), "xid_total"),
        (Sample("gpu", {}, {"text": "a\x00"}, 1), "text"),
        (Sample("gpu", {}, {"up": True}, 1), "up"),
        (Sample("gpu", {}, {"time": 1}, 1), "time"),
        (Sample("gpu", {}, {}, 1), "no fields"),
        (Sample("gpu", {}, {"x": 1}, 2**63), "time"),
        (Sample("", {}, {"x": 1}, 1), "measurement"),
    ],
)
def test_a_refusal_names_the_thing(sample: Sample, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        encode(sample)


def test_printable_text_is_always_taken() -> None:
    text = printable("line one\nline two\x1b[0m \ud800")
    assert decode(encode(Sample("event", {}, {"text": text}, 1))).fields["text"] == "line one line two [0m  "


def test_printable_text_reads_in_one_direction_and_on_one_line() -> None:
    assert printable("psu\u202e1 ok\u2066\u2028x\u2029") == "psu 1 ok  x "
    assert printable("内存 é \u05d0\u200d🙂") == "内存 é \u05d0\u200d🙂"


@pytest.mark.parametrize(
    "line",
    ["m x=1", "m x=1 1.5", "m x= 1", "m, x=1 1", "m x=1,y 1", "m x=nan 1", "m x=1_0 1", "m x=１ 1", "m x=1e999 1"],
)
def test_half_a_line_is_not_a_sample(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(line)


def test_a_recording_yields_the_good_lines_and_reports_the_bad_by_number(tmp_path: Path) -> None:
    good = encode_many([GPU])
    path = tmp_path / "day.lp"
    path.write_bytes(b"# comment\n" + good.encode() + b"\ngarbage\n\xff\xfe x=1 1\n" + good.encode().rstrip())
    recording = read(path)
    assert list(recording.samples) == [GPU, GPU]
    assert [problem.line for problem in recording.problems] == [4, 5]
    assert recording.bad_lines == 2


def test_a_recording_may_be_packed_or_an_open_file(tmp_path: Path) -> None:
    text = encode_many([GPU] * 3)
    packed = tmp_path / "day.lp.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert list(read(packed)) == list(read(io.BytesIO(text.encode()))) == list(read(io.StringIO(text))) == [GPU] * 3


def test_an_endless_line_is_one_problem_and_the_next_line_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.lineprotocol.Recording.MAX_LINE_BYTES", 100)
    recording = read(io.BytesIO(b"x" * 1050 + b"\nm v=1i 5\n"))
    assert list(recording) == [Sample("m", {}, {"v": 1}, 5)]
    assert recording.bad_lines == 1


PLAIN = st.text(st.sampled_from('mt,=1i.e-+ 9"a"'), max_size=24)


@settings(max_examples=500, deadline=None)
@given(PLAIN, PLAIN)
@example("", '1,t="a, b=2 3"')
@example(',t="x"', '"",t="')
def test_the_quick_reading_of_a_plain_line_is_the_careful_one(head: str, body: str) -> None:
    for line in (f"m{head} f={body} 12", f"{head} {body} 7", f"m f=1,g={body},h=2i 9"):
        quick = _decode_plain(line)
        if quick is not None:
            assert quick == _decode_any(line)


def test_a_plain_line_is_read_quickly() -> None:
    assert _decode_plain(encode(GPU)) == GPU
