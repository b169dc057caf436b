"""The shared memory that drives the double: one list makes the C header and the ctypes mirror, so they can't differ.

A structure of AMD's lies in it as the package defines it: the library hands out its bytes.
"""

from __future__ import annotations

import ctypes

from tests.doubles.amdsmi.wrapper import structure

MAX_GPUS = 8
MAX_PROCESSES = 4
SENSORS, METRICS = 8, 16  # temperatures are at sensor * METRICS + metric

FEATURES = (
    *("bdf", "uuid", "asic", "driver", "activity", "vram_usage", "memory_total", "memory_usage", "temperature"),
    *("power", "power_cap", "energy", "clock", "metrics", "pcie", "replays", "total_ecc", "block_ecc", "processes"),
    *("violation_status", "pci_throughput"),
)
"""What a GPU can be asked; each can be given a status code of its own, and is counted."""

EVERY_FEATURE = -1

INT, UINT, LONG, ULONG, FLOAT = "int", "unsigned", "long long", "unsigned long long", "float"
Row = tuple[str, str, int]  # name, C type or AMD structure, count (0: not an array)

GPU: tuple[Row, ...] = (
    ("uuid", "char", 64),
    ("bdf", ULONG, 0),
    ("fault", INT, 0),  # every call of this GPU returns it
    ("hang", INT, 0),
    ("hang_feature", INT, 0),
    ("latency_us", INT, 0),  # of every call
    ("feature_code", INT, len(FEATURES)),
    ("feature_calls", ULONG, len(FEATURES)),
    ("memory_total", ULONG, 0),
    ("memory_used", ULONG, 0),
    ("temperature", LONG, SENSORS * METRICS),
    ("temperature_code", INT, SENSORS * METRICS),
    ("energy", ULONG, 0),
    ("energy_resolution", FLOAT, 0),
    ("replays", ULONG, 0),
    ("process_count", UINT, 0),
    ("asic", "amdsmi_asic_info_t", 0),
    ("driver", "amdsmi_driver_info_t", 0),
    ("activity", "amdsmi_engine_usage_t", 0),
    ("vram_usage", "amdsmi_vram_usage_t", 0),
    ("power", "amdsmi_power_info_t", 0),
    ("power_cap", "amdsmi_power_cap_info_t", 0),
    ("clock_gfx", "amdsmi_clk_info_t", 0),
    ("clock_mem", "amdsmi_clk_info_t", 0),
    ("metrics", "amdsmi_gpu_metrics_t", 0),
    ("pcie", "amdsmi_pcie_info_t", 0),
    ("total_ecc", "amdsmi_error_count_t", 0),
    ("umc_ecc", "amdsmi_error_count_t", 0),  # of the memory controllers; every block but these two refuses
    ("gfx_ecc", "amdsmi_error_count_t", 0),
    ("processes", "amdsmi_proc_info_t", MAX_PROCESSES),
)

HEAD: tuple[Row, ...] = (
    ("init_code", INT, 0),
    ("init_hang", INT, 0),
    ("init_crash", INT, 0),
    ("init_calls", ULONG, 0),
    ("generation", ULONG, 0),  # a new one makes the initialisation of before void
    ("gpu_count", INT, 0),
)

_CTYPES = {
    "char": ctypes.c_char,
    INT: ctypes.c_int,
    UINT: ctypes.c_uint,
    LONG: ctypes.c_longlong,
    ULONG: ctypes.c_ulonglong,
    FLOAT: ctypes.c_float,
}


def _ctype(kind: str) -> type:
    return _CTYPES.get(kind) or structure(kind)


def _mirror(rows: tuple[Row, ...]) -> list[tuple[str, type]]:
    return [(name, _ctype(kind) * count if count else _ctype(kind)) for name, kind, count in rows]


class GpuState(ctypes.Structure):
    _fields_ = _mirror(GPU)


class State(ctypes.Structure):
    _fields_ = [*_mirror(HEAD), ("gpu", GpuState * MAX_GPUS)]


def _member(name: str, kind: str, count: int) -> str:
    if kind in _CTYPES:
        return f"  {kind} {name}{f'[{count}]' if count else ''};\n"
    return f"  unsigned char {name}[{ctypes.sizeof(structure(kind)) * max(1, count)}];\n"


def _struct(name: str, rows: tuple[Row, ...], more: str = "") -> str:
    return f"typedef struct {{\n{''.join(_member(*row) for row in rows)}{more}}} {name};\n"


def header() -> str:
    """The C side of the layout, with checks that both compilers agree on its size."""
    limits = {
        "MAX_GPUS": MAX_GPUS,
        "MAX_PROCESSES": MAX_PROCESSES,
        "SENSORS": SENSORS,
        "METRICS": METRICS,
        "EVERY_FEATURE": EVERY_FEATURE,
        "PROCESS_BYTES": ctypes.sizeof(structure("amdsmi_proc_info_t")),
    }
    defines = "".join(f"#define {name} ({value})\n" for name, value in limits.items())
    features = "".join(f"#define F_{name.upper()} ({number})\n" for number, name in enumerate(FEATURES))
    checks = (
        f'_Static_assert(sizeof(GpuState) == {ctypes.sizeof(GpuState)}, "GpuState");\n'
        f'_Static_assert(sizeof(State) == {ctypes.sizeof(State)}, "State");\n'
    )
    return f"{defines}{features}{_struct('GpuState', GPU)}{_struct('State', HEAD, '  GpuState gpu[MAX_GPUS];')}{checks}"
