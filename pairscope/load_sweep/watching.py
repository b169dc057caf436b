"""What an engine tells of itself while it is loaded, and what the agent's store holds of its cards meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from agent.collectors.dialects.dialect import first
from agent.collectors.dialects.registry import detect
from agent.exposition import Reader, TooLarge, Unreadable
from pairscope.load_sweep.knee import Point
from telemetry.sample import Sample
from telemetry.store import Store

EVERY_S = 1.0
MOST_METRICS = 8 << 20


@dataclass(slots=True)
class Metrics:
    """What /metrics told in one window: the KV use at each look, and preemptions from the first to the last one."""

    kv_used_pct: list[float] = field(default_factory=list)
    preemptions: list[float] = field(default_factory=list)

    @property
    def highest_kv_pct(self) -> float | None:
        return max(self.kv_used_pct, default=None)

    @property
    def preempted(self) -> int | None:
        seen = self.preemptions
        return int(max(0.0, seen[-1] - seen[0])) if len(seen) > 1 else None


async def watch(client: httpx.AsyncClient, base_url: str, metrics: Metrics) -> None:
    """Look until cancelled. An engine without metrics, or of no known kind, tells nothing."""
    while True:
        await look(client, base_url, metrics)
        await asyncio.sleep(EVERY_S)


async def look(client: httpx.AsyncClient, base_url: str, metrics: Metrics) -> None:
    reader, size = Reader(), 0
    try:
        async with client.stream("GET", f"{base_url}/metrics", timeout=5.0) as response:
            if response.status_code != 200:
                return
            async for piece in response.aiter_bytes():
                size += len(piece)
                if size > MOST_METRICS:
                    return
                reader.feed(piece)
        exposition = reader.close()
    except (httpx.HTTPError, TooLarge, Unreadable):
        return
    dialect = detect(exposition)
    if dialect is None:
        return
    exposition = dialect.plain(exposition)
    used = first(dialect.gauges.get("kv_used_pct", ()), exposition)
    if used is not None and dialect.kv_used_kind == "live" and (value := used.value(exposition)) is not None:
        metrics.kv_used_pct.append(value)
    counted = first(dialect.counters.get("preemptions_total", ()), exposition)
    if counted is not None and (value := counted.value(exposition)) is not None:
        metrics.preemptions.append(value)


def with_cards(point: Point, store: Store, node: str, start_ns: int, end_ns: int) -> Point:
    """The point with what the store holds of `node` in its window. Of several engines there nothing is told apart."""
    where = {"node": (node,)}
    cards = store.samples("gpu", start_ns=start_ns, end_ns=end_ns, where=where)
    engines = store.samples("engine", start_ns=start_ns, end_ns=end_ns, where=where)
    names = {sample.tags.get("engine", "") for sample in engines}
    if len(names) == 1:
        held = {sample.tags.get("gpus", "") for sample in engines} - {""}
        if len(held) == 1:
            wanted = set(held.pop().split("+"))
            cards = [sample for sample in cards if sample.tags.get("gpu") in wanted]
    by_card: dict[str, list[Sample]] = {}
    for sample in cards:
        by_card.setdefault(sample.tags.get("uuid") or sample.tags.get("gpu", ""), []).append(sample)
    kv = point.kv_used_pct
    if kv is None and len(names) == 1:
        live = [sample for sample in engines if sample.fields.get("kv_used_kind") == "live"]
        kv = max(_numbers(live, "kv_used_pct"), default=None)
    return dataclasses.replace(
        point,
        kv_used_pct=kv,
        gpu_mem_used_pct=_highest_share(by_card, "mem_used_bytes", "mem_total_bytes"),
        power_w=_power_w(by_card),
        power_used_pct=_highest_share(by_card, "power_w", "power_limit_w"),
    )


def _numbers(samples: Sequence[Sample], name: str) -> list[float]:
    return [float(value) for sample in samples if isinstance(value := sample.fields.get(name), int | float)]


def _power_w(by_card: Mapping[str, Sequence[Sample]]) -> float | None:
    """The mean of each card, all together; None unless every card tells it."""
    told = [_numbers(samples, "power_w") for samples in by_card.values()]
    return sum(sum(values) / len(values) for values in told) if told and all(told) else None


def _highest_share(by_card: Mapping[str, Sequence[Sample]], part: str, whole: str) -> float | None:
    """Of the card that is nearest to its own, in percent, each over the mean of the window."""
    shares = []
    for samples in by_card.values():
        parts, wholes = _numbers(samples, part), [value for value in _numbers(samples, whole) if value > 0]
        if parts and wholes:
            shares.append(100 * (sum(parts) / len(parts)) / wholes[-1])
    return max(shares, default=None)
