"""Between the stores: what hostile texts become on the way, and a record that goes round through all three."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path

import pytest

from pairscope.selection import Selection
from telemetry.lineprotocol import printable, read
from telemetry.sample import Sample
from telemetry.store import open_store
from tests.pairscope.recordings import S, recorded, replayed
from tests.store_servers import Influxd, Victoria

MS = 10**6
START = time.time_ns() // (3600 * S) * 3600 * S - 3600 * S
"""Recent, since VictoriaMetrics keeps a month, and whole, so that a value of a few digits is one."""

VISIBLE = "\\,= \"'#abi1.-+\u200b\ufeffé中😀{}[]()$`;|<>%&*/~!?@^_:"
REFUSED = "\t\n\r\0\x7f\x85\x1b\u2028\u2066\u202e\ud800\udfff"
INJECTIONS = (
    'x"} or vector(1) or {y="',
    '\'; DROP MEASUREMENT "event"; --',
    '" OR 1=1; DROP DATABASE test; --',
    "'); DROP TABLE samples; --",
    "a,node=evil",
    'a text="b" 1\nevent,node=evil text="c" 2',
    'a",code=7i,text="b',
    "a\\",
    "\\",
    "\\\\",
    'a\\"',
    "a\\,b\\=c\\ d",
    ".*",
    "a|b",
    "(?s).+",
    "$__interval",
    "${jndi:ldap://x}",
    "<script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
    "%00",
    "\u202egnp.exe",
    "a\u2028b",
    "\ud800",
    "\x00",
    "NaN",
    "null",
    "true",
    "1i",
    "time",
    "__name__",
    "#",
    "'",
    '"',
    " ",
    "  two  ",
    "\ufeff",
    "𝕏" * 300,
    "x" * 1024,
    "中" * 5_000,
    "x" * 65_536,
    '"\\' * 32_768,
)


def hostile_texts(count: int) -> list[str]:
    """The known injections first, then chance ones."""
    chance = random.Random(11)
    texts = list(INJECTIONS)
    for place in range(count - len(texts)):
        letters = VISIBLE if place % 3 else VISIBLE + REFUSED
        texts.append("".join(chance.choices(letters, k=chance.randint(1, 12))))
    return texts


def sent(texts: list[str]) -> list[Sample]:
    """Each text as a tag's value and as a text, apart in time."""
    return [
        sample
        for place, text in enumerate(texts)
        for sample in (
            Sample("event", {"node": "n1", "kind": "xid", "subject": text}, {"code": place}, START + place * 10 * MS),
            Sample("event", {"node": "n2", "kind": "xid"}, {"text": text}, START + place * 10 * MS),
        )
    ]


def url_of(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    if kind == "sqlite":
        return f"sqlite://{folder}/{len(list(folder.iterdir()))}.db"
    made: Influxd | Victoria = request.getfixturevalue({"influxdb": "influxd", "victoriametrics": "victoria"}[kind])
    return made.new_url()


def key(sample: Sample) -> tuple[object, ...]:
    return sample.time_ns, sample.tags["node"]


@pytest.mark.server
@pytest.mark.parametrize("count", [500, pytest.param(5_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("first", "second"), [("sqlite", "influxdb"), ("influxdb", "victoriametrics"), ("victoriametrics", "sqlite")]
)
def test_hostile_texts_come_through_two_stores_the_same_or_are_refused_with_a_reason(
    first: str, second: str, count: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    texts = hostile_texts(count)
    all_sent = {key(sample): sample for sample in sent(texts)}
    path, back = tmp_path / "a.lp", tmp_path / "b.lp"
    span = Selection(START - S, START + 3600 * S, (), ("event",))
    with closing(open_store(url_of(first, tmp_path, request))) as store:
        refused = {key(entry.sample): entry.reason for entry in store.write(list(all_sent.values()))}
        recorded(store, path, span)
    held = {key(sample): sample for sample in read(path)}
    assert held == {place: sample for place, sample in all_sent.items() if place not in refused}
    with closing(open_store(url_of(second, tmp_path, request))) as store:
        done = replayed(path, store)
        recorded(store, back, span)
    arrived = {key(sample): sample for sample in read(back)}
    assert all(held[place] == sample for place, sample in arrived.items())
    assert done.bad_lines == 0 and len(arrived) + done.refused == len(held)
    assert all(refused.values()) and all(problem.reason for problem in done.problems)
    long_tag = START + texts.index("x" * 65_536) * 10 * MS, "n1"
    why = {"influxdb": "max key length exceeded", "victoriametrics": "longer than 16000 bytes"}
    assert first not in why or why[first] in refused[long_tag]
    fine = [
        place for place, s in all_sent.items() if printable(text(s)) == text(s)[:1024] and not text(s).endswith("\\")
    ]
    assert len(fine) > count / 4 and all(place in arrived for place in fine)


def text(sample: Sample) -> str:
    return str(sample.fields.get("text") or sample.tags.get("subject", ""))


def exactly_representable(place: int) -> list[Sample]:
    """One tick of every kind of value that a store holds exactly: wide ints, texts, masks, floats of up to 12 digits."""
    at = START + place * S + 123_456_789
    return [
        Sample("engine", {"node": "n1", "engine": "chat"}, {"up": 1, "tokens_per_s": 0.25 + place}, at),
        Sample(
            "event",
            {"node": "n1", "kind": "xid", "subject": "模 型"},
            {"text": f'v "{place}" \\ 中', "code": -place},
            at,
        ),
        Sample("gpu", {"gpu": "0", "node": "n1"}, {"power_w": 300.1 + place, "xid_total": 2**62 + place}, at),
        Sample("gpu", {"gpu": "1", "node": "n1"}, {"temp_c": -0.0625 * place, "throttle_reasons": 1 << place % 62}, at),
    ]


@pytest.mark.server
def test_a_record_goes_round_through_all_three_stores_and_differs_only_as_documented(
    influxd: Influxd, victoria: Victoria, tmp_path: Path
) -> None:
    exact = [sample for place in range(200) for sample in exactly_representable(place)]
    at = START + 500 * S
    digits = Sample("host", {"node": "n2"}, {"load1": 0.1234567890123456, "cpu_pct": 1 / 3}, at)
    early = Sample("host", {"node": "n3"}, {"load1": 1.0, "cpu_pct": 2.0}, at + 100)
    late = Sample("host", {"node": "n3"}, {"load1": 3.0, "iowait_pct": 4.0}, at + 900)
    span = Selection(START - S, START + 3600 * S)
    paths = [tmp_path / f"{number}.lp" for number in range(3)]
    urls = [f"sqlite://{tmp_path}/round.db", influxd.new_url(), victoria.new_url()]
    for place, (url, path) in enumerate(zip(urls, paths, strict=True)):
        with closing(open_store(url)) as store:
            if place == 0:
                assert store.write([*exact, digits, early, late]) == []
            else:
                assert replayed(paths[place - 1], store).samples == 803
            recorded(store, path, span)
    assert list(read(paths[0])) == [*exact, digits, early, late]
    assert paths[1].read_bytes() == paths[0].read_bytes()
    *same, rounded, merged = read(paths[2])
    assert same == exact and rounded.fields == pytest.approx(digits.fields, rel=5e-12) and rounded != digits
    assert merged == Sample("host", {"node": "n3"}, {"cpu_pct": 2.0, "load1": 3.0, "iowait_pct": 4.0}, at + 900)
