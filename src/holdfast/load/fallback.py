"""Where the newest checkpoint is damaged, or goes while it is read, another is loaded that fits."""

from __future__ import annotations

import torch

from holdfast.engine.comm.session import RankGroup
from holdfast.errors import CorruptCheckpointError, MismatchError, NoCheckpointError, RankMismatchError, StorageError
from holdfast.load.operation import LoadOperation
from holdfast.load.request import LoadRequest
from holdfast.load.result import RestoreResult
from holdfast.load.selection import CheckpointSelector
from holdfast.observe.reporter import log_reasons
from holdfast.observe.warning import warn_caller
from holdfast.process.gc_pause import gc_paused
from holdfast.run.corruption import CorruptRecord
from holdfast.save.background import background_saves


def load_with_fallback(
    request: LoadRequest, ranks: RankGroup, timeout: float, corrupt: set[CorruptRecord] | None = None
) -> RestoreResult:
    """Load, on all ranks. Until every check has passed on every rank, nothing of the caller's is changed.

    Where the newest checkpoint turns out to be damaged, the newest sound one that fits is loaded, with a warning; where
    another process replaces or removes it meanwhile, what is there then. What it falls back from is added to
    ``corrupt``.
    """
    background_saves.wait_for_copies()
    search = CheckpointSelector(request, timeout)
    while True:
        attempt = LoadOperation(request, ranks, timeout, search)
        try:
            # Tensors that are made in inference mode could never be trained.
            with gc_paused(), torch.inference_mode(mode=False):
                restored = attempt.run()
        except (CorruptCheckpointError, StorageError, MismatchError, RankMismatchError, NoCheckpointError) as error:
            if not attempt.found.folder or attempt.is_applying:
                raise
            # All ranks raise it, as they have voted; so all of them go on, and rank 0 decides to what.
            search.failed(attempt.found, attempt.filled, error)
            continue
        if corrupt is not None:
            corrupt.update(attempt.found.corrupt)
        passed = search.passed.describe()
        if passed:
            warn_caller(f"loaded {restored.tag!r}, as {passed}; `holdfast verify --all {request.path}` tells more")
            log_reasons(search.passed.reasons)
        if search.ignored:
            warn_caller(search.ignored)
        return restored
