"""Sensor data records of IPMI 2.0, as bytes: what a simulated BMC says that it has."""

from __future__ import annotations

from dataclasses import dataclass

DEGREES_C, VOLTS, AMPERES, WATTS, RPM = 1, 4, 5, 6, 18  # table 43-15
TEMPERATURE, FAN, POWER_SUPPLY, POWER_UNIT, OTHER = 0x01, 0x04, 0x08, 0x09, 0x0B  # table 42-3
THRESHOLD, REDUNDANCY, SPECIFIC = 0x01, 0x0B, 0x6F  # table 42-1


@dataclass(frozen=True)
class Analog:
    """A threshold sensor: its value is `multiplier` x one byte. `entity` is (what, which), such as (10, 1) for supply 1."""

    name: str
    number: int
    kind: int
    unit: int
    entity: tuple[int, int]
    multiplier: int = 1
    percentage: bool = False

    reading_type = THRESHOLD

    def record(self) -> bytes:
        body = bytearray(42)
        body[0:9] = bytes((0x20, 0, self.number, *self.entity, 0x7F, 0x68, self.kind, THRESHOLD))
        body[13:15] = b"\x3f\x3f"
        body[15] = 1 if self.percentage else 0
        body[16] = self.unit
        body[19] = self.multiplier
        return _record(0x01, bytes(body) + _name(self.name))


@dataclass(frozen=True)
class Discrete:
    """A sensor of states, one bit each."""

    name: str
    number: int
    kind: int
    entity: tuple[int, int]
    reading_type: int = SPECIFIC

    def record(self) -> bytes:
        body = bytearray(27)
        body[0:9] = bytes((0x20, 0, self.number, *self.entity, 0x67, 0x40, self.kind, self.reading_type))
        body[9:15] = b"\xff\x00\xff\x00\xff\x00"
        body[15] = 0xC0
        body[18] = 0x01
        return _record(0x02, bytes(body[:26]) + _name(self.name))


def _name(name: str) -> bytes:
    text = name.encode("ascii")[:16]
    return bytes((0xC0 | len(text),)) + text


def _record(kind: int, body: bytes) -> bytes:
    return bytes((0, 0, 0x51, kind, len(body))) + body
