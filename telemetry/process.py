"""Being a well-behaved process: say when ready, stop when told, don't outlive the parent. Shared by every daemon of the house."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


_SUPERVISOR_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
"""What a daemon's own supervisor told it; a child that heard it would answer in the daemon's name."""

_OURS = "PAIRSCOPE_"
_FOR_CHILDREN = ("LANG", "LANGUAGE", "STATE_DIR", "ENGINE")


def childs_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that is not one of our daemons: without what a supervisor said, and of our own configuration, in
    which the store's token and other passwords may stand, only what concerns an engine.
    """
    return {name: value for name, value in own.items() if name not in _SUPERVISOR_VARIABLES and _may_be_known(name)}


def _may_be_known(name: str) -> bool:
    name = name.upper()  # the configuration reads its variables in any case
    return not name.startswith(_OURS) or name.removeprefix(_OURS).partition("__")[0] in _FOR_CHILDREN


def notify(**state: str) -> bool:
    """Tell the supervisor (systemd, or `pairscope up`) about this process by the sd_notify protocol.

    notify(READY="1", STATUS="serving"); returns False when nobody asked (no NOTIFY_SOCKET) or the socket is gone.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    message = "\n".join(f"{name}={value}" for name, value in state.items())
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto(message.encode(), target)
    except OSError:
        return False
    return True


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies, however it dies (Linux; elsewhere nothing).

    Call it first thing in a child. The kernel ties this to the parent *thread*, so start children from a long-lived one.
    """
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set. Call from the main thread, once."""
    stopping = threading.Event()
    on_signals(stopping.set, signal.SIGTERM, signal.SIGINT)
    return stopping


def on_signals(act: Callable[[], object], *numbers: signal.Signals) -> None:
    """Have `act` called, on a thread of its own, whenever one of the signals comes. Call from the main thread.

    A handler runs in the main thread, between any two of its instructions. If it set an Event that this thread is just about to wait at,
    it would wait for ever for a lock that the thread itself holds; putting into a SimpleQueue takes no lock.
    """
    came: SimpleQueue[int] = SimpleQueue()

    def follow() -> None:
        while True:
            number = came.get()
            try:
                act()
            except Exception:  # the next signal is heard all the same
                log.exception("what %s asks for failed", signal.Signals(number).name)

    threading.Thread(target=follow, name="signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda got, _frame: came.put(got))
