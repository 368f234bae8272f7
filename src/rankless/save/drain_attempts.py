"""Attempts to write a checkpoint of the local tier into the run directory, until one succeeds.

Contents with a tier call it on all ranks, in the thread of the save: :mod:`rankless.save.tier_content` and
:mod:`rankless.save.generation_content`. All ranks must try equally often: the decision depends only on an error
that all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rankless.engine.comm.session import Session
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import RankFailedError, RanklessError, RankTimeoutError, StateError, TagExistsError
from rankless.observe.warning import warn_caller
from rankless.run.history import KnownCheckpoint
from rankless.save.run_output import NO_RECORDS, Records, RunOutput

#: How often a drain is tried, and the seconds before the second attempt; they double from attempt to attempt.
ATTEMPTS, _FIRST_SECONDS = 5, 1.0

#: The errors that another attempt cannot avoid. After the death of a rank, each one would wait for the whole timeout.
_FINAL = (TagExistsError, StateError, RankFailedError, RankTimeoutError)

T = TypeVar("T")


def begin_attempt(
    session: Session,
    output: RunOutput,
    saved: KnownCheckpoint,
    prepare: Callable[[], bytes],
    list_records: Callable[[], Records] = lambda: NO_RECORDS,
) -> bool:
    """Prepare and open the output of one attempt on all ranks, in a vote. Return false if the run has the checkpoint.

    Then an attempt that seemed to fail has committed it. ``prepare`` is the output's, with its arguments.
    ``list_records`` returns, on rank 0, the records of the files: see :meth:`RunOutput.begin`.
    """

    def begin(posted: list[bytes]) -> bytes:
        return b"" if output.is_committed(saved.id) else output.begin(saved, posted, list_records())

    _, begun = session.vote("preparing the drain", prepare, bytes, begin)
    if begun:
        output.join(begun)
    return bool(begun)


def retry_drain(
    drain_once: Callable[[int], T],
    note_failure: Callable[[RanklessError, int], None],
    warn: Callable[[RanklessError], None] | None,
) -> T | None:
    """Return the result of the first attempt that succeeds. All ranks fail, and try again, together.

    ``drain_once`` is called with the number of the attempt, from 1 on, and ``note_failure`` with the error and the
    number of each one that failed. The error of the last one, or one that no other attempt can avoid, goes to ``warn``;
    then the result is ``None``. If there is no ``warn``, it is raised.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return drain_once(attempt)
        except RanklessError as error:
            note_failure(error, attempt)
            if attempt == ATTEMPTS or isinstance(error, _FINAL):
                if warn is None:
                    raise
                warn(error)
                return None
        time.sleep(_FIRST_SECONDS * 2 ** (attempt - 1))


def warn_of_drain(path: Path, session: Session, error: RanklessError) -> None:
    """Warn, on rank 0, that a checkpoint stays in the local tier. Each rank calls it after its last attempt."""
    if session.rank == COORDINATOR_RANK:
        warn_caller(f"{path} could not be written, and stays in the local tier: {error}")
