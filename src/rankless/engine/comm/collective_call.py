"""Errors that a rank raises before the first vote of a call, such as for a wrong argument: all ranks raise them.

The public functions (:mod:`rankless.api`, ``Checkpointer``, ``RunDirectory``, the components and the frameworks) enter
:func:`collective_call` on every rank, in the thread of the caller. A check of arguments must not move out of the block:
its error would be raised on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rankless.engine.comm.process_group_argument import ProcessGroupArgument, check_process_group
from rankless.engine.comm.session import RankGroup, this_thread
from rankless.errors import InvalidArgumentError, RankFailedError, RankTimeoutError
from rankless.ondisk.validation import check_timeout

_PHASE = "checking the arguments"

#: For how many seconds the ranks wait for each other if a call does not say it.
_SECONDS = 600.0


@contextmanager
def collective_call(process_group: ProcessGroupArgument, timeout: float = _SECONDS) -> Iterator[None]:
    """Let all ranks raise the error that the block raises on this rank before it has opened a session.

    Every public function that votes in each call has its body in such a block. The other ranks are in the first vote
    of the call then, and would wait for this one until the ``timeout``. Once the block has opened a session, a vote of
    it has passed the error on. Blocks may be nested.
    """
    before = this_thread.opened_sessions
    try:
        yield
    except (RankFailedError, RankTimeoutError):  # of an earlier call: all ranks have it, and one may be dead
        raise
    except Exception as error:
        if this_thread.opened_sessions == before:
            trace = error.__traceback__
            with suppress(Exception):  # also if this rank cannot meet the others: its own error says what is wrong
                _fail_on_all(error, process_group, timeout)
            error.__traceback__ = trace
        raise


def _fail_on_all(error: Exception, process_group: ProcessGroupArgument, timeout: float) -> None:
    """Fail in the vote that the other ranks are in, or in the same way as they do.

    It opens the session that the body would have opened, so that all ranks count the same number of sessions.
    """

    def fail() -> None:
        raise error

    try:
        seconds = check_timeout(timeout)
    except InvalidArgumentError:  # which is the error
        seconds = _SECONDS
    try:
        check_process_group(process_group)
    except InvalidArgumentError:  # as above: most likely the others use the default one
        process_group = None
    RankGroup(process_group).open_session(seconds).run_on_all(_PHASE, fail)
