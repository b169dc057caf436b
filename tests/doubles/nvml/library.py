"""Builds the double with the compiler at hand: `libnvidia-ml.so.1` in a folder for LD_LIBRARY_PATH."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.doubles.nvml.layout import header

SOURCE = Path(__file__).with_name("nvml.c")
FILE = "libnvidia-ml.so.1"


def build(compiler: str, folder: Path, *, version: int = 1, without: Iterable[str] = ()) -> Path:
    """The library in `folder`, for drivers of `version`, lacking the symbols `without`. Replaces a file atomically, as an upgrade does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.h").write_text(header())
    hidden = "".join(f"{symbol};" for symbol in without)
    (folder / "symbols.map").write_text(f"{{ global: nvml*; local: {hidden} *; }};")
    made = folder / "made.so"
    command = (compiler, "-shared", "-fPIC", "-O1", "-Wall", f"-DLIBRARY_VERSION={version}", f"-I{folder}")
    link = (f"-Wl,-soname,{FILE}", f"-Wl,--version-script={folder / 'symbols.map'}")
    subprocess.run((*command, *link, "-o", str(made), str(SOURCE)), check=True)
    made.replace(folder / FILE)
    return folder
