"""Whether this host has anything of AMD's, told without loading it; and loading it, in the reader process alone."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.amd_smi import codes

PACKAGE = "amdsmi"
FILE = "libamd_smi.so"
AMD_VENDOR_ID = "0x1002"  # PCI-SIG
FOLDERS = ("opt/rocm/lib", "usr/lib", "usr/lib64", "usr/local/lib", "usr/lib/x86_64-linux-gnu")
_CARD = re.compile(r"card\d+")


def devices(root: Path) -> int:
    """How many AMD GPUs the kernel shows. `root` is the file system's."""
    found: set[Path] = set()
    for card in (root / "sys/class/drm").glob("card*"):
        with contextlib.suppress(OSError):
            if _CARD.fullmatch(card.name) and (card / "device/vendor").read_text("ascii", "replace").strip() == (
                AMD_VENDOR_ID
            ):
                found.add((card / "device").resolve())
    return len(found)


def has_library(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether the library is where it is usually found; the loader may know of more places."""
    homes = [environment[name] for name in ("ROCM_HOME", "ROCM_PATH") if environment.get(name)]
    folders = [Path(home) / "lib" for home in homes]
    folders += [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders += [root / folder for folder in FOLDERS]
    return any((folder / FILE).exists() for folder in folders)


def has_package() -> bool:
    """Whether the Python package is installed; doesn't import it."""
    return importlib.util.find_spec(PACKAGE) is not None


def load() -> tuple[Any, int]:
    """The package's module and 0, or None and what is wrong as a status code. Never prints, never raises.

    Without the library the import fails with KeyError after a print to standard output; with a library that is older than the
    package, with AttributeError.
    """
    if not has_package():
        return None, codes.NO_PACKAGE
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(PACKAGE), codes.SUCCESS
    except AttributeError:
        return None, codes.FAIL_LOAD_SYMBOL
    except Exception:
        return None, codes.FAIL_LOAD_MODULE
