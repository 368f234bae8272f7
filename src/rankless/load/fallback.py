"""Loads another checkpoint if the newest one is corrupt, or is replaced or removed while it is read.

:class:`~rankless.run_directory.RunDirectory`, the loads of components and Lightning call :func:`load_with_fallback` on
every rank, in the thread of the caller. Each attempt is a session of its own: all ranks must try again, or none. So
only errors that a vote has made common may lead to another attempt, and none after values began to be put in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankless.engine.comm.session import RankGroup
from rankless.errors import CorruptCheckpointError, MismatchError, NoCheckpointError, RankMismatchError, StorageError
from rankless.load.load_operation import LoadOperation
from rankless.load.load_request import LoadRequest
from rankless.load.restore_result import RestoreResult
from rankless.load.selection import CheckpointSelector
from rankless.observe.reporter import log_reasons
from rankless.observe.warning import warn_caller
from rankless.process.gc_pause import gc_paused
from rankless.run.corruption import CorruptRecord
from rankless.save.background import background_saves

if TYPE_CHECKING:
    from rankless.load.tier_load import TierLoad


def load_with_fallback(
    request: LoadRequest,
    ranks: RankGroup,
    timeout: float,
    corrupt: set[CorruptRecord] | None = None,
    tier: TierLoad | None = None,
) -> RestoreResult:
    """Load a checkpoint, on all ranks. The caller's objects are unchanged until all checks have passed on all ranks.

    If the newest checkpoint is corrupt, load the newest intact one that matches, with a warning. If another process
    replaces or removes the checkpoint meanwhile, select again. Corrupt checkpoints are added to ``corrupt``. ``tier``:
    the local tier, which may have a newer checkpoint.
    """
    background_saves.wait_for_copies()
    if tier is not None:
        tier.gather()
    selector = CheckpointSelector(request, timeout, () if tier is None else tier.local)
    while True:
        attempt = LoadOperation(request, ranks, timeout, selector, tier)
        try:
            # Tensors that are created in inference mode could not be trained.
            with gc_paused(), torch.inference_mode(mode=False):
                result = attempt.run()
        except (CorruptCheckpointError, StorageError, MismatchError, RankMismatchError, NoCheckpointError) as error:
            if tier is not None:
                tier.remove_fetched()
            if not attempt.selected.folder or attempt.is_applying:
                raise
            # All ranks raise the error of the vote, so all of them try again, and rank 0 selects the next checkpoint.
            selector.note_failure(attempt.selected, attempt.filled, error)
            continue
        if corrupt is not None:
            corrupt.update(attempt.selected.corrupt)
        _warn_of_others(request, selector, result)
        return result


def _warn_of_others(request: LoadRequest, selector: CheckpointSelector, result: RestoreResult) -> None:
    """Warn of reads that were wrong, and of the checkpoints that were ignored."""
    for problem in selector.wrong_reads.values():
        warn_caller(f"loaded {result.tag!r} after a read that was wrong: {problem}")
    for problem in selector.lost_generations:
        warn_caller(f"loaded {result.tag!r} from the {result.source}, because a newer one could not be: {problem}")
    skipped = selector.skipped.describe()
    if skipped:
        advice = f"run `rankless verify --all {request.path}` for details"
        warn_caller(f"loaded {result.tag!r} and ignored other checkpoints: {skipped}; {advice}")
        log_reasons(selector.skipped.reasons)
    if selector.ignored:
        warn_caller(selector.ignored)
