"""Objects whose pickles run code when Python loads them."""

from __future__ import annotations

import functools
import io
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any


class PickledCall:
    """Pickled as a call of anything with anything."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


MARK_FILE = "RANKLESS_WAS_HERE"


UNSAFE_OBJECTS = {
    "a shell": PickledCall(os.system, f"touch {MARK_FILE}"),
    "a process": PickledCall(subprocess.check_output, ["touch", MARK_FILE]),
    "eval": PickledCall(eval, f"open({MARK_FILE!r}, 'w')"),
    "exec": PickledCall(exec, f"open({MARK_FILE!r}, 'w')"),
    "open": PickledCall(open, MARK_FILE, "w"),
    "getattr": PickledCall(getattr, "text", "format"),
    "partial": PickledCall(functools.partial, print),
    "a file": PickledCall(io.FileIO, MARK_FILE, "w"),
    "__import__": PickledCall(__import__, "os"),
    "a path's method": PickledCall(Path.touch, Path(MARK_FILE)),
    "a class of ours": PickledCall(PickledCall, 1),
    "pickle itself": PickledCall(pickle.loads, b"N."),
    "a type": PickledCall(type, "A", (), {}),
}
