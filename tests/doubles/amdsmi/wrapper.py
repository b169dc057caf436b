"""What the installed amdsmi package wants of its library: the symbols that it looks up at import, and its structures.

The package's wrapper module is run under another name with a loader that only notes what is asked of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import types
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock


class _Noting:
    """A library that has everything."""

    def __init__(self) -> None:
        self.symbols: list[str] = []

    def __getattr__(self, symbol: str) -> types.SimpleNamespace:
        self.symbols.append(symbol)
        return types.SimpleNamespace()


@cache
def wanted() -> tuple[tuple[str, ...], Any]:
    """(symbols, wrapper module)."""
    package = importlib.util.find_spec("amdsmi")
    assert package is not None and package.origin is not None
    path = Path(package.origin).with_name("amdsmi_wrapper.py")
    spec = importlib.util.spec_from_file_location("amdsmi_wrapper_of_the_double", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    library = _Noting()
    with mock.patch.object(ctypes, "CDLL", lambda _location: library):
        spec.loader.exec_module(module)
    return tuple(dict.fromkeys(library.symbols)), module


def structure(name: str) -> type[ctypes.Structure]:
    """One of the package's structures, such as amdsmi_power_info_t."""
    found: type[ctypes.Structure] = getattr(wanted()[1], name)
    return found
