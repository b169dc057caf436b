"""The lengths of requests, input and output tokens: of a trace file, of traffic that was recorded, or stated ones."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pairscope.whole_file import CannotCopy
from telemetry.messages import say
from telemetry.store import Store

INPUT_NAMES = ("input_tokens", "input_length", "prompt_tokens", "prompt_len", "contexttokens", "num_prefill_tokens")
OUTPUT_NAMES = (
    "output_tokens",
    "output_length",
    "completion_tokens",
    "output_len",
    "generatedtokens",
    "num_decode_tokens",
)
"""What traces call them, in small letters: PairScope, Mooncake, OpenAI's usage, Azure's public traces, Vidur's."""

MOST_LINES = 2_000_000
MOST_LINE = 1 << 20
MOST_TOKENS = 10_000_000
KEPT = 2_000
"""Pairs that are kept of a trace, spread evenly over it, and drawn of a distribution."""

CHAT_MEDIANS = (1020.0, 129.0)
CHAT_P99 = (4142.0, 601.0)
"""Input and output of 19,366 requests of a chat service in November 2023 (Azure LLM inference trace, conversation; Patel et al.,
Splitwise, ISCA 2024).
"""

Z95, Z99 = 1.6449, 2.3263
"""Standard normal quantiles."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """(input tokens, output tokens) of requests in a fixed order; `told` says where they are from."""

    pairs: tuple[Pair, ...]
    told: str
    left_out: int = 0  # that do not fit into the model's context


def fitting(lengths: Lengths, context: int | None) -> Lengths:
    """Without those that do not fit into `context` tokens, of which a few are left for what a template adds."""
    if context is None:
        return lengths
    pairs = tuple(pair for pair in lengths.pairs if sum(pair) <= context - max(8, context // 20))
    return Lengths(pairs, lengths.told, len(lengths.pairs) - len(pairs))


def fixed(lengths: Lengths, inputs: int | None, outputs: int | None, language: str) -> Lengths:
    """One length for all instead, where it is given."""
    if inputs is None and outputs is None:
        return lengths
    pairs = tuple((inputs or one, outputs or other) for one, other in lengths.pairs)
    parts = [lengths.told] if inputs is None or outputs is None else []
    if inputs is not None:
        parts.append(say("load_sweep.lengths.inputs", language, tokens=inputs))
    if outputs is not None:
        parts.append(say("load_sweep.lengths.outputs", language, tokens=outputs))
    return Lengths(pairs, "; ".join(parts))


def usual(language: str) -> Lengths:
    """Like a chat service's: log-normal with the medians and 99th percentiles of a public trace."""
    spreads = tuple(math.log(high / middle) / Z99 for middle, high in zip(CHAT_MEDIANS, CHAT_P99, strict=True))
    told = {"inputs": CHAT_MEDIANS[0], "outputs": CHAT_MEDIANS[1]}
    return Lengths(_drawn(CHAT_MEDIANS, spreads), say("load_sweep.lengths.usual", language, **told))


def of_store(store: Store, where: Mapping[str, Sequence[str]] | None, now_ns: int, span_ns: int) -> Lengths | None:
    """Of what engines told in the last `span_ns`: log-normal with their means and 95th percentiles; None where they told none."""
    found: dict[str, list[float]] = {}
    names = ("prompt_len_mean", "prompt_len_p95", "output_len_mean", "output_len_p95")
    columns = store.range(
        "engine", names, start_ns=now_ns - span_ns, end_ns=now_ns, step_ns=span_ns // 60, aggregate="mean", where=where
    )
    for column in columns:
        found.setdefault(column.field, []).extend(value for value in column.values if value is not None and value > 0)
    if not found.get("prompt_len_mean") or not found.get("output_len_mean"):
        return None
    medians, spreads = [], []
    for kind in ("prompt", "output"):
        mean = fmean(found[f"{kind}_len_mean"])
        high = found.get(f"{kind}_len_p95")
        spread = _spread(mean, fmean(high)) if high else 0.0
        medians.append(mean * math.exp(-(spread**2) / 2))
        spreads.append(spread)
    return Lengths(_drawn(medians, spreads), "")


def of_trace(path: Path, language: str) -> Lengths:
    """CSV with a line of names, or a JSON object a line. CannotCopy, with the line, for what holds no lengths."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            pairs = list(_of_lines(path, iter(lambda: file.readline(MOST_LINE), ""), language))
    except OSError as error:
        raise CannotCopy(say("load_sweep.table.unreadable", language, path=path, reason=error.strerror)) from None
    if not pairs:
        raise CannotCopy(say("load_sweep.lengths.none", language, path=path))
    step = max(1, len(pairs) // KEPT)
    return Lengths(
        tuple(pairs[::step][:KEPT]), say("load_sweep.lengths.trace", language, path=path.name, count=len(pairs))
    )


def _of_lines(path: Path, lines: Iterator[str], language: str) -> Iterator[Pair]:
    first = next(lines, "")
    rows: Iterable[Mapping[str, object]]
    if first.lstrip().startswith("{"):
        rows = _objects(path, first, lines, language)
    else:
        rows = csv.DictReader(lines, fieldnames=next(csv.reader([first]), []))
    for number, row in enumerate(rows, 1 if first.lstrip().startswith("{") else 2):
        if number > MOST_LINES:
            raise CannotCopy(say("load_sweep.lengths.many", language, path=path, most=MOST_LINES))
        small = {str(name).strip().lower(): value for name, value in row.items()}
        pair = (_length(small, INPUT_NAMES), _length(small, OUTPUT_NAMES))
        if pair[0] is None or pair[1] is None:
            known = {"inputs": ", ".join(INPUT_NAMES), "outputs": ", ".join(OUTPUT_NAMES)}
            raise CannotCopy(say("load_sweep.lengths.line", language, path=path, line=number, **known))
        if pair[0] and pair[1]:  # traces hold requests that failed, too
            yield pair[0], pair[1]


def _objects(path: Path, first: str, lines: Iterator[str], language: str) -> Iterator[Mapping[str, object]]:
    line: str | None = first
    number = 0
    while line:
        number += 1
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = ()
        if row is not None:
            yield row if isinstance(row, dict) else {}
        line = next(lines, None)


def _length(row: Mapping[str, object], names: Sequence[str]) -> int | None:
    text = next((row[name] for name in names if name in row), None)
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    try:
        value = float(text)
    except (ValueError, OverflowError):
        return None
    return round(value) if 0 <= value <= MOST_TOKENS else None


def _spread(mean: float, p95: float) -> float:
    """Sigma of a log-normal of this mean and 95th percentile: the smaller root of p95 = mean exp(Z95 s - s^2 / 2)."""
    ratio = math.log(max(p95 / mean, 1.0))
    return Z95 - math.sqrt(max(0.0, Z95**2 - 2 * ratio))


def _drawn(medians: Sequence[float], spreads: Sequence[float]) -> tuple[Pair, ...]:
    source = random.Random(14)
    return tuple(
        (
            max(1, round(source.lognormvariate(math.log(medians[0]), spreads[0]))),
            max(1, round(source.lognormvariate(math.log(medians[1]), spreads[1]))),
        )
        for _ in range(KEPT)
    )
