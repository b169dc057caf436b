"""A small record of two nodes in which every number, tag and time is different, and the stores it is copied between."""

from __future__ import annotations

from pathlib import Path

from pairscope.record import Recorded, record
from pairscope.replay import Plan, Replayed, replay
from pairscope.selection import Selection
from telemetry.lineprotocol import encode_many
from telemetry.sample import Sample
from telemetry.store import Store, open_store

S = 10**9
T0 = 1_795_960_800 * S


def samples(seconds: int = 40) -> list[Sample]:
    """In the order of a recording."""
    found: list[Sample] = []
    for second in range(seconds):
        time_ns = T0 + second * S + 123_456_789
        for number, node in enumerate(("n 1,=", "n2")):
            tags = {"engine": "chat", "gpus": "0+1", "model": "模型", "node": node}
            fields = {"tokens_per_s": 0.1 + second + 1000.5 * number, "version": f'v "{second}" \\ 中'}
            counted = {"generation_tokens_total": 2**62 + second * 17 + number, "up": 1}
            found.append(Sample("engine", tags, {**counted, **fields}, time_ns))
        if second == 7:
            found.append(
                Sample("event", {"node": "n2", "kind": "xid", "subject": "0"}, {"text": "a", "code": 79}, time_ns)
            )
        for gpu in range(2):
            for number, node in enumerate(("n 1,=", "n2")):
                place = 4 * second + 2 * number + gpu
                fields = {"util_pct": 90 + place / 1000, "temp_c": 40.25 + place, "power_w": 300.1 + place}
                masks = {"throttle_reasons": 1 << (place % 40), "xid_total": place}
                tags = {"gpu": str(gpu), "node": node, "uuid": f"GPU-{number}{gpu}"}
                found.append(Sample("gpu", tags, {**fields, **masks}, time_ns))
    return found


def written(path: Path, what: list[Sample]) -> Path:
    path.write_text(encode_many(what), "utf-8")
    return path


def sqlite_store(folder: Path, name: str) -> Store:
    return open_store(f"sqlite://{folder}/{name}.db")


def everything(start_ns: int = T0 - S, end_ns: int = T0 + 3600 * S) -> Selection:
    return Selection(start_ns, end_ns)


def unseen(_done: float, _samples: int) -> None:
    pass


def recorded(store: Store, path: Path, selection: Selection | None = None) -> Recorded:
    return record(store, selection or everything(), path, advance=unseen)


def replayed(path: Path, store: Store | None, plan: Plan | None = None) -> Replayed:
    return replay(path, store, plan or Plan(), advance=unseen)
