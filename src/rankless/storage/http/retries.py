"""Repetitions of requests that failed: after a random time, which doubles, until the time of the request is over.

:class:`~rankless.storage.http.client.ObjectClient` has a :class:`Throttle` for all threads, and an :class:`Attempts`
for each request.
"""

from __future__ import annotations

import logging
import random
import time

#: Seconds before the first repetition of a request, and the most before a later one. The true wait is random.
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 20.0

#: The most times that one request is changed, for another region for example, and sent again at once.
_MAX_ADAPTATIONS = 3


#: A request without an answer for more seconds is worth a line in the log, and the seconds until the next line.
_SILENCE, _BETWEEN_REPORTS = 5.0, 30.0

_log = logging.getLogger("rankless")


class Throttle:
    """Makes all threads of a client wait after its server has said that it is busy, and reports a silent server."""

    def __init__(self) -> None:
        self._until = 0.0
        self._reported = -_BETWEEN_REPORTS

    def slow_down(self, seconds: float) -> None:
        """Let no request begin for some seconds."""
        self._until = max(self._until, time.monotonic() + seconds)

    def report_silence(self, attempts: Attempts, error: str) -> None:
        """Log the error of a request that has had no answer for some seconds; of all requests one in a while."""
        now = time.monotonic()
        if attempts.seconds > _SILENCE and now - self._reported > _BETWEEN_REPORTS:
            self._reported = now
            _log.warning(
                "no answer for %.0f s, tried again for %.0f s more: %s", attempts.seconds, attempts.seconds_left, error
            )

    def wait(self) -> None:
        """Wait until requests may begin. The threads do not all continue at the same time."""
        if (seconds := self._until - time.monotonic()) > 0:
            time.sleep(random.uniform(0.5, 1.0) * seconds)  # noqa: S311 - no secret


class Attempts:
    """The attempts of one request, which may go on for some seconds."""

    def __init__(self, seconds: float) -> None:
        self._began, self._count = time.monotonic(), 0
        self._deadline = self._began + seconds
        self._adaptations = 0

    @property
    def seconds(self) -> float:
        """The seconds since the first attempt."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float:
        """The seconds that are left to begin further attempts."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def may_have_had_effect(self) -> bool:
        """True if an earlier attempt failed in a way that says nothing about its effect."""
        return self._count > 0

    @property
    def next_wait(self) -> float:
        """The longest time until the next attempt, in seconds."""
        doublings = min(self._count, 10)  # after that, the longest wait holds anyway
        return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0**doublings)

    def may_adapt(self) -> bool:
        """Return whether the request may be changed and sent again at once; a few times at most."""
        self._adaptations += 1
        return self._adaptations <= _MAX_ADAPTATIONS

    def wait(self) -> bool:
        """Wait before the next attempt. Return false, without waiting, if there is no time for one."""
        seconds = random.uniform(0, self.next_wait)  # noqa: S311 - no secret
        if time.monotonic() + seconds > self._deadline:
            return False
        self._count += 1
        time.sleep(seconds)
        return True
