"""Where samples are kept: one interface, several backends chosen by URL; every backend answers the same for the same data.

To add a backend: one file beside this one, one line in BACKENDS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from telemetry.store.interface import Column, Rejected, Store, StoreDown, StoreError, Where
from telemetry.store.sqlite import SqliteStore

BACKENDS: Mapping[str, Callable[[str], Store]] = {"sqlite": SqliteStore}


def open_store(url: str) -> Store:
    """The backend for `url`, such as sqlite:///var/lib/pairscope/store.db. StoreError names an unknown kind or unusable place."""
    scheme = url.split("://", 1)[0]
    backend = BACKENDS.get(scheme)
    if backend is None:
        known = ", ".join(f"{name}://" for name in BACKENDS)
        raise StoreError(f"store {url!r}: unknown kind {scheme!r}; use one of {known}")
    return backend(url)


__all__ = ["BACKENDS", "Column", "Rejected", "Store", "StoreDown", "StoreError", "Where", "open_store"]
