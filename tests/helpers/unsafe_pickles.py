"""Objects whose pickles run code when Python loads them."""

from __future__ import annotations

import functools
import io
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any


class Reduced:
    """Pickled as a call of anything with anything."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


MARK = "HOLDFAST_WAS_HERE"


EVIL = {
    "a shell": Reduced(os.system, f"touch {MARK}"),
    "a process": Reduced(subprocess.check_output, ["touch", MARK]),
    "eval": Reduced(eval, f"open({MARK!r}, 'w')"),
    "exec": Reduced(exec, f"open({MARK!r}, 'w')"),
    "open": Reduced(open, MARK, "w"),
    "getattr": Reduced(getattr, "text", "format"),
    "partial": Reduced(functools.partial, print),
    "a file": Reduced(io.FileIO, MARK, "w"),
    "__import__": Reduced(__import__, "os"),
    "a path's method": Reduced(Path.touch, Path(MARK)),
    "a class of ours": Reduced(Reduced, 1),
    "pickle itself": Reduced(pickle.loads, b"N."),
    "a type": Reduced(type, "A", (), {}),
}
