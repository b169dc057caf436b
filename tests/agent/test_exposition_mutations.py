"""Whatever happens to an exposition on its way, nothing crashes or takes long, every intact line is kept, and a bomb costs little."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable

import pytest

from agent.collectors.dialects.registry import detect
from agent.collectors.engine_readings import EngineReadings, configuration
from agent.exposition import LINE_LIMIT_BYTES, Exposition, parse
from tests.doubles.engine_texts.dynamo import worker
from tests.doubles.engine_texts.llamacpp import llamacpp, quoted
from tests.doubles.engine_texts.lmdeploy import lmdeploy
from tests.doubles.engine_texts.pairscope import pairscope
from tests.doubles.engine_texts.ray import ray_vllm
from tests.doubles.engine_texts.sglang import sglang
from tests.doubles.engine_texts.tgi import tgi
from tests.doubles.engine_texts.triton import triton
from tests.doubles.engine_texts.trtllm import trtllm
from tests.doubles.engine_texts.vllm import vllm

LIMIT_S = 0.2

TEXTS = [
    text.encode()
    for text in (
        *(pairscope(), vllm(), sglang(), tgi(), llamacpp(), lmdeploy(), trtllm(), triton(), ray_vllm(), worker(vllm())),
    )
] + [quoted(llamacpp())]

JUNK = (
    "{",
    "}",
    '"',
    "\\",
    ",",
    "=",
    "#",
    " ",
    "\t",
    "\x00",
    "\u0660",
    "\uff11",
    "\ud7ff",
    "\U0001f600",
    "\u2028",
    "\x85",
)
HUGE = (
    "1e999",
    "-1e308",
    "9" * 63,
    "9" * 400,
    "1e-400",
    "0x1p5",
    "1_0",
    "+Inf",
    "NaN",
    "1e",
    "--1",
    "\u0661",
    "18446744073709551616",
)

Mutation = Callable[[bytes, random.Random], bytes]


def flipped(line: bytes, dice: random.Random) -> bytes:
    made = bytearray(line or b" ")
    for _ in range(dice.randint(1, 4)):
        made[dice.randrange(len(made))] ^= 1 << dice.randrange(8)
    return bytes(made)


def cut(line: bytes, dice: random.Random) -> bytes:
    return line[: dice.randint(0, len(line))]


def doubled(line: bytes, dice: random.Random) -> bytes:
    return b"\n".join([line] * dice.randint(2, 4))


def with_junk(line: bytes, dice: random.Random) -> bytes:
    at = dice.randint(0, len(line))
    return line[:at] + "".join(dice.choices(JUNK, k=dice.randint(1, 12))).encode() + line[at:]


def with_labels(line: bytes, dice: random.Random) -> bytes:
    labels = ",".join(f'l{n}="{dice.choice(JUNK)}"' for n in range(dice.randint(1, 90)))
    return line.replace(b"{", b"{" + labels.encode() + b",", 1)


def with_a_huge_number(line: bytes, dice: random.Random) -> bytes:
    return line.rpartition(b" ")[0] + b" " + dice.choice(HUGE).encode()


def long(line: bytes, dice: random.Random) -> bytes:
    return line + dice.choice([b"x", b'"', b"\\", b"{", b"} 1 ", b'a="",', b"\x80", b" "]) * dice.choice(
        [5_000, 90_000]
    )


def torn(line: bytes, dice: random.Random) -> bytes:
    at = dice.randint(0, len(line))
    return line[:at] + dice.choice([b"\n", b"\r", b"\r\n", b"\n\n\n"]) + line[at:]


MUTATIONS: tuple[Mutation, ...] = (
    flipped,
    flipped,
    cut,
    doubled,
    with_junk,
    with_labels,
    with_a_huge_number,
    long,
    torn,
)


def mutated(text: bytes, dice: random.Random) -> tuple[bytes, list[bytes], list[bytes]]:
    """The damaged text, the lines that are as they were, and what became of the others."""
    lines = text.split(b"\n")
    damaged = set(dice.sample(range(len(lines)), min(len(lines), dice.randint(1, 8))))
    made = [dice.choice(MUTATIONS)(line, dice) if n in damaged else line for n, line in enumerate(lines)]
    if dice.random() < 0.1:  # the connection ends early
        kept = dice.randrange(len(made))
        made[kept:] = [cut(made[kept], dice)]
        damaged.add(kept)
    intact = [line for n, line in enumerate(made) if n not in damaged]
    return b"\n".join(made), intact, [line for n, line in enumerate(made) if n in damaged]


def values(exposition: Exposition) -> dict[object, float]:
    return {(name, labels): value for name, own in exposition.series.items() for labels, value in own.items()}


@pytest.mark.parametrize("count", [1_500, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_damaged_exposition_costs_its_damaged_lines_only(count: int) -> None:
    dice = random.Random(count)
    readings: dict[str, EngineReadings] = {}
    kept = 0
    for number in range(count):
        whole = dice.choice(TEXTS)
        text, intact, damaged = mutated(whole, dice)
        began_s = time.thread_time()
        read = parse(text, 1_796_000_000_000)
        dialect = detect(read)
        if dialect is not None:
            plain = dialect.plain(read)
            dialect.model(plain)
            configuration(dialect, plain)
            own = readings.setdefault(dialect.kind, EngineReadings(dialect))
            own.read(plain, 100.0 + number, 1_796_000_000.0)
        assert time.thread_time() - began_s < LIMIT_S, text[:400]
        if whole.startswith(b'"'):
            continue  # one string in quotes is one line
        found, expected = values(read), values(parse(b"\n".join(intact)))
        spoken = values(parse(b"\n".join(damaged))).keys()
        assert expected.keys() <= found.keys(), text[:400]
        assert {key: found[key] for key in expected.keys() - spoken} == {
            key: expected[key] for key in expected.keys() - spoken
        }
        kept += len(expected)
    assert kept > count * 20


def test_a_quote_at_the_very_beginning_costs_that_line_only() -> None:
    text = vllm().encode()
    first, _, rest = text.partition(b"\n")
    assert values(parse(b'"' + text)) == values(parse(rest))
    assert values(parse(b"[" + text)) == values(parse(rest))
    assert first


MEASURE = """
import sys
from agent.exposition import Reader, TooLarge, inflate
def high_kib():
    # of this process image alone: getrusage() would count what the parent had
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
body = sys.stdin.buffer.read()
before = high_kib()
reader = Reader()
try:
    for piece in inflate((body[at:at + 65536] for at in range(0, len(body), 65536)), sys.argv[1]):
        reader.feed(piece)
