"""Waiting for something in the key-value store without blocking in it.

A call that blocks in the store holds up whatever else in this process uses the same connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds between looks at the store: a twentieth of what was waited already, within these bounds.
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.25


def wait_until(there: Callable[[], bool], timeout: float) -> bool:
    """Look again and again until it is there, for at most ``timeout`` seconds. Whether it is."""
    started = time.monotonic()
    while not there():
        waited = time.monotonic() - started
        if waited > timeout:
            return False
        time.sleep(min(_LONGEST_NAP, max(_SHORTEST_NAP, waited / 20)))
    return True
