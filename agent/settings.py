"""The agent's settings: which host this is, where samples go, and which engines run here."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """One engine of this host: hosted (started and restarted by the agent) when `command` is given, else only watched.

    `url` is the engine's base address; `gpus` names its GPUs by index, joined by "+" ("0+1"), and a hosted command sees
    only these. `kind` is the engine's name (pairscope, vllm) or "auto". ValueError names what is wrong.
    """

    name: str
    url: str
    kind: str = "auto"
    command: tuple[str, ...] | None = None
    gpus: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"engine name {self.name!r}: use letters, digits, '.', '_' and '-'")
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"engine {self.name}: url {self.url!r} is not an http:// or https:// address")
        if self.command is not None and not self.command:
            raise ValueError(
                f"engine {self.name}: command is empty; give a program, or leave command out to only watch"
            )
        if self.gpus and not re.fullmatch(r"\d+(\+\d+)*", self.gpus, re.ASCII):
            raise ValueError(f'engine {self.name}: gpus {self.gpus!r} is not indexes joined by "+", such as "0+1"')

    @property
    def base_url(self) -> str:
        """The address without a trailing slash or /metrics, which people paste along."""
        return self.url.rstrip("/").removesuffix("/metrics").rstrip("/")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`interval_s` is the tick; `host`/`port` the agent's own /metrics and /healthz. ValueError names what is wrong."""

    state_dir: Path
    store_url: str
    node: str = ""
    rack: str | None = None
    circuit: str | None = None
    cluster: str | None = None
    interval_s: float = 1.0
    host: str = "127.0.0.1"
    port: int = 8602
    allow_remote: bool = False
    keep_days: float = 7.0  # raw samples in the embedded store
    engines: tuple[EngineTarget, ...] = field(default=())
    language: str = "en"

    def __post_init__(self) -> None:
        if not 0.05 <= self.interval_s <= 60:
            raise ValueError(f"interval_s {self.interval_s}: use 0.05 to 60 seconds")
        if not 0.01 <= self.keep_days <= 36500:
            raise ValueError(f"keep_days {self.keep_days}: use 0.01 to 36500 days")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port}: use 0 to 65535")
        names = [engine.name for engine in self.engines]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"engine name {twice[0]!r} is used twice; names tell engines apart")

    @property
    def tags(self) -> dict[str, str]:
        """The tags of every sample of this host."""
        places = {"rack": self.rack, "circuit": self.circuit, "cluster": self.cluster}
        return {"node": self.node or socket.gethostname(), **{name: place for name, place in places.items() if place}}
