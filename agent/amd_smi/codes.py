"""AMD SMI status codes by number (amdsmi_status_t), and what each says about a reading, a GPU or the driver."""

from __future__ import annotations

from agent.driver import ABSENT, HUNG, LOST, NO_PERMISSION, OK, DriverCodes
from telemetry.catalogue import GPU_STATES
from telemetry.messages import say

SUCCESS = 0
INVAL = 1
NOT_SUPPORTED = 2
NOT_YET_IMPLEMENTED = 3
FAIL_LOAD_MODULE = 4
FAIL_LOAD_SYMBOL = 5
TIMEOUT = 8
RETRY = 9
NO_PERM = 10
INTERRUPT = 11
INIT_ERROR = 18
BUSY = 30
NOT_FOUND = 31
NOT_INIT = 32
DRIVER_NOT_LOADED = 34
NO_DATA = 40
UNEXPECTED_DATA = 43
NO_DRV = 51
FILE_NOT_FOUND = 52
SETTING_UNAVAILABLE = 55

NO_PACKAGE = -1
"""Not AMD's: the Python package that speaks with the library isn't installed."""

REFUSALS = frozenset(
    {
        INVAL,
        NOT_SUPPORTED,
        NOT_YET_IMPLEMENTED,
        FAIL_LOAD_SYMBOL,
        NO_PERM,
        FILE_NOT_FOUND,  # the kernel driver gives this card no such file
        SETTING_UNAVAILABLE,
    }
)
"""This card or driver doesn't give the value: absent, not an error, and not asked again for a while."""

BUSY_NOW = frozenset({BUSY, RETRY, INTERRUPT})
"""No value just now, as while the GPU is being reset: absent, not an error, asked again next time."""

DRIVER_GONE = frozenset({NOT_INIT, DRIVER_NOT_LOADED})
"""The connection to the driver is void: the library has to be initialised again."""

_STATES = {
    SUCCESS: OK,
    NO_PACKAGE: ABSENT,
    FAIL_LOAD_MODULE: ABSENT,
    FAIL_LOAD_SYMBOL: GPU_STATES.index("driver_mismatch"),
    TIMEOUT: HUNG,
    NO_PERM: NO_PERMISSION,
    INIT_ERROR: ABSENT,
    NOT_INIT: ABSENT,
    DRIVER_NOT_LOADED: ABSENT,
    NO_DRV: ABSENT,
    **dict.fromkeys(BUSY_NOW, ABSENT),
}

_NAMED = {
    NO_PACKAGE: "no_package",
    FAIL_LOAD_MODULE: "no_library",
    FAIL_LOAD_SYMBOL: "other_version",
    TIMEOUT: "timeout",
    NO_PERM: "no_permission",
    INIT_ERROR: "init_error",
    NOT_FOUND: "not_found",
    NOT_INIT: "not_init",
    DRIVER_NOT_LOADED: "no_driver",
    NO_DRV: "no_driver",
    **dict.fromkeys(BUSY_NOW, "busy"),
}


def state_of(code: int) -> int:
    """The `state` of a GPU that answers everything with this code; a code without a meaning of its own counts as lost."""
    return _STATES.get(code, LOST)


def name_of(code: int, language: str = "en") -> str:
    """What a code means, in words."""
    named = _NAMED.get(code)
    return say(f"amd.code.{named}", language) if named else say("amd.code.other", language, code=code)


CODES = DriverCodes(
    library="AMD SMI",
    timeout=TIMEOUT,
    missing=NOT_FOUND,
    gone=NOT_INIT,
    stale=FAIL_LOAD_SYMBOL,
    stale_remedy=say("amd.remedy.other_version"),
    quiet=frozenset({NO_PACKAGE, FAIL_LOAD_MODULE, DRIVER_NOT_LOADED, NO_DRV}),
    state_of=state_of,
    name_of=name_of,
)
