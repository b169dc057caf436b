"""Who is judged: one pair is an engine on a node with its GPUs, or a node alone when it has no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rules.thresholds import Bar
from rules.window import SECOND, Device, Window
from telemetry.catalogue import COMMON_TAGS, NOT_LIVE


@dataclass(frozen=True, slots=True)
class Pair:
    """`engine` is None for a node alone. `key` is stable over restarts and names the pair's memory."""

    key: str
    node: str
    subject: Mapping[str, str]  # tags of the verdict: node, rack, circuit, cluster, origin, engine
    engine: Device | None
    gpus: tuple[Device, ...]
    model: str  # empty for a node alone
    simulated: bool  # or replayed: no measurement of its time, and never compared with what is

    @property
    def kin(self) -> tuple[str, str, int, bool]:
        """Pairs with the same kin do the same work on as many GPUs, and may be compared."""
        kind = self.engine.tags.get("kind", "") if self.engine else ""
        return self.model, kind, len(self.gpus), self.simulated


def pairs_of(window: Window) -> list[Pair]:
    """Every pair that the window holds, by node and engine.

    An engine's `gpus` tag ("0+1") names its GPUs; without it the engine has those that no other engine of its node names.
    GPUs that belong to no engine are judged with the node alone. One that was not heard of for a quarter of an hour, on a node that
    reports, was taken out: it is nobody's.
    """
    found: list[Pair] = []
    for node in sorted(window.nodes()):
        last_ns = max((device.last_ns for device in window.all_devices(node)), default=0)
        gpus = {
            device.tags.get("gpu", ""): device
            for device in _newest(window.devices(node, "gpu"), "gpu")
            if not Bar().reached("telemetry.gone_s", (last_ns - device.last_ns) / SECOND)
        }
        engines = _newest(window.devices(node, "engine"), "engine")
        named = {index for engine in engines for index in _indices(engine)}
        for engine in engines:
            mine = _indices(engine) or tuple(index for index in gpus if index not in named)
            own = tuple(gpus[index] for index in sorted(mine, key=_number) if index in gpus)
            found.append(_pair(node, engine, own))
        orphans = tuple(gpus[index] for index in sorted(gpus, key=_number) if index not in named)
        unnamed = any(not _indices(engine) for engine in engines)
        if not engines or (orphans and not unnamed):
            found.append(_pair(node, None, orphans, window))
    return found


def _newest(devices: Sequence[Device], tag: str) -> list[Device]:
    """One device a tag value, the one heard last: a series whose other tags changed is the same thing."""
    newest: dict[str, Device] = {}
    for device in devices:
        name = device.tags.get(tag, "")
        if name not in newest or device.last_ns >= newest[name].last_ns:
            newest[name] = device
    return list(newest.values())


def _indices(engine: Device) -> tuple[str, ...]:
    return tuple(index for index in engine.tags.get("gpus", "").split("+") if index)


def _number(index: str) -> tuple[int, str]:
    """By number where it is one; a name from outside may be digits that int() refuses."""
    return (int(index), "") if index.isascii() and index.isdigit() and len(index) <= 9 else (1 << 30, index)


def _pair(node: str, engine: Device | None, gpus: tuple[Device, ...], window: Window | None = None) -> Pair:
    source = engine or (gpus[0] if gpus else None)
    if source is None and window is not None:
        for measurement in ("host", "power", "thermal", "psu", "circuit"):
            devices = window.devices(node, measurement)
            if devices:
                source = devices[0]
                break
    tags = source.tags if source else {"node": node}
    subject = {name: tags[name] for name in COMMON_TAGS if name in tags}
    name, model = "", ""
    if engine is not None:
        name, model = engine.tags.get("engine", ""), engine.tags.get("model", "")
        subject["engine"] = name
    return Pair(
        key="\x1f".join((node, name, model)),
        node=node,
        subject=subject,
        engine=engine,
        gpus=gpus,
        model=model,
        simulated=tags.get("origin") in NOT_LIVE,
    )
