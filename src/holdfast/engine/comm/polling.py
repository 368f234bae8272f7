"""Waiting for other ranks without blocking in the key-value store, and saying so if it takes long.

A call that blocks in the store holds up whatever else in this process uses the same connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

#: Seconds between looks at the store: a twentieth of what was waited already, within these bounds.
_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.25

#: Seconds after which a rank first says for whom it waits; then after twice as many each time.
QUIET_SECONDS = 10.0

_log = logging.getLogger("holdfast")


class Deadline:
    """One wait for other ranks, of at most ``timeout`` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._started, self._quiet = timeout, time.monotonic(), QUIET_SECONDS

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._started

    @property
    def is_over(self) -> bool:
        """Whether the timeout has passed."""
        return self.seconds > self._timeout

    def tell(self, missing: Callable[[], str]) -> None:
        """Log for whom this rank waits, and while what, if it is time to. ``missing`` is asked only then."""
        if self.seconds < self._quiet:
            return
        self._quiet *= 2
        if who := missing():
            _log.warning("waiting for %s for %.0f s; timeout after %.0f s", who, self.seconds, self._timeout)


def poll_until(there: Callable[[], bool], timeout: float, missing: Callable[[], str]) -> bool:
    """Look again and again until it is there, for at most ``timeout`` seconds. Whether it is.

    ``missing`` tells who has not come, and while what: ``"rank 3 while writing"``; nothing if all have by now.
    """
    wait = Deadline(timeout)
    while not there():
        if wait.is_over:
            return False
        wait.tell(missing)
        time.sleep(min(_LONGEST_NAP, max(_SHORTEST_NAP, wait.seconds / 20)))
    return True
