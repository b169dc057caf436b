"""Two thousand bodies that a broken or hostile BMC might send: none ends the reader, holds it up, or gets a wild number written."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from agent.power import headroom, plausible
from agent.power.fault import BmcFault
from agent.power.redfish.client import BODY_LIMIT_BYTES, Missing, Unanswered
from agent.power.redfish.document import Json, NotADocument, parse
from agent.power.redfish.reader import RedfishReader
from agent.settings import BmcTarget
from telemetry.catalogue import check
from telemetry.lineprotocol import decode, encode
from tests.agent.power.conftest import Read, Serve
from tests.doubles.redfish.documents import PROFILES, Documents
from tests.doubles.redfish.server import body
from tests.doubles.redfish.state import NodeState

LIMIT_S = 0.2
"""CPU time in which a whole visit, all its bodies parsed and read, must be over."""

WILD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1e308,
        -1e308,
        10**400,
        2**63,
        32767,
        -273.15,
        "",
        "N/A",
        "NaN",
        "12.5",
        "1e9",
        "9" * 31,
    ),
    *("x\ny", "\x00\ud800", "/redfish/v1/", "http://other.example/redfish/v1", [], {}, [[]], [{}], {"Reading": []}),
    *({"@odata.id": "/redfish/v1/Chassis"}, {"@odata.id": "//other.example/x"}, {"Reading": 1e30}, ["a"] * 3000),
)
BOUNDS = {
    "_w": (0.0, 200_000.0),
    "_v": (0.0, 1000.0),
    "_c": (-40.0, 125.0),
    "_rpm": (0.0, 60_000.0),
    "fan_pct": (0.0, 100.0),
}


class FromMemory:
    """In the client's place: the bodies of one BMC, as bytes."""

    def __init__(self, bodies: dict[str, bytes]) -> None:
        self.bodies = bodies
        self.asked = 0

    def begin(self, within_s: float) -> None:
        self.asked = 0

    def get(self, path: str) -> Json:
        self.asked += 1
        if path not in self.bodies:
            raise Missing(path)
        if len(self.bodies[path]) > BODY_LIMIT_BYTES:
            raise Unanswered("beyond the limit")
        try:
            return parse(self.bodies[path])
        except NotADocument as error:
            raise Unanswered(str(error)) from None

    def logout(self) -> None:
        pass

    interrupt = close = logout


def places_in(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found = [] if found is None else found
    for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
        found.append((value, key))
        if isinstance(entry, dict | list):
            places_in(entry, found)
    return found


def swap_type(random: Random, document: Any) -> None:
    container, key = random.choice(places_in(document))
    container[key] = copy.deepcopy(random.choice(WILD))


def delete(random: Random, document: Any) -> None:
    container, key = random.choice(places_in(document))
    del container[key]


def nest(random: Random, document: Any) -> None:
    container, key = random.choice(places_in(document))
    for _ in range(random.choice((1, 3, 200))):
        container[key] = random.choice(([container[key]], {"Reading": container[key]}, {"@odata.id": container[key]}))


def enlarge(random: Random, document: Any) -> None:
    numbers = [
        (at, key) for at, key in places_in(document) if isinstance(at[key], int | float) and abs(at[key]) < 1e300
    ]
    if numbers:
        container, key = random.choice(numbers)
        container[key] = random.choice((-1, 1)) * container[key] * 10.0 ** random.randint(1, 300)


def misdirect(random: Random, document: Any) -> None:
    links = [(at, key) for at, key in places_in(document) if key == "@odata.id"]
    if links:
        container, key = random.choice(links)
        others = (*WILD, "/redfish/v1/Chassis/1", "/redfish/v1/Chassis/1/Power", "/nowhere")
        container[key] = copy.deepcopy(random.choice(others))


def repeat(random: Random, document: Any) -> None:
    lists = [at[key] for at, key in places_in(document) if isinstance(at[key], list) and at[key]]
    if lists:
        entries = random.choice(lists)
        entries.extend([random.choice(entries)] * random.choice((1, 50, 3000)))


MUTATIONS: tuple[Callable[[Random, Any], None], ...] = (swap_type, delete, nest, enlarge, misdirect, repeat)


def mutated(random: Random, document: dict[str, Any]) -> bytes:
    """One to four changes; one body in six has its bytes hurt as well."""
    changed = copy.deepcopy(document)
    for _ in range(random.randint(1, 4)):
        if changed and len(places_in(changed)) < 5000:  # a body beyond the client's limit is another test's
            random.choice(MUTATIONS)(random, changed)
    data = bytearray(json.dumps(changed).encode())
    if random.random() < 1 / 6:
        for _ in range(random.randint(1, 8)):
            data[random.randrange(len(data))] = random.randrange(256)
        if random.random() < 0.3:
            del data[random.randrange(len(data)) :]
    return bytes(data)


def bmcs(random: Random, bodies: int) -> Iterator[tuple[dict[str, bytes], int]]:
    """BMCs of all makes, a few of whose bodies are mutated, until there were that many; with how many it is."""
    made = 0
    profiles = list(PROFILES)
    while made < bodies:
        documents: Documents = PROFILES[profiles[made % len(profiles)]](NodeState())
        plain = {path: json.dumps(document).encode() for path, document in documents.items()}
        chosen = random.sample(sorted(documents), min(2, len(documents)))
        yield {**plain, **{path: mutated(random, documents[path]) for path in chosen}}, len(chosen)
        made += len(chosen)


@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.long)])
def test_mutated_bodies_crash_nothing_take_no_time_and_write_no_wild_number(count: int) -> None:
    random = Random(20261129)
    tried = written = read = 0
    for bodies, changed in bmcs(random, count):
        tried += changed
        reader = RedfishReader(BmcTarget("https://bmc.example"))
        source = FromMemory(bodies)
        reader._client = source  # type: ignore[assignment]
        began_s = time.process_time()
        try:
            reading = plausible.plausible(reader.read())
        except BmcFault:
            reading = None
        assert time.process_time() - began_s < LIMIT_S * max(1, changed)
        assert source.asked < 600
        if reading is None:
            continue
        read += 1
        for redundancy, feed_b in (("auto", ()), ("N+2", ()), ("A/B", ("PSU2",))):
            for sample in headroom.samples(reading, redundancy, feed_b, {"node": "n7"}, 17):
                assert decode(encode(check(sample))) == sample
                written += len(sample.fields)
                for name, value in sample.fields.items():
                    for suffix, (lowest, highest) in BOUNDS.items():
                        if name.endswith(suffix):
                            assert lowest <= float(value) <= highest * (32 if name == "capacity_w" else 1), (
                                name,
                                value,
                            )
                    if name.startswith("headroom"):
                        assert float(value) <= 100
    assert tried >= count
    assert read > count / 5 and written > 5 * count  # much of it was read all the same


@pytest.mark.parametrize("profile", ["both", "old", "hpe"])
def test_mutated_bodies_over_http_leave_a_reader_that_works_and_no_session(
    serve: Serve, reader: Read, profile: str
) -> None:
    random = Random(7)
    bmc = serve(profile)
    one = reader(bmc)
    for _ in range(12):
        path = random.choice([path for path in sorted(bmc.documents) if path != "/redfish/v1/"])
        bmc.faults = {path: body(mutated(random, bmc.documents[path]))}
        one._rediscover_s = 0.0
        try:
            plausible.plausible(one.read())
        except BmcFault:
            assert bmc.sessions == {}
    bmc.faults = {}
    one._rediscover_s = 0.0
    assert one.read().node_w == 3815.0
    one.close()
    assert bmc.sessions == {}
