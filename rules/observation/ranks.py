"""What is seen of the ranks of an engine whose model is split: how long each computes in a step, and how long it waits for the others."""

from __future__ import annotations

from collections.abc import Sequence

from rules.evidence import RankEvidence
from rules.observation.reader import NOW_S, Reader
from rules.pair import Pair
from rules.window import Device, Window


def observe_ranks(reader: Reader, window: Window, pair: Pair) -> tuple[RankEvidence, ...]:
    """Those that told something lately, in their order; none of an engine whose model is whole, or that tells nothing of ranks.

    With as many GPUs as ranks, the first rank has the first of them: an engine opens its GPUs in their order.
    """
    if pair.engine is None:
        return ()
    ranks = _own(window.devices(pair.node, "rank"), pair.engine, reader.start(NOW_S))
    gpus = [gpu.tags.get("gpu", "") for gpu in pair.gpus]
    paired = [str(place) for place in range(len(gpus))] == [name for name, _ in ranks]
    return tuple(
        RankEvidence(
            rank=name,
            gpu=gpus[place] if paired else "",
            compute=reader.gauge(device, "step_compute_mean_s", name),
            wait=reader.gauge(device, "step_wait_mean_s", name),
        )
        for place, (name, device) in enumerate(ranks)
    )


def _own(devices: Sequence[Device], engine: Device, since_ns: int) -> list[tuple[str, Device]]:
    newest: dict[str, Device] = {}
    for device in devices:
        name = device.tags.get("rank", "")
        if device.tags.get("engine") != engine.tags.get("engine") or device.last_ns <= since_ns:
            continue
        if name not in newest or device.last_ns >= newest[name].last_ns:
            newest[name] = device
    return sorted(newest.items(), key=lambda entry: (len(entry[0]), entry[0]))
