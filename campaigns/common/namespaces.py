"""Network, mount and process namespaces for test beds: all hosts and devices end with them."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable

#: The kinds of namespaces, as ``unshare`` names them.
NEW_MOUNTS, NEW_NAME, NEW_PROCESSES, NEW_NETWORK = 0x00020000, 0x04000000, 0x20000000, 0x40000000

_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_SET_DEATH_SIGNAL = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run_in_namespaces(function: Callable[[], int]) -> int:
    """Run a function in a process with new namespaces, and return its exit status.

    That process is the first of its namespace: if it or this process ends, the kernel ends all others in it.
    """
    unshare(NEW_NETWORK | NEW_MOUNTS | NEW_PROCESSES)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        _check(_libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL), "prctl")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _check(_libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None), "mount")
        _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount")
        status = function()
    except BaseException:  # noqa: BLE001 - this process must not return into its caller's code
        traceback.print_exc()
    finally:
        os._exit(status)
    return status


def unshare_network_and_mounts() -> None:
    """Move this process into a network namespace and a mount namespace of its own."""
    unshare(NEW_NETWORK | NEW_MOUNTS)
    _check(_libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None), "mount")


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of some kinds; of processes, only its later children."""
    _check(_libc.unshare(kinds), "unshare")


def _check(result: int, call: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
