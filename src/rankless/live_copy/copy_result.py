"""The result of a copy between running ranks.

:class:`~rankless.live_copy.copy_operation.CopyOperation` makes one on each rank, at the end. The names of its
attributes are public.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CopyResult:
    """The result of :func:`rankless.copy_state` on one rank.

    Components are named as in :class:`rankless.RestoreResult`. A rank that received nothing has empty lists of them.

    Attributes:
        user_content: The content of the lowest source rank. A rank that received nothing has its own content.
        sources: The ranks that the state was copied from.
        sent_bytes: The bytes of tensors that this rank has sent to other ranks.
        received_bytes: The bytes of tensors that this rank has received from other ranks.
        local_bytes: The bytes of tensors that this rank has copied from its own source objects.
        missing: The components that the sources do not have and, if that was allowed, names of tensors.
        unexpected: The names that only the sources have.
        exact: The components that are equal to the sources' components bit for bit.
        reconstructed: The components that cannot be identical: a model cast to another dtype, a data loader with a
            position from other ranks, random number generators that were seeded.
    """

    user_content: Any = None
    sources: tuple[int, ...] = ()
    sent_bytes: int = 0
    received_bytes: int = 0
    local_bytes: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    reconstructed: tuple[str, ...] = ()
