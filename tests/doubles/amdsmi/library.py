"""Builds the double with the compiler at hand: `lib/libamd_smi.so` in a folder for ROCM_PATH."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.doubles.amdsmi.layout import header
from tests.doubles.amdsmi.wrapper import wanted

SOURCE = Path(__file__).with_name("amdsmi.c")
FILE = Path("lib/libamd_smi.so")


def build(compiler: str, folder: Path, *, without: Iterable[str] = ()) -> Path:
    """The library in `folder`, lacking the symbols `without`. What the double doesn't act out says that it isn't supported."""
    made = folder / FILE
    made.parent.mkdir(parents=True, exist_ok=True)
    (folder / "state.h").write_text(header())
    acted = set(re.findall(r"^int (amdsmi_\w+)\(", SOURCE.read_text(), re.MULTILINE))
    stubs = "".join(f"int {symbol}(void) {{ return 2; }}\n" for symbol in wanted()[0] if symbol not in acted)
    (folder / "stubs.c").write_text(stubs)
    hidden = "".join(f"{symbol};" for symbol in without)
    (folder / "symbols.map").write_text(f"{{ global: amdsmi_*; local: {hidden} *; }};")
    command = (compiler, "-shared", "-fPIC", "-O1", "-Wall", f"-I{folder}", "-o", str(made))
    link = (f"-Wl,-soname,{FILE.name}", f"-Wl,--version-script={folder / 'symbols.map'}")
    subprocess.run((*command, *link, str(SOURCE), str(folder / "stubs.c")), check=True)
    return folder
