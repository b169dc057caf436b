"""XID errors worth a name: what the driver's number means and what it asks for."""

from __future__ import annotations

NAMES = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup",
    48: "double-bit ECC error",
    62: "micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    154: "GPU recovery action changed",
    162: "power smoothing on",
    163: "power smoothing off",
}
NVLINK5 = range(144, 151)


def text_of(code: int) -> str:
    """One line for an event: number, name where known."""
    name = "NVLink error" if code in NVLINK5 else NAMES.get(code)
    return f"XID {code}: {name}" if name else f"XID {code}"
