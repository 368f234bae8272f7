"""Attempts to write a checkpoint of the local tier into the run directory, until one succeeds.

Drains call it on all ranks, :mod:`rankless.save.tier_save` in the thread of the save, and
:mod:`rankless.save.generation_drain` likewise. All ranks must try equally often: the decision depends only on an error
that all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rankless.engine.comm.session import Session
from rankless.errors import RankFailedError, RanklessError, RankTimeoutError, StateError, TagExistsError
from rankless.run.history import KnownCheckpoint
from rankless.save.run_output import NO_RECORDS, Records, RunOutput

#: How often a drain is tried, and the seconds before the second attempt; they double from attempt to attempt.
ATTEMPTS, _FIRST_SECONDS = 5, 1.0

#: What another attempt cannot avoid. After the death of a rank, each one would wait for the whole timeout.
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


def retry_drain(drain_once: Callable[[int], T], note_failure: Callable[[RanklessError, int], None]) -> T:
    """Return the result of the first attempt that succeeds. All ranks fail, and try again, together.

    ``drain_once`` is called with the number of the attempt, from 1 on, and ``note_failure`` with the error and the
    number of each one that failed. Raises the error of the last one, or one that no other attempt can avoid.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return drain_once(attempt)
        except RanklessError as error:
            note_failure(error, attempt)
            if attempt == ATTEMPTS or isinstance(error, _FINAL):
                raise
        time.sleep(_FIRST_SECONDS * 2 ** (attempt - 1))
