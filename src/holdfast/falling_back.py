"""Where the newest checkpoint is damaged, or goes while it is read, another is loaded that fits."""

from __future__ import annotations

import torch

from holdfast.background import background_saves
from holdfast.corruption import Corrupt
from holdfast.engine.ranks import Ranks
from holdfast.errors import DamagedError, DisagreementError, MismatchError, NoCheckpointError, StorageError
from holdfast.finding import Search
from holdfast.garbage import uncollected
from holdfast.loading import Load
from holdfast.request import LoadRequest
from holdfast.restored import Restored
from holdfast.telling import log_reasons
from holdfast.warning import warn


def load(request: LoadRequest, ranks: Ranks, timeout: float, corrupt: set[Corrupt] | None = None) -> Restored:
    """Load, on all ranks. Until every check has passed on every rank, nothing of the caller's is changed.

    Where the newest checkpoint turns out to be damaged, the newest sound one that fits is loaded, with a warning; where
    another process replaces or removes it meanwhile, what is there then. What it falls back from is added to
    ``corrupt``.
    """
    background_saves.wait_for_copies()
    search = Search(request, timeout)
    while True:
        attempt = Load(request, ranks, timeout, search)
        try:
            # Tensors that are made in inference mode could never be trained.
            with uncollected(), torch.inference_mode(mode=False):
                restored = attempt.run()
        except (DamagedError, StorageError, MismatchError, DisagreementError, NoCheckpointError) as error:
            if not attempt.found.folder or attempt.is_applying:
                raise
            # All ranks raise it, as they have voted; so all of them go on, and rank 0 decides to what.
            search.failed(attempt.found, attempt.filled, error)
            continue
        if corrupt is not None:
            corrupt.update(attempt.found.corrupt)
        passed = search.passed.describe()
        if passed:
            warn(f"loaded {restored.tag!r}, as {passed}; `holdfast verify --all {request.path}` tells more")
            log_reasons(search.passed.reasons)
        if search.ignored:
            warn(search.ignored)
        return restored
