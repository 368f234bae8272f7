"""The public names of rankless, and the module of each.

``import rankless`` asks it for each name that is used.
"""

from __future__ import annotations

import re
from functools import cache
from pkgutil import get_data

_IMPORT = re.compile(r"^from (\S+) import (\w+) as \2\b", re.MULTILINE)


@cache
def read_modules() -> dict[str, str]:
    """Return the module of each public name, in the order of the names.

    Read from the stub ``__init__.pyi``, so that a program imports the same objects that type checkers see.
    """
    stub = get_data("rankless", "__init__.pyi") or b""
    return {name: module for module, name in sorted(_IMPORT.findall(stub.decode()), key=lambda line: line[1])}
