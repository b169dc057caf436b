"""ipmitool's listing is read whatever the maker calls its sensors, and a line that makes no sense costs that line."""

from __future__ import annotations

import random
import time

import pytest

from agent.power.plausible import plausible
from agent.power.reading import Supply
from agent.power.sdr import DEGRADED, FULL, LOST, Line, dcmi_limit_w, dcmi_power_w, lines, reading, redundancy, supplies

# Four machines, in the manner of four makers; every number is another one.
TWIN_SUPPLIES = """\
SEL              | 72h | ns  |  7.1 | No Reading
Inlet Temp       | 05h | ok  |  7.1 | 23 degrees C
Exhaust Temp     | 06h | ok  |  7.1 | 41 degrees C
Temp             | 0Eh | ok  |  3.1 | 62 degrees C
Fan1A RPM        | 30h | ok  |  7.1 | 9840 RPM
Fan1B RPM        | 31h | ok  |  7.1 | 8760 RPM
Fan2A RPM        | 32h | ok  |  7.1 | 9960 RPM
Fan Redundancy   | 75h | ok  |  7.1 | Redundancy Lost
Presence         | 50h | ok  | 10.1 | Present
Status           | 85h | ok  | 10.1 | Presence detected
Status           | 86h | ok  | 10.2 | Presence detected, Power Supply AC lost
Voltage 1        | 6Ch | ok  | 10.1 | 232 Volts
Voltage 2        | 6Dh | ns  | 10.2 | No Reading
Current 1        | 6Ah | ok  | 10.1 | 2.20 Amps
PS Redundancy    | 77h | ok  |  7.1 | Redundancy Lost
Pwr Consumption  | 76h | ok  |  7.1 | 504 Watts
Power Optimized  | 99h | ok  |  7.1 | OEM Performance
Intrusion        | 73h | ok  |  7.1 |
"""
FOUR_SUPPLIES = """\
CPU1 Temp        | 01h | ok  |  3.1 | 55 degrees C
GPU3 Inlet       | 02h | ok  | 11.3 | 47 degrees C
System Temp      | 0Bh | ok  |  7.1 | 33 degrees C
Ambient Temp     | 0Ch | ok  |  7.2 | 27 degrees C
FAN1             | 41h | ok  | 29.1 | 12600 RPM
FAN2             | 42h | ok  | 29.2 | 11900 RPM
FAN3             | 43h | ns  | 29.3 | No Reading
PS1 Status       | C8h | ok  | 10.1 | Presence detected
PS2 Status       | C9h | ok  | 10.2 | Presence detected
PS3 Status       | CAh | ok  | 10.3 |
PS4 Status       | CBh | ok  | 10.4 | Presence detected, Failure detected
PS1 Input Power  | D0h | ok  | 10.1 | 1488 Watts
PS2 Input Power  | D1h | ok  | 10.2 | 1472 Watts
PS1 Output Power | D2h | ok  | 10.1 | 1392 Watts
PS1 Fan          | D3h | ok  | 10.1 | 3100 RPM
Total Power      | D8h | ok  | 19.1 | 2944 Watts
"""
METER = """\
UID Light        | 01h | ok  | 23.1 | 0x01
01-Inlet Ambient | 05h | ok  | 55.1 | 21 degrees C
02-CPU 1         | 06h | ok  | 65.1 | 40 degrees C
30-Front Ambient | 07h | ok  | 64.1 | 26 degrees C
Fan 1            | 08h | ok  | 29.1 | 39.20 percent
Fan 2            | 09h | ok  | 29.2 | 21.56 percent
Fans             | 0Ah | ok  | 29.9 | Fully Redundant
Power Supply 1   | 0Bh | ok  | 10.1 | Presence detected
Power Supply 2   | 0Ch | ok  | 10.2 | Presence detected
Power Supplies   | 0Dh | ok  | 10.9 | Fully Redundant
Power Meter      | 0Eh | ok  |  7.1 | 386 Watts
"""
UNDERSCORES = """\
Inlet_Temp_1     | 10h | ok  |  7.1 | 75 degrees F
Inlet_Temp_2     | 11h | ok  |  7.1 | 77 degrees F
Outlet_Temp      | 12h | nc  |  7.1 | 122 degrees F
Liquid_Inlet     | 13h | ok  |  7.1 | 31 degrees C
PSU1_Inlet_Temp  | 14h | ok  | 10.1 | 29 degrees C
SYS_FAN_1        | 15h | cr  | 29.1 | 0 RPM
SYS_FAN_2        | 16h | ok  | 29.2 | 15300 RPM
PSU1_VIN         | 17h | ok  | 10.1 | 207.50 Volts
PSU1_VOUT        | 18h | ok  | 10.1 | 54.30 Volts
PSU1_PIN         | 19h | ok  | 10.1 | 2010 Watts
PSU1_POUT        | 1Ah | ok  | 10.1 | 1905 Watts
PSU1_Status      | 1Bh | ok  | 10.1 |
PSU2_PIN         | 1Ch | ns  | 10.2 | Disabled
PSU2_Supply      | 1Dh | ok  | 10.2 | Presence detected, Predictive failure
PWR_Redundancy   | 1Eh | ok  | 21.1 | Non-Redundant: Sufficient from Redundant
CPU_Power        | 1Fh | ok  |  3.1 | 512 Watts
Total_Power      | 20h | ok  |  7.1 | 4080 Watts
Sys_Power_Limit  | 21h | ok  |  7.1 | 6000 Watts
"""