except TooLarge:
    pass
reader.close()
if len(sys.argv) > 2:
    held = bytearray(int(sys.argv[2]))
print(high_kib() - before)
"""


def grown_mib(body: bytes, encoding: str, *more: str) -> float:
    command = [sys.executable, "-c", MEASURE, encoding, *more]
    return int(subprocess.run(command, input=body, capture_output=True, check=True, timeout=240).stdout) / 1024


def packed(unit: bytes, mebibytes: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = unit * ((1 << 20) // len(unit))
    return b"".join(packer.compress(block) for _ in range(mebibytes)) + packer.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("first", "unit"),
    [
        (b"", b"\0"),
        (b"", b"a 1\n"),
        (b'"', b"x"),
        (b"[", b"[" * 8),
        (b"", b"\n"),
        (b"", b'a{b="c"} 1\n'),
        (b"", b'"\\n'),
    ],
    ids=["zeros", "samples", "quoted", "list", "empty lines", "labels", "escapes"],
)
def test_a_bomb_of_a_thousand_to_one_costs_less_than_32_mib(first: bytes, unit: bytes) -> None:
    bomb = packed(first + unit * 4095, 18)
    assert len(bomb) < (18 << 20) / 200
    assert grown_mib(bomb, "gzip") < 32


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_the_measure_of_memory_sees_what_is_held() -> None:
    assert grown_mib(b"", "", str(64 << 20)) > 60


def test_a_line_beyond_the_limit_is_left_out_and_its_neighbours_are_not() -> None:
    text = b"a 1\nb" + b"x" * (LINE_LIMIT_BYTES + 1) + b" 2\nc 3"
    assert values(parse(text)) == {("a", ()): 1.0, ("c", ()): 3.0}
