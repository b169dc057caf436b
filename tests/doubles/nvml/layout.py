"""The shared memory that drives the NVML double: one list makes the C header and the ctypes mirror, so they can't differ."""

from __future__ import annotations

import ctypes

MAX_GPUS = 16
MAX_XIDS = 256
MAX_FIELDS = 320  # field ids 0..319
MAX_PROCESSES = 32

FEATURES = (
    "handle",
    "uuid",
    "name",
    "brand",
    "utilization",
    "clock",
    "clock_max",
    "event_reasons",
    "throttle_reasons",
    "temperature",
    "temperature_v",
    "margin",
    "threshold",
    "pstate",
    "fan",
    "fan_v2",
    "memory",
    "memory_v2",
    "power_usage",
    "enforced_limit",
    "requested_limit",
    "default_limit",
    "energy",
    "field_values",
    "pcie_gen",
    "pcie_gen_max",
    "pcie_width",
    "pcie_width_max",
    "pcie_throughput",
    "pcie_replays",
    "ecc",
    "remapped_rows",
    "processes_v3",
    "processes_v2",
    "register_events",
    "gpm_support",
    "gpm_sample",
    "gpm_metrics",
    "gpm_mig_sample",
    "pci",
    "persistence",
    "mig_mode",
    "mig_handle",
    "gpu_instance",
)
"""What a GPU can be asked; each can be given an error of its own, and is counted."""

NO_HANG, SLEEP, UNINTERRUPTIBLE = 0, 1, 2
EVERY_FEATURE = -1
NO_INSTANCE = 2**32 - 1

INT, UINT, LONG, ULONG, DOUBLE = "int", "unsigned", "long long", "unsigned long long", "double"
Row = tuple[str, str, int]  # name, C type, count (0: not an array)

GPU: tuple[Row, ...] = (
    ("uuid", "char", 96),
    ("name", "char", 96),
    ("brand", INT, 0),
    ("fault", INT, 0),  # every call of this GPU returns it
    ("hang", INT, 0),
    ("hang_feature", INT, 0),
    ("latency_us", INT, 0),  # of every call
    ("feature_code", INT, len(FEATURES)),
    ("feature_calls", ULONG, len(FEATURES)),
    ("gpu_util", UINT, 0),
    ("mem_util", UINT, 0),
    ("clock", UINT, 4),  # by nvmlClockType_t
    ("clock_max", UINT, 4),
    ("reasons", ULONG, 0),
    ("temperature", INT, 0),
    ("margin", INT, 0),
    ("threshold", UINT, 8),  # by nvmlTemperatureThresholds_t
    ("threshold_code", INT, 8),
    ("pstate", UINT, 0),
    ("fan", UINT, 0),
    ("mem_total", ULONG, 0),
    ("mem_reserved", ULONG, 0),
    ("mem_used", ULONG, 0),
    ("power_mw", UINT, 0),
    ("enforced_mw", UINT, 0),
    ("requested_mw", UINT, 0),
    ("default_mw", UINT, 0),
    ("energy_mj", ULONG, 0),
    ("pcie_gen", UINT, 0),
    ("pcie_gen_max", UINT, 0),
    ("pcie_width", UINT, 0),
    ("pcie_width_max", UINT, 0),
    ("pcie_tx_kib", UINT, 0),
    ("pcie_rx_kib", UINT, 0),
    ("pcie_replays", UINT, 0),
    ("ecc_corrected", ULONG, 0),
    ("ecc_uncorrected", ULONG, 0),
    ("remap_corrected", UINT, 0),
    ("remap_uncorrected", UINT, 0),
    ("remap_pending", UINT, 0),
    ("remap_failed", UINT, 0),
    ("process_count", UINT, 0),
    ("pids", UINT, MAX_PROCESSES),
    ("process_layout", INT, 0),  # 1: the third version's records are 8 bytes longer than the header says
    ("pci_domain", UINT, 0),
    ("pci_bus", UINT, 0),
    ("pci_device", UINT, 0),
    ("persistence", UINT, 0),
    ("module_average_mw", UINT, 0),  # fields 185 and 186 of scope 1; 0 for none
    ("module_instant_mw", UINT, 0),
    ("mig_mode", UINT, 0),
    ("mig_room", UINT, 0),  # how many instances the card could have
    ("mig_first", INT, 0),  # its instances are the gpu[] from here; a gap where gpu_instance is NO_INSTANCE
    ("gpu_instance", UINT, 0),
    ("gpm_supported", UINT, 0),
    ("gpm_sm", DOUBLE, 0),
    ("gpm_tensor", DOUBLE, 0),
    ("gpm_dram", DOUBLE, 0),
    ("gpm_graphics", DOUBLE, 0),
    ("gpm_code", INT, 0),  # nvmlReturn of each metric
    ("field_strict", INT, 0),  # one unknown id (field_code 2) fails the whole call
    ("field_type", INT, MAX_FIELDS),  # nvmlValueType_t
    ("field_code", INT, MAX_FIELDS),
    ("field_bits", ULONG, MAX_FIELDS),  # the union's eight bytes
)