def test_two_supplies_of_which_one_has_lost_its_line() -> None:
    told = reading(lines(TWIN_SUPPLIES))
    assert told.supplies == (Supply("PSU 1", ok=True, voltage_v=232.0), Supply("PSU 2", ok=False))
    assert told.redundancy == LOST
    assert (told.node_w, told.inlet_c, told.exhaust_c, told.fan_min_rpm) == (504.0, 23.0, 41.0, 8760.0)
    assert (told.fan_pct, told.coolant_c, told.cap_w, told.leak) == (None, None, None, None)


def test_four_bays_of_which_one_is_empty_and_one_has_failed() -> None:
    told = reading(lines(FOUR_SUPPLIES))
    assert told.supplies == (
        Supply("PSU 1", ok=True, input_w=1488.0, output_w=1392.0),
        Supply("PSU 2", ok=True, input_w=1472.0),
        Supply("PSU 4", ok=False),
    )
    assert (told.node_w, told.inlet_c, told.exhaust_c, told.fan_min_rpm) == (2944.0, 27.0, None, 11900.0)
    assert told.redundancy is None


def test_a_meter_and_fans_in_percent() -> None:
    told = reading(lines(METER))
    assert told.supplies == (Supply("PSU 1", ok=True), Supply("PSU 2", ok=True))
    assert (told.node_w, told.inlet_c, told.redundancy) == (386.0, 21.0, FULL)
    assert told.fan_pct == pytest.approx((39.20 + 21.56) / 2)
    assert told.fan_min_rpm is None


def test_fahrenheit_a_fan_that_stands_and_a_supply_that_says_no_presence() -> None:
    told = reading(lines(UNDERSCORES))
    assert told.supplies == (
        Supply("PSU 1", input_w=2010.0, output_w=1905.0, voltage_v=207.5),
        Supply("PSU 2", ok=True),
    )
    assert told.inlet_c == pytest.approx(25.0)
    assert told.exhaust_c == pytest.approx(50.0)
    assert told.coolant_c == 31.0
    assert told.fan_min_rpm == 0.0, "it is read, and it stands"
    assert told.redundancy == LOST
    assert told.node_w == 4080.0, "neither a part's power nor a limit"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("Fully Redundant", FULL),
        ("Redundancy Lost", LOST),
        ("Redundancy Degraded", DEGRADED),
        ("Redundancy Degraded from Fully Redundant", DEGRADED),
        ("Redundancy Degraded from Non-Redundant", DEGRADED),
        ("Non-Redundant: Sufficient from Redundant", LOST),
        ("Non-Redundant: Sufficient from Insufficient", LOST),
        ("Non-Redundant: Insufficient Resources", LOST),
        ("Fully Redundant, Redundancy Degraded", DEGRADED),
        ("Presence detected", None),
        ("", None),
    ],
)
def test_the_words_of_a_redundancy_sensor(text: str, state: int | None) -> None:
    assert redundancy(lines(f"PS Redundancy | 77h | ok  |  7.1 | {text}")) == state
    assert redundancy(lines(f"Fan Redundancy | 77h | ok  |  7.1 | {text}")) is None


@pytest.mark.parametrize(
    ("states", "ok"),
    [
        ("Presence detected", True),
        ("Presence detected, Predictive failure", True),
        ("Presence detected, Power Supply Inactive", True),
        ("Presence detected, Failure detected", False),
        ("Presence detected, Power Supply AC lost", False),
        ("Presence detected, AC lost or out-of-range", False),
        ("Presence detected, AC out-of-range, but present", False),
        ("Presence detected, Config Error: Vendor Mismatch", False),
        ("OEM Specific", None),
    ],
)
def test_the_states_of_a_supply(states: str, ok: bool | None) -> None:
    assert supplies(lines(f"PS1 Status | C8h | ok  | 10.1 | {states}")) == (Supply("PSU 1", ok=ok),)


