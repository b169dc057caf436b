"""SDR: what the lines of ipmitool's sensor listing mean, whatever the maker calls its sensors. One bad line costs that line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from agent.power.reading import BmcReading, Supply
from telemetry.catalogue import REDUNDANCY_STATES

LINES_LIMIT = 2000
LINE_LIMIT = 300

FULL, DEGRADED, LOST = (REDUNDANCY_STATES.index(name) for name in ("full", "degraded", "lost"))

# Entities by IPMI 2.0, table 43-13.
POWER_SUPPLY = 10
POWER_ENTITIES = (POWER_SUPPLY, 19, 20, 21)  # supply, unit, module, distribution

LINE_FLOOR_V = 60.0
"""A supply's voltage below this is one of its outputs, unless its name says input: line voltage starts at 100 V, telecom at -48 V."""

_VALUE = re.compile(r"([+-]?\d{1,9}(?:\.\d{1,6})?) +(degrees [CF]|RPM|Watts|Volts|percent|unspecified)", re.ASCII)
_ENTITY = re.compile(r"(\d{1,3})\.(\d{1,3})", re.ASCII)
_UNREAD = ("ns", "na", "nr?")  # the status of a sensor that gives nothing


@dataclass(frozen=True, slots=True)
class Line:
    """One sensor. `entity` is what it sits in and which of them; `value` and `unit` of a number, `states` of a discrete one."""

    name: str
    entity: tuple[int, int]
    value: float | None = None
    unit: str = ""
    states: tuple[str, ...] = ()


def lines(text: str) -> list[Line]:
    """The sensors of `ipmitool sdr elist all`: name | number | status | entity | reading. Linear in the text."""
    found = (_line(row) for row in text.split("\n", LINES_LIMIT)[:LINES_LIMIT])
    return [line for line in found if line is not None]


def _line(row: str) -> Line | None:
    columns = row[:LINE_LIMIT].split("|")
    if len(columns) < 5:
        return None
    # a name may hold the separator too, so count from the right
    name, status, entity, reading = (
        "|".join(columns[:-4]).strip(),
        columns[-3].strip(),
        columns[-2].strip(),
        columns[-1].strip(),
    )
    where = _ENTITY.fullmatch(entity)
    if where is None or status.lower() in _UNREAD:
        return None
    placed = (int(where[1]), int(where[2]))
    number = _VALUE.fullmatch(reading)
    if number is not None:
        return _in_celsius(Line(name, placed, float(number[1]), number[2]))
    states = tuple(state.strip().lower() for state in reading.split(",") if state.strip())
    return Line(name, placed, states=states)


def _in_celsius(line: Line) -> Line:
    if line.unit == "degrees F" and line.value is not None:
        return replace(line, value=(line.value - 32) / 1.8, unit="degrees C")
    return line


def reading(sensors: Sequence[Line]) -> BmcReading:
    """What the sensors say of power and cooling. Watts here are one byte times a step, so a node's power is coarse."""
    fans = [line for line in sensors if line.entity[0] != POWER_SUPPLY]  # a supply's own fan is none of the node's
    speeds = _values(fans, "RPM")
    shares = [
        line.value for line in fans if line.unit == "percent" and _FAN.search(line.name) and line.value is not None
    ]
    return BmcReading(
        supplies=supplies(sensors),
        redundancy=redundancy(sensors),
        node_w=_node_w(sensors),
        inlet_c=_temperature(sensors, _INLETS),
        exhaust_c=_temperature(sensors, (_EXHAUST,)),
        coolant_c=_temperature(sensors, (_COOLANT,), _NOT_COOLANT),
        fan_min_rpm=min(speeds, default=None),
        fan_pct=mean(shares) if shares else None,
    )


