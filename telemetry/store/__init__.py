"""Where samples are kept: one interface, several backends chosen by URL; every backend answers the same for the same data.

To add a backend: one file beside this one, one line in BACKENDS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from telemetry.store.interface import Column, Rejected, Spread, Store, StoreDown, StoreError, Survey, Where
from telemetry.store.sqlite import SqliteStore, path_of
from telemetry.store.victoriametrics import VictoriaStore


def _influxdb(url: str) -> Store:
    # its client library takes 0.2 s and 20 MB, which a host on the embedded store need not pay
    from telemetry.store.influxdb import InfluxStore

    return InfluxStore(url)


BACKENDS: Mapping[str, Callable[[str], Store]] = {
    "sqlite": SqliteStore,
    "influxdb": _influxdb,
    "influxdbs": _influxdb,
    "victoriametrics": VictoriaStore,
    "victoriametricss": VictoriaStore,
}


def open_store(url: str) -> Store:
    """The backend for `url`, such as sqlite:///var/lib/pairscope/store.db. StoreError names an unknown kind or unusable place."""
    scheme = url.split("://", 1)[0]
    backend = BACKENDS.get(scheme)
    if backend is None:
        known = ", ".join(f"{name}://" for name in BACKENDS)
        shown = (
            scheme if "@" not in scheme else f"***@{scheme.rpartition('@')[2]}"
        )  # the scheme may have been forgotten
        raise StoreError.of("store.failure.unknown_kind", store=public_url(url), kind=shown, known=known)
    return backend(url)


def _may_be_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # opening says what is wrong
        return True


def open_existing(url: str) -> Store | None:
    """As `open_store`, for who only reads: None where there is no such file or database, and none is made."""
    if url.startswith("sqlite://") and not _may_be_there(path_of(url)):
        return None
    store = open_store(url)
    try:
        if store.exists():
            return store
    except BaseException:
        store.close()
        raise
    store.close()
    return None


_NOT_THERE = ("store.failure.down", "store.failure.silent", "store.failure.hung_up")


def remedy_of(url: str, error: StoreError) -> str:
    """What helps, as a key of messages: to start the server, to correct what it refuses, or an address that can never work.

    Only with the last one the agent doesn't start; the others it tries again. Nothing is asked of a server.
    """
    if isinstance(error, StoreDown):
        return "doctor.store.down_remedy" if error.key in _NOT_THERE else "doctor.store.refused_remedy"
    if url.startswith("sqlite:"):
        return "doctor.store.unusable_remedy"
    try:
        open_store(url).close()
    except StoreError:
        return "doctor.store.unusable_remedy"
    return "doctor.store.refused_remedy"


def public_url(url: str) -> str:
    """`url` without user, password and options: fit for logs and pages. Raises for nothing, however odd."""
    scheme, found, rest = url.partition("://")
    place = re.split(r"[?#]", rest if found else scheme, maxsplit=1)[0]
    host = place.rpartition("@")[2] if "@" in place or "@" not in url else "***"  # a password may hold ? and #
    return f"{scheme}://{host}" if found else host


__all__ = [
    "BACKENDS",
    "Column",
    "Rejected",
    "Spread",
    "Store",
    "StoreDown",
    "StoreError",
    "Survey",
    "Where",
    "open_existing",
    "open_store",
    "public_url",
    "remedy_of",
]
