"""Where the newest checkpoint is damaged, the newest sound one that fits is loaded."""

from __future__ import annotations

import errno
import warnings

from holdfast.engine.ballot import LEADER
from holdfast.engine.ranks import Ranks
from holdfast.errors import DamagedError, MismatchError, NoCheckpointError, StorageError
from holdfast.loading import Load, Tried
from holdfast.request import LoadRequest
from holdfast.restored import Restored


def load(request: LoadRequest, ranks: Ranks, timeout: float) -> Restored:
    """Load, on all ranks. Until every check has passed on every rank, nothing of the caller's is changed.

    Where the newest checkpoint turns out to be damaged, the newest sound one that fits is loaded, with a warning.
    """
    damaged: dict[str, DamagedError | StorageError | MismatchError] = {}
    filled: set[tuple[str, str]] = set()
    while True:
        attempt = Load(request, ranks, timeout, Tried(tuple(damaged), frozenset(filled)))
        try:
            restored = attempt.run()
        except (DamagedError, StorageError, MismatchError) as error:
            # All ranks raise it, as they have voted; so all of them go on to the same next one.
            gone = isinstance(error, StorageError) and error.errno == errno.ENOENT
            unfit = isinstance(error, MismatchError) and bool(damaged)
            if attempt.is_last_resort() or not (gone or unfit or isinstance(error, DamagedError)):
                raise
            damaged[attempt.found.id] = error
            filled |= attempt.filled
            continue
        except NoCheckpointError:
            if not damaged:
                raise
            raise next(iter(damaged.values())) from None
        if ranks.rank == LEADER and restored.fell_back_from:
            why = "; ".join(str(error) for error in damaged.values()) or "their manifests cannot be read"
            warnings.warn(
                f"loaded {restored.tag!r}, as {', '.join(restored.fell_back_from)} in {request.path} cannot be "
                f"loaded: {why}",
                stacklevel=4,
            )
        return restored