_FAN = re.compile(r"fan|pwm|duty|blower", re.IGNORECASE)
_INLETS = tuple(
    re.compile(words, re.IGNORECASE) for words in (r"inlet|intake", r"amb(?:ient)?(?![a-z])", r"front ?panel")
)
_EXHAUST = re.compile(r"exhaust|outlet|exit air", re.IGNORECASE)
_COOLANT = re.compile(r"coolant|liquid|water|cdu", re.IGNORECASE)
_NOT_COOLANT = re.compile(r"return|outlet|exhaust", re.IGNORECASE)
_NOT_AIR = re.compile(
    r"(?<![a-z])(?:p|g|c|d)pu|ps\d|psu|dimm|(?<![a-z])vr|pch|hdd|ssd|nvme|(?<![a-z])nic|hba|raid|mezz|pcie?(?![a-z])|"
    r"coolant|liquid|water|cdu|margin|delta",
    re.IGNORECASE,
)
_NODE_POWER = re.compile(
    r"pwr consumption|power consumption|power meter|(?:sys|system|total|node|chassis|platform|input)[ _]*(?:input[ _]*)?(?:power|pwr)|"
    r"(?:^|[ _])(?:pwr|power)[ _]*(?:total|in)?$|total_?power",
    re.IGNORECASE,
)
_NOT_NODE = re.compile(
    r"cpu|gpu|mem|dimm|fan|hdd|storage|pcie|riser|limit|cap(?![a-z])|peak|max|min|budget", re.IGNORECASE
)


def _values(sensors: Iterable[Line], unit: str) -> list[float]:
    return [line.value for line in sensors if line.unit == unit and line.value is not None and line.value >= 0]


def _temperature(
    sensors: Sequence[Line], names: Sequence[re.Pattern[str]], without: re.Pattern[str] = _NOT_AIR
) -> float | None:
    """The warmest of those whose names match best; no part's own sensor is the air's. A sensor that isn't fitted often shows 0."""
    for pattern in names:
        found = [
            line.value
            for line in sensors
            if line.unit == "degrees C"
            and line.value
            and line.entity[0] != POWER_SUPPLY
            and pattern.search(line.name)
            and not without.search(line.name)
        ]
        if found:
            return max(found)
    return None


def _node_w(sensors: Sequence[Line]) -> float | None:
    """The largest that is the node's as a whole: a node's input is more than any part of it. It runs, so it can't be 0."""
    found = [
        line.value
        for line in sensors
        if line.unit == "Watts"
        and line.value is not None
        and line.value > 0
        and line.entity[0] != POWER_SUPPLY
        and not supply_number(line)
        and _NODE_POWER.search(line.name)
        and not _NOT_NODE.search(line.name)
    ]
    return max(found, default=None)


_SUPPLY = re.compile(
    r"(?<![a-z])(?:psu?|pwr ?sup(?:ply)?|power[ _]?supply)[ _#-]?(\d{1,2})(?!\d)", re.IGNORECASE | re.ASCII
)
_INPUT = re.compile(r"(?<![a-z])(?:p|v|i)?[ _]?in(?:put)?(?![a-z])|(?<![a-z])ac|line", re.IGNORECASE)
_OUTPUT = re.compile(r"(?<![a-z])(?:p|v|i)?[ _]?out(?:put)?(?![a-z])|(?<![a-z])dc", re.IGNORECASE)
_BAD = (
    "failure detected",
    "ac lost",
    "out-of-range",
    "out of range",
    "config error",
    "configuration error",
    "input lost",
)
"""States of a supply (sensor type 08h) that keep it from carrying load. A predicted failure is not one yet."""


def supply_number(line: Line) -> int | None:
    """Which supply a sensor belongs to: by its entity, else by its name."""
    if line.entity[0] == POWER_SUPPLY:
        return line.entity[1]
    named = _SUPPLY.search(line.name)
    return int(named[1]) if named else None


def supplies(sensors: Sequence[Line]) -> tuple[Supply, ...] | None:
    """The supplies that are present, in the order of their numbers; None where no sensor speaks of one."""
    found: dict[int, Supply] = {}
    absent: set[int] = set()
    for line in sensors:
        number = supply_number(line)
        if number is None or _is_redundancy(line):
            continue
        supply = found.setdefault(number, Supply(f"PSU {number}"))
        if line.value is None:
            if _says_absent(line):
                absent.add(number)
            found[number] = _with_states(supply, line.states)
        else:
            found[number] = _with_value(supply, line, line.value)
    if not found:
        return None
    return tuple(supply for number, supply in sorted(found.items()) if number not in absent or _gives_numbers(supply))


