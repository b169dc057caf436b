"""NVML return codes by number, and what each says about a reading, a GPU or the driver."""

from __future__ import annotations

from agent.driver import DriverCodes
from telemetry.catalogue import GPU_STATES
from telemetry.messages import catalogue, say

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
OPERATING_SYSTEM = 17
LIB_RM_VERSION_MISMATCH = 18
NO_DATA = 21
VGPU_ECC_NOT_SUPPORTED = 22
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
NOT_READY = 27
GPU_NOT_FOUND = 28
UNKNOWN = 999

REFUSALS = frozenset(
    {
        NOT_SUPPORTED,
        NO_PERMISSION,
        FUNCTION_NOT_FOUND,
        VGPU_ECC_NOT_SUPPORTED,
        ARGUMENT_VERSION_MISMATCH,
        DEPRECATED,
    }
)
"""This card or driver doesn't give the value: absent, not an error, and not asked again for a while."""

QUIET = frozenset({NOT_FOUND, NO_DATA})
"""No value just now: absent, not an error, asked again next time."""

GPU_FAULTS = frozenset({GPU_IS_LOST, RESET_REQUIRED})
"""The whole GPU is out: nothing else of it is worth a driver call in this sweep."""

DRIVER_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED})
"""The connection to the driver is void: the library has to be initialised again."""

OK = GPU_STATES.index("ok")
LOST = GPU_STATES.index("lost")
HUNG = GPU_STATES.index("hung")
DRIVER_MISMATCH = GPU_STATES.index("driver_mismatch")
ABSENT = GPU_STATES.index("absent")

_STATES = {
    SUCCESS: OK,
    UNINITIALIZED: ABSENT,
    NO_PERMISSION: GPU_STATES.index("no_permission"),
    OPERATING_SYSTEM: GPU_STATES.index("no_permission"),
    NOT_FOUND: ABSENT,
    DRIVER_NOT_LOADED: ABSENT,
    LIBRARY_NOT_FOUND: ABSENT,
    GPU_IS_LOST: LOST,
    RESET_REQUIRED: GPU_STATES.index("reset_required"),
    LIB_RM_VERSION_MISMATCH: DRIVER_MISMATCH,
    NOT_READY: ABSENT,
    GPU_NOT_FOUND: ABSENT,
}


def state_of(code: int) -> int:
    """The `state` of a GPU that answers everything with this code; a code without a meaning of its own counts as lost."""
    return _STATES.get(code, LOST)


def name_of(code: int, language: str = "en") -> str:
    """What a code means, in words."""
    key = f"gpu.code.{code}"
    return say(key, language) if key in catalogue() else say("gpu.code.other", language, code=code)


CODES = DriverCodes(
    library="NVML",
    timeout=TIMEOUT,
    missing=GPU_NOT_FOUND,
    gone=UNINITIALIZED,
    stale=LIB_RM_VERSION_MISMATCH,
    stale_remedy="reload the driver or reboot",
    quiet=frozenset({DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND}),
    state_of=state_of,
    name_of=name_of,
)
