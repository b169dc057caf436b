"""One sweep, as people like to read it: grouped by thing, titles and units, masks and states in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from agent.sweep import Sweep
from pairscope.doctor import findings_table
from telemetry import catalogue
from telemetry.catalogue import GPU_STATES, RECOVERY_ACTIONS, REDUNDANCY_STATES, Kind, unit_of
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.pairs import THROTTLE_REASONS
from telemetry.sample import Sample, Value

COLUMN_GAP = 2

_BINARY = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

_NAMES: Mapping[str, str] = {"gpu": "gpu", "mig": "mig", "engine": "engine", "psu": "psu", "circuit": "circuit"}
"""The tag that tells things of one measurement apart."""

_STATE_WORDS: Mapping[tuple[str, str], Sequence[str]] = {
    ("gpu", "state"): GPU_STATES,
    ("gpu", "recovery_action"): RECOVERY_ACTIONS,
    ("power", "redundancy"): REDUNDANCY_STATES,
}
_YES_NO = {
    *(
        ("gpu", "remap_pending"),
        ("gpu", "remap_failed"),
        ("gpu", "healthy"),
        ("gpu", "link_up"),
        ("psu", "ok"),
        ("thermal", "leak"),
    ),
    *(("engine", name) for name in ("up", "starting", "probe_ok", "stalled", "partial")),
}


def print_sweep(swept: Sweep, console: Console, language: str) -> None:
    """Every thing with its readings, then the sources that are not read and why."""
    for sample in swept.samples:
        if sample.measurement == "event":
            console.print(Text(_event_line(sample, language), style="yellow"), soft_wrap=True)
    for sample in sorted(swept.samples, key=_order):
        if sample.measurement not in ("event", "agent"):  # the sweep's own cost says nothing of this host
            console.print(Text(heading(sample, language), style="bold"), soft_wrap=True)
            console.print(_readings(sample, console, language))
            console.print()
    unread = [finding for finding in swept.findings if finding.level != "ok"]
    if unread:
        console.print(Text(say("pairscope.sweep.not_read", language), style="bold"))
        console.print(findings_table(unread, language))


def heading(sample: Sample, language: str) -> str:
    """GPU 0, Engine chat-a, Host: then the tags that say more of the thing."""
    measurement = catalogue.MEASUREMENTS[sample.measurement]
    kind = measurement.title_zh if language == "zh" else measurement.title_en
    own = _NAMES.get(sample.measurement, "")
    name = sample.tags.get(own, "")
    more = [
        f"GPU {value}" if tag == "gpu" else value
        for tag, value in sample.tags.items()
        if tag not in (own, "node", "rack", "cluster", "circuit")
    ]
    place = [f"{tag}={sample.tags[tag]}" for tag in ("rack", "cluster") if tag in sample.tags]
    node = [sample.tags["node"], *place] if sample.measurement == "host" else []
    return printable("  ".join([f"{kind} {name}".strip(), *node, *more]))


def shown(measurement: str, name: str, value: Value, language: str) -> str:
    """A value as people say it: 61.2 GiB, hw_thermal in words, yes or no, 1,234,567, 98.5 %."""
    if isinstance(value, str):
        return printable(value)
    field = catalogue.field(measurement, name)
    if field.kind is Kind.MASK and isinstance(value, int):
        return _mask(value, language)
    words = _STATE_WORDS.get((measurement, name))
    if words is not None:
        return _word(words, int(value), language)
    if (measurement, name) in _YES_NO:
        return say(f"pairscope.sweep.{'yes' if value else 'no'}", language)
    unit = unit_of(name)
    if unit in ("B", "B/s"):
        scale, prefix = next((step for step in _BINARY if value >= step[0]), (1, "B"))
        return f"{value / scale:,.{1 if scale > 1 else 0}f} {prefix}{unit[1:]}"
    if unit == "%":
        return f"{value:.1f} %"
    return f"{_number(value)} {unit}".strip()


def _number(value: float) -> str:
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def _mask(value: int, language: str) -> str:
    names = [say(f"dashboard.reason.{name}", language) for bit, name in THROTTLE_REASONS if value & bit]
    rest = value & ~sum(bit for bit, _ in THROTTLE_REASONS)
    return ", ".join([*names, *([f"0x{rest:x}"] if rest else [])]) or say("pairscope.sweep.none", language)


def _word(words: Sequence[str], value: int, language: str) -> str:
    if not 0 <= value < len(words):
        return str(value)
    return say(f"pairscope.sweep.word.{words[value]}", language)


def _readings(sample: Sample, console: Console, language: str) -> RenderableType:
    """Titles and values, in as many columns as fit, three at most."""
    rows = [
        (catalogue.title(sample.measurement, name, language), shown(sample.measurement, name, value, language))
        for name, value in sorted(sample.fields.items(), key=_field_order(sample.measurement))
        if name in catalogue.MEASUREMENTS[sample.measurement].fields
    ]
    for count in (3, 2):
        tables = _columns(rows, count)
        if sum(console.measure(table).maximum + COLUMN_GAP for table in tables) <= console.width:
            return Columns(tables, padding=(0, COLUMN_GAP))
    return Columns(_columns(rows, 1))


def _columns(rows: Sequence[tuple[str, str]], count: int) -> list[Table]:
    height = max(1, -(-len(rows) // count))
    tables = []
    for start in range(0, len(rows), height):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for title, value in rows[start : start + height]:
            table.add_row(Text(title), Text(value))
        tables.append(table)
    return tables


def _field_order(measurement: str) -> Callable[[tuple[str, Value]], int]:
    """The catalogue's order, states and texts first: whether a thing answers says what its numbers are worth."""
    fields = catalogue.MEASUREMENTS[measurement].fields
    names = list(fields)
    first = {"state": -2, "up": -2}

    def order(item: tuple[str, Value]) -> int:
        return first.get(item[0], names.index(item[0]) if item[0] in fields else len(names))

    return order


def _order(sample: Sample) -> tuple[int, str, int]:
    measurements = list(catalogue.MEASUREMENTS)
    name = sample.tags.get(_NAMES.get(sample.measurement, ""), "")
    return (
        measurements.index(sample.measurement),
        sample.tags.get("gpu", ""),
        int(name) if name.isascii() and name.isdigit() and len(name) <= 9 else 0,
    )


def _event_line(sample: Sample, language: str) -> str:
    when = datetime.fromtimestamp(sample.time_ns / 1e9, UTC).astimezone().strftime("%H:%M:%S")
    kind, subject = sample.tags.get("kind", ""), sample.tags.get("subject", "")
    return printable(f"{when}  {kind} {subject}: {sample.fields.get('text', '')}")
