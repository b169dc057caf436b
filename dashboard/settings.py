"""What the dashboard may be told: where the data is, where it listens, how often it looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """`insecure` allows a bind that other machines can reach although the page asks nobody for a password."""

    store_url: str = ""
    host: str = "127.0.0.1"
    port: int = 8600
    refresh_s: float = 2.0  # the store is asked at most this often, whoever looks
    language: str = "en"  # of a page whose address names none
    stale_s: float = 15.0  # three 5 s intervals: older than this is not fresh
    forget_s: float = 86_400.0  # a pair that has been silent for longer is no longer listed
    threads: int = 8
    body_limit_bytes: int = 65_536  # of a request; the page itself sends only addresses
    allowed_hosts: tuple[str, ...] = ()  # further names under which a proxy asks for the page, while bound to loopback
    insecure: bool = False
