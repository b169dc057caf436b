"""The agent's settings: which host this is, where samples go, and which engines run here."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


METRICS_PATHS = ("/prometheus/metrics", "/v1/metrics", "/metrics")
"""Where engines have their metrics."""


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """One engine of this host: hosted (started and restarted by the agent) when `command` is given, else only watched.

    `url` is the engine's base address; `gpus` names its GPUs by index, joined by "+" ("0+1"), and a hosted command sees
    only these. `kind` is the engine's name (pairscope, vllm, sglang ...) or "auto". `api_key` is for engines that guard their
    metrics. `probe_every_s`: ask it for one token that often; 0 for never. ValueError names what is wrong.
    """

    name: str
    url: str
    kind: str = "auto"
    command: tuple[str, ...] | None = None
    gpus: str = ""
    api_key: str = field(default="", repr=False)
    probe_every_s: float = 0.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"engine name {self.name!r}: use letters, digits, '.', '_' and '-'")
        if not _is_http(self.url):
            shown = _without_user(self.url)
            raise ValueError(f"engine {self.name}: url {shown!r} is not an http:// or https:// address")
        if "@" in urlsplit(self.url).netloc:  # this address is shown to everybody who asks what runs here
            raise ValueError(
                f"engine {self.name}: url {_without_user(self.url)!r} holds a user; use api_key for a guarded engine"
            )
        if self.command is not None and not self.command:
            raise ValueError(
                f"engine {self.name}: command is empty; give a program, or leave command out to only watch"
            )
        if not re.fullmatch(r"[!-~]*", self.api_key, re.ASCII):
            raise ValueError(f"engine {self.name}: api_key holds spaces or characters that no HTTP header can carry")
        if self.gpus and not re.fullmatch(r"\d+(\+\d+)*", self.gpus, re.ASCII):
            raise ValueError(f'engine {self.name}: gpus {self.gpus!r} is not indexes joined by "+", such as "0+1"')
        if self.probe_every_s and not 1 <= self.probe_every_s <= 86400:
            raise ValueError(
                f"engine {self.name}: probe_every_s {self.probe_every_s}: use 1 to 86400 seconds, or 0 for never"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; a loopback host by any of its names is one."""
        parts = urlsplit(self.url)
        host = (parts.hostname or "").lower()
        return "localhost" if _is_loopback(host) else host, parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def base_url(self) -> str:
        """The address without a trailing slash or the path of its metrics, which people paste along."""
        url = self.url.rstrip("/")
        pasted = next((path for path in METRICS_PATHS if url.endswith(path)), "")
        return url.removesuffix(pasted).rstrip("/")


@dataclass(frozen=True, slots=True)
class BmcTarget:
    """This host's board management controller, for power supplies, fans and inlet air.

    `url`: https://bmc.example is Redfish, ipmi://bmc.example IPMI over LAN, ipmi: IPMI through this host's own /dev/ipmi0.
    TLS is verified against the system's authorities, `ca_file`, or the certificate's own `fingerprint_sha256` (pinned);
    `verify_tls = false` is for a closed management network. `redundancy` is how many supplies may fail: "auto" (what the BMC
    says), "none", "N+1", "N+2" or "A/B" (two feeds, `feed_b` names the supplies of the second). ValueError names what is wrong.
    """

    url: str
    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    fingerprint_sha256: str = ""
    verify_tls: bool = True
    every_s: float = 30.0
    deadline_s: float = 10.0
    redundancy: str = "auto"
    feed_b: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition(":")
        try:
            parts = urlsplit(self.url)
            usable = bool(parts.hostname) and parts.port != 0 and parts.username is None and parts.password is None
        except ValueError:
            usable = False
        if scheme not in ("http", "https", "ipmi") or not (usable or (scheme == "ipmi" and not rest)):
            raise ValueError(
                f"bmc url {_without_user(self.url)!r}: use https://HOST (Redfish), ipmi://HOST, or ipmi: for this host's own;"
                " user and password have keys of their own"
            )
        if scheme == "http" and not _is_loopback(urlsplit(self.url).hostname or ""):
            raise ValueError(f"bmc url {self.url!r}: a password would cross the network in clear; use https://")
        if self.fingerprint_sha256 and not re.fullmatch(
            r"[0-9a-fA-F]{64}", self.fingerprint_sha256.replace(":", ""), re.ASCII
        ):
            raise ValueError("bmc fingerprint_sha256: 64 hexadecimal digits, colons allowed")
        if not 5 <= self.every_s <= 3600:
            raise ValueError(f"bmc every_s {self.every_s}: use 5 to 3600 seconds")
        if not 1 <= self.deadline_s <= 300:
            raise ValueError(f"bmc deadline_s {self.deadline_s}: use 1 to 300 seconds")
        if self.redundancy not in REDUNDANCIES:
            raise ValueError(f"bmc redundancy {self.redundancy!r}: use {', '.join(REDUNDANCIES)}")
        if self.redundancy == "A/B" and not self.feed_b:
            raise ValueError('bmc redundancy "A/B" needs feed_b: the names of the supplies on the second feed')


