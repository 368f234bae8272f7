"""Waiting for other ranks without blocking in the key-value store, with warnings if it takes long.

A call that blocks in the store stalls every other user of the same connection in this process.

:func:`poll_until` is the wait of votes, of the rendezvous, of store messages and of the watch, on every rank, in the
thread that needs the others. A load also waits with it for a directory that its host does not see yet. The polled
function must not block.

A connection of its own is no way out for a vote: of connections made by ``clone()``, every 25th took 5 s to open.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

#: Bounds of the interval between two polls of the store, in seconds: a twentieth of the time waited so far.
_MIN_INTERVAL, _MAX_INTERVAL = 0.0005, 0.25

#: Seconds after which a rank first logs which ranks it waits for; later after twice as many each time.
QUIET_SECONDS = 10.0

_log = logging.getLogger("rankless")


class Deadline:
    """One wait for other ranks, of at most ``timeout`` seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._started, self._quiet = timeout, time.monotonic(), QUIET_SECONDS

    @property
    def elapsed_seconds(self) -> float:
        """The duration of the wait so far."""
        return time.monotonic() - self._started

    @property
    def is_over(self) -> bool:
        """True if the timeout has passed."""
        return self.elapsed_seconds > self._timeout

    def warn_if_slow(self, describe_missing: Callable[[], str]) -> None:
        """Log which ranks this rank waits for, and in what phase these are, if it is time to.

        ``describe_missing`` is called only then.
        """
        if self.elapsed_seconds < self._quiet:
            return
        self._quiet *= 2
        if waited_for := describe_missing():
            _log.warning(
                "waiting for %s for %.0f s; timeout after %.0f s", waited_for, self.elapsed_seconds, self._timeout
            )


def poll_until(is_ready: Callable[[], bool], timeout: float, describe_missing: Callable[[], str]) -> bool:
    """Call ``is_ready`` repeatedly until it returns true, for at most ``timeout`` seconds. Return whether it did.

    ``describe_missing`` returns the missing ranks and their phase, for example ``"rank 3 while writing"``. It returns
    an empty string if all have come by now.
    """
    deadline = Deadline(timeout)
    while not is_ready():
        if deadline.is_over:
            return False
        deadline.warn_if_slow(describe_missing)
        time.sleep(min(_MAX_INTERVAL, max(_MIN_INTERVAL, deadline.elapsed_seconds / 20)))
    return True