def _gives_numbers(supply: Supply) -> bool:
    """Some makers never set the presence bit; a supply with line voltage or power is there whatever the bit says."""
    return any(value for value in (supply.input_w, supply.output_w, supply.voltage_v))


def _says_absent(line: Line) -> bool:
    """A presence sensor without a state, or one that says so. Whether it is one is known by its name."""
    if line.states:
        return any(
            state in ("absent", "device absent", "not present", "device removed/device absent") for state in line.states
        )
    return bool(
        re.search(r"status|presence|state|(?:ps|psu|supply)[ _#-]?\d{1,2}$", line.name, re.IGNORECASE | re.ASCII)
    )


def _with_states(supply: Supply, states: tuple[str, ...]) -> Supply:
    if any(bad in state for state in states for bad in _BAD if "predictive" not in state):
        return replace(supply, ok=False)
    if supply.ok is None and any(
        state in ("presence detected", "power supply inactive", "device present") for state in states
    ):
        return replace(supply, ok=True)
    return supply


def _with_value(supply: Supply, line: Line, value: float) -> Supply:
    """Watts and volts by their names; which side a bare "Power" is on is not known, and it is left out."""
    is_input, is_output = bool(_INPUT.search(line.name)), bool(_OUTPUT.search(line.name))
    if value < 0 or (is_input and is_output):
        return supply
    if line.unit == "Watts":
        if is_input:
            return replace(supply, input_w=value)
        return replace(supply, output_w=value) if is_output else supply
    if line.unit == "Volts" and not is_output and (is_input or value >= LINE_FLOOR_V):
        return replace(supply, voltage_v=value)
    return supply


_REDUNDANCY_WORDS = (
    # IPMI 2.0, table 42-2, as ipmitool says them; the first that a state holds decides
    ("fully redundant", "degraded", DEGRADED),
    ("fully redundant", "", FULL),
    ("non-redundant", "degraded", DEGRADED),
    ("non-redundant", "", LOST),
    ("redundancy lost", "", LOST),
    ("redundancy degraded", "", DEGRADED),
)


def _state_of(state: str) -> int | None:
    for word, other, level in _REDUNDANCY_WORDS:
        if word in state and other in state:
            return level
    return None


def _is_redundancy(line: Line) -> bool:
    return any(_state_of(state) is not None for state in line.states)


def redundancy(sensors: Sequence[Line]) -> int | None:
    """The power redundancy in the catalogue's words, the worst of them; that of fans is another thing."""
    found = [
        state
        for line in sensors
        if not _FAN.search(line.name)
        and (line.entity[0] in POWER_ENTITIES or re.search(r"(?<![a-z])ps|pwr|power|supply", line.name, re.IGNORECASE))
        for word in line.states
        if (state := _state_of(word)) is not None
    ]
    return min(found, key=lambda state: (LOST, DEGRADED, FULL).index(state)) if found else None


_POWER_READING = re.compile(r"Instantaneous power reading\s*:\s*(\d{1,6})\s*Watts", re.IGNORECASE | re.ASCII)
_POWER_LIMIT = re.compile(r"Power Limit\s*:\s*(\d{1,6})\s*Watts", re.IGNORECASE | re.ASCII)


def dcmi_power_w(text: str) -> float | None:
    """`ipmitool dcmi power reading`: the node's present power in W; None where the measurement is off. A node that runs is not at 0."""
    if re.search(r"state is\s*:\s*deactivated", text, re.IGNORECASE):
        return None
    found = _POWER_READING.search(text)
    return float(found[1]) or None if found else None


def dcmi_limit_w(text: str) -> float | None:
    """`ipmitool dcmi power get_limit`: the cap in W where one is active."""
    if not re.search(r"Limit State\s*:\s*Power Limit Active", text, re.IGNORECASE):
        return None
    found = _POWER_LIMIT.search(text)
    return float(found[1]) or None if found else None
