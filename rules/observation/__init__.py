"""From samples to evidence: pure reading of one pair out of the window, each number beside what is usual for it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rules.evidence import Evidence, OutputEvidence, PeerEvidence
from rules.observation.engines import observe_engine
from rules.observation.gpus import observe_gpus
from rules.observation.ranks import observe_ranks
from rules.observation.reader import Reader
from rules.observation.surroundings import observe_host, observe_room
from rules.pair import Pair
from rules.window import SECOND, Window


def observe(
    window: Window,
    pair: Pair,
    reader: Reader,
    output: OutputEvidence,
    peers: PeerEvidence,
    other_inlet: float | None,
    neighbour_temps: Mapping[str, float],
    clock_off_s: float | None = None,
) -> Evidence:
    """Everything that is known of the pair at the reader's moment."""
    hosts = window.devices(pair.node, "host")
    own = [device for name in ("gpu", "engine", "host") for device in window.devices(pair.node, name)]
    heard = own or window.all_devices(pair.node)  # of some nodes only the power supplies or the room are known
    last = max((device.last_ns for device in heard if device.last_ns <= reader.at_ns), default=0)
    return Evidence(
        node=pair.node,
        at_ns=reader.at_ns,
        gpus=observe_gpus(reader, pair.gpus, neighbour_temps),
        engine=observe_engine(reader, pair.engine) if pair.engine is not None else None,
        host=observe_host(reader, hosts[-1]) if hosts else None,
        room=observe_room(reader, window, pair, other_inlet),
        output=output,
        peers=peers,
        ranks=observe_ranks(reader, window, pair),
        events=tuple(window.events_of(pair.node, reader.start(3600), reader.at_ns)),
        silent_s=(reader.at_ns - last) / SECOND if last else math.inf,
        clock_off_s=clock_off_s,
    )