REDUNDANCIES = ("auto", "none", "N+1", "N+2", "A/B")
PDU_KINDS = ("auto", "apc", "servertech", "raritan")


@dataclass(frozen=True, slots=True)
class PduTarget:
    """One power distribution unit, read over SNMP: v2c with `community`, or v3 where `user` is given.

    `circuit` is the tag of its samples. `rating_a` is the breaker's rating: it goes before what the PDU says of itself, which may
    be derated already; the load is judged against 80 % of it. `voltage_v` is for PDUs that don't measure it.
    ValueError names what is wrong.
    """

    name: str
    host: str
    port: int = 161
    kind: str = "auto"
    circuit: str = ""
    community: str = field(default="", repr=False)
    user: str = ""
    auth_password: str = field(default="", repr=False)
    privacy_password: str = field(default="", repr=False)
    rating_a: float | None = None
    voltage_v: float | None = None
    every_s: float = 30.0
    deadline_s: float = 5.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"pdu name {self.name!r}: use letters, digits, '.', '_' and '-'")
        if not self.host or not re.fullmatch(r"[A-Za-z0-9._:%-]{1,255}", self.host, re.ASCII):
            raise ValueError(f"pdu {self.name}: host {self.host!r} is not a host name or address")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"pdu {self.name}: port {self.port}: use 1 to 65535")
        if self.kind not in PDU_KINDS:
            raise ValueError(f"pdu {self.name}: kind {self.kind!r}: use {', '.join(PDU_KINDS)}")
        if bool(self.community) == bool(self.user):
            raise ValueError(f"pdu {self.name}: give either community (SNMP v2c) or user (SNMP v3)")
        if self.rating_a is not None and not 0 < self.rating_a <= 10_000:
            raise ValueError(f"pdu {self.name}: rating_a {self.rating_a}: use amperes above 0")
        if self.voltage_v is not None and not 0 < self.voltage_v <= 1000:
            raise ValueError(f"pdu {self.name}: voltage_v {self.voltage_v}: use volts above 0")
        if not 5 <= self.every_s <= 3600:
            raise ValueError(f"pdu {self.name}: every_s {self.every_s}: use 5 to 3600 seconds")
        if not 1 <= self.deadline_s <= 60:
            raise ValueError(f"pdu {self.name}: deadline_s {self.deadline_s}: use 1 to 60 seconds")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`interval_s` is the tick; `host`/`port` the agent's own /metrics and /healthz.

    `nvml`, `amd`, `ascend`: whether to look for such devices through their library. `dcgm_url` and `ascend_url` are exporters to
    scrape instead, or besides. `gpus_expected`: how many GPUs this host should have; by default as many as were ever seen.
    ValueError names what is wrong.
    """

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
    keep_1min_days: float = 90.0  # what was drawn together over minutes
    keep_15min_days: float = 730.0
    engines: tuple[EngineTarget, ...] = field(default=())
    nvml: bool = True
    amd: bool = True
    ascend: bool = True
    dcgm_url: str = ""
    ascend_url: str = ""
    gpus_expected: int | None = None
    bmc: BmcTarget | None = None
    pdus: tuple[PduTarget, ...] = ()
    language: str = "en"

    def __post_init__(self) -> None:
        if not 0.05 <= self.interval_s <= 60:
            raise ValueError(f"interval_s {self.interval_s}: use 0.05 to 60 seconds")
        for key in ("keep_days", "keep_1min_days", "keep_15min_days"):
            if not 0.01 <= getattr(self, key) <= 36500:
                raise ValueError(f"{key} {getattr(self, key)}: use 0.01 to 36500 days")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port}: use 0 to 65535")
        for what, names in (("engine", [e.name for e in self.engines]), ("pdu", [pdu.name for pdu in self.pdus])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} name {twice[0]!r} is used twice; names tell {what}s apart")
        hosted = [engine for engine in self.engines if engine.command]
        for number, engine in enumerate(hosted):
            for other in hosted[:number]:
                if engine.address == other.address:
                    raise ValueError(
                        f"engines {other.name} and {engine.name} would both listen at {engine.base_url};"
                        " give one of them another port in its command and its url"
                    )
        for key in ("dcgm_url", "ascend_url"):
            if getattr(self, key) and not _is_http(getattr(self, key)):
                raise ValueError(f"{key} {_without_user(getattr(self, key))!r} is not an http:// or https:// address")
        if self.gpus_expected is not None and not 0 <= self.gpus_expected <= 64:
            raise ValueError(f"gpus_expected {self.gpus_expected}: use 0 to 64")

    @property
    def tags(self) -> dict[str, str]:
        """The tags of every sample of this host."""
        places = {"rack": self.rack, "circuit": self.circuit, "cluster": self.cluster}
        return {"node": self.node or socket.gethostname(), **{name: place for name, place in places.items() if place}}


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if not url.isprintable() or " " in url:
            return False
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _without_user(url: str) -> str:
    """The address as it may be shown: what stands before an @ may be a password."""
    scheme, found, rest = url.partition("://")
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if found and "@" in rest else url