def test_a_node_without_supplies_of_its_own_says_nothing_of_them() -> None:
    assert reading(lines("Inlet Temp | 05h | ok  |  7.1 | 23 degrees C")).supplies is None
    assert supplies(lines("PS1 Status | C8h | ok  | 10.1 | ")) == ()


def test_what_gives_no_reading_is_absent() -> None:
    for status, text in (
        ("ns", "No Reading"),
        ("ns", "Disabled"),
        ("na", "na"),
        ("ok", "no reading"),
        ("ok", "na"),
        ("ok", ""),
    ):
        told = reading(lines(f"Inlet Temp | 05h | {status} | 7.1 | {text}\nFan1 | 30h | {status} | 29.1 | {text}"))
        assert (told.inlet_c, told.fan_min_rpm) == (None, None)


@pytest.mark.parametrize(
    "junk", ["-12 degrees C", "0x1f", "1e999 Watts", "9" * 400 + " RPM", "nan RPM", "-300 RPM", "١٢ RPM"]
)
def test_a_number_that_is_none_is_absent(junk: str) -> None:
    told = plausible(reading(lines(f"Total Power | 05h | ok | 7.1 | {junk}\nFan1 | 30h | ok | 29.1 | {junk}")))
    assert (told.node_w, told.fan_min_rpm) == (None, None)


def test_a_name_with_the_separator_in_it_is_one_name() -> None:
    assert lines("Fan|1 | 30h | ok  | 29.1 | 900 RPM") == [Line("Fan|1", (29, 1), 900.0, "RPM")]


JUNK = (
    "\x00",
    "|",
    "\n",
    "|||||",
    "Get HPM.x Capabilities request failed, compcode = d4",
    "é" * 50,
    "\x1b[2J",
    "99999999999999999999",
)


def test_five_hundred_mutations_crash_nothing_and_cost_only_the_lines_they_touch() -> None:
    seed = random.Random(20)
    for text in (TWIN_SUPPLIES, FOUR_SUPPLIES, METER, UNDERSCORES):
        rows = text.splitlines()
        whole = {row: lines(row) for row in rows}
        for _ in range(125):
            kept = list(rows)
            touched = set(seed.sample(range(len(rows)), k=seed.randint(1, 4)))
            for number in touched:
                row = kept[number]
                at = seed.randrange(len(row))
                kept[number] = seed.choice(
                    (
                        row[:at],
                        row[:at] + seed.choice(JUNK) + row[at:],
                        row[:at] + row[at + seed.randint(1, 9) :],
                        "".join(seed.sample(row, len(row))),
                        row.swapcase(),
                        row * 40,
                    )
                )
            found = lines("\n".join(kept))
            for number, row in enumerate(rows):
                if number not in touched:
                    assert all(line in found for line in whole[row])
            plausible(reading(found))


def test_a_long_listing_is_read_in_time_that_grows_with_it_and_no_further_than_its_limit() -> None:
    began_s = time.monotonic()
    found = lines("a | b | ok | 7.1 | " + "x," * 500_000 + "\n" + "Fan | 1h | ok | 29.1 | 10 RPM\n" * 200_000)
    assert len(found) <= 2000
    reading(found)
    for row in ("|" * 200_000, " " * 200_000, "Power" * 50_000, "PS" * 100_000 + "| 1h | ok | 10.1 | 5 Watts"):
        reading(lines(f"{row} | 1h | ok | 7.1 | 5 Watts"))
    assert time.monotonic() - began_s < 60


def dcmi(watts: str, state: str = "activated") -> str:
    return (
        f"\n    Instantaneous power reading:    {watts} Watts\n"
        f"    Minimum during sampling period:  77 Watts\n    Power reading state is:   {state}\n"
    )


def test_the_present_power_is_read_and_neither_the_lowest_nor_one_that_is_switched_off() -> None:
    assert dcmi_power_w(dcmi("5210")) == 5210.0
    assert dcmi_power_w(dcmi("5210", "deactivated")) is None
    for junk in ("0", "-5", "", "na", "9" * 40):
        assert dcmi_power_w(dcmi(junk)) is None


def test_a_limit_counts_only_while_it_is_active() -> None:
    limit = "\n    Current Limit State: {}\n    Exception actions:   No Action\n    Power Limit:         6500 Watts\n"
    assert dcmi_limit_w(limit.format("Power Limit Active")) == 6500.0
    assert dcmi_limit_w(limit.format("No Active Power Limit")) is None
    assert dcmi_limit_w("") is None