HEAD: tuple[Row, ...] = (
    ("driver_version", INT, 0),
    ("driver_text", "char", 80),
    ("init_code", INT, 0),
    ("init_hang", INT, 0),
    ("init_calls", ULONG, 0),
    ("generation", ULONG, 0),  # a new one makes every handle and the initialisation of before void
    ("count_code", INT, 0),
    ("gpu_count", INT, 0),
    ("pcie_sleep_us", INT, 0),
    ("xid_head", ULONG, 0),
    ("xid_gpu", INT, MAX_XIDS),
    ("xid_code", ULONG, MAX_XIDS),
    ("xid_type", ULONG, MAX_XIDS),
)

_CTYPES = {
    "char": ctypes.c_char,
    INT: ctypes.c_int,
    UINT: ctypes.c_uint,
    LONG: ctypes.c_longlong,
    ULONG: ctypes.c_ulonglong,
    DOUBLE: ctypes.c_double,
}


def _mirror(rows: tuple[Row, ...]) -> list[tuple[str, type]]:
    return [(name, _CTYPES[kind] * count if count else _CTYPES[kind]) for name, kind, count in rows]


class GpuState(ctypes.Structure):
    _fields_ = _mirror(GPU)


class State(ctypes.Structure):
    _fields_ = [*_mirror(HEAD), ("gpu", GpuState * MAX_GPUS)]


def _struct(name: str, rows: tuple[Row, ...], more: str = "") -> str:
    members = "".join(f"  {kind} {field}{f'[{count}]' if count else ''};\n" for field, kind, count in rows)
    return f"typedef struct {{\n{members}{more}}} {name};\n"


def header() -> str:
    """The C side of the layout, with checks that both compilers agree on its size."""
    limits = {
        "MAX_GPUS": MAX_GPUS,
        "MAX_XIDS": MAX_XIDS,
        "MAX_FIELDS": MAX_FIELDS,
        "MAX_PROCESSES": MAX_PROCESSES,
        "HANG_UNINTERRUPTIBLE": UNINTERRUPTIBLE,
        "EVERY_FEATURE": EVERY_FEATURE,
        "NO_INSTANCE": f"{NO_INSTANCE}u",
    }
    defines = "".join(f"#define {name} ({value})\n" for name, value in limits.items())
    features = "".join(f"#define F_{name.upper()} ({number})\n" for number, name in enumerate(FEATURES))
    checks = (
        f'_Static_assert(sizeof(GpuState) == {ctypes.sizeof(GpuState)}, "GpuState");\n'
        f'_Static_assert(sizeof(State) == {ctypes.sizeof(State)}, "State");\n'
    )
    return f"{defines}{features}{_struct('GpuState', GPU)}{_struct('State', HEAD, '  GpuState gpu[MAX_GPUS];')}{checks}"
