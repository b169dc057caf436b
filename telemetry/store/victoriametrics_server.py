"""Which VictoriaMetrics server a URL names, and what that says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from telemetry.store.failure import Target, check_options, parted, port_of
from telemetry.store.interface import StoreError
from telemetry.store.victoriametrics_query import DAY_MS

DEFAULT_PORT = 8428
OPTIONS = ("db", "token", "token_file", "ca_file", "verify")
_RETENTION = re.compile(r"(\d+(?:\.\d+)?)([hdwy]?)")
_RETENTION_MS = {"h": DAY_MS // 24, "d": DAY_MS, "w": 7 * DAY_MS, "y": 365 * DAY_MS, "": 31 * DAY_MS}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is; made from victoriametrics://[user:password@]host[:port][/prefix][?options]."""

    base: str  # http://host:port/prefix
    shown: str  # the URL without secrets, for messages
    db: str = ""  # the label `db` of all that is written and read, if any
    verify_tls: bool = True
    ca_file: str | None = None
    authorization: str = field(default="", repr=False)

    @property
    def target(self) -> Target:
        return Target(self.shown, self.base, "victoriametrics", "victoriametricss")


def parse(url: str) -> Address:
    """StoreError names what is wrong. Options: db, token, token_file, ca_file, verify=0; victoriametricss:// means TLS."""
    parts = parted(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    check_options(parts, options, OPTIONS)
    host = parts.hostname or ""
    port = port_of(parts, DEFAULT_PORT)
    prefix = parts.path.rstrip("/")
    name = f"[{host}]" if ":" in host else host
    shown = f"{parts.scheme}://{name}:{port}{prefix}"
    if not host:
        raise StoreError.of("store.failure.no_host", store=shown, kind=parts.scheme, port=DEFAULT_PORT)
    db = options.get("db", "")
    base = f"{'https' if parts.scheme == 'victoriametricss' else 'http'}://{name}:{port}{prefix}"
    target = Target(shown, base, "victoriametrics", "victoriametricss")
    ca_file = options.get("ca_file")
    target.check_ca_file(ca_file)
    return Address(
        base,
        shown + (f"?{urlencode({'db': db})}" if db else ""),
        db,
        options.get("verify", "1") not in ("0", "false", "no"),
        ca_file,
        target.authorization("Bearer", parts, options),
    )


@dataclass(frozen=True, slots=True)
class Server:
    """What the server says of itself; empty and None where it doesn't, such as behind a proxy."""

    version: str = ""
    retention: str = ""  # as its flag is written: 1 (months), 30d
    dedup: str = ""  # 0s when it is off
    is_read_only: bool = False
    size_bytes: int | None = None
    free_bytes: int | None = None
    started_s: float | None = None

    @property
    def retention_ms(self) -> int | None:
        found = _RETENTION.fullmatch(self.retention)
        return round(float(found[1]) * _RETENTION_MS[found[2]]) if found else None

    @property
    def is_deduplicating(self) -> bool:
        return self.dedup not in ("", "0", "0s", "0ms")
