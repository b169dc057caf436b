"""The GPUs that the kernel driver has bound, read without NVML: known even when its library can't talk to the driver."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from agent import pci

FOLDER = Path("proc/driver/nvidia/gpus")  # one folder a GPU, named by its PCI address
UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", re.MULTILINE)
MINOR = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)


def read(root: Path) -> list[tuple[int, str, str]]:
    """(index, uuid, PCI address) in the order of PCI addresses, which is NVML's. `root` is the file system's.

    Left out: a GPU whose uuid the driver doesn't know yet, and one without its device file, which is another container's.
    """
    found: list[tuple[int, str, str]] = []
    for index, folder in enumerate(sorted((root / FOLDER).glob("*"))):
        with contextlib.suppress(OSError):
            text = (folder / "information").read_text("utf-8", "replace")
            uuid, minor = UUID.search(text), MINOR.search(text)
            if uuid is not None and minor is not None and (root / "dev" / f"nvidia{minor.group(1)}").exists():
                found.append((index, uuid.group(1), pci.normalised(folder.name)))
    return found
