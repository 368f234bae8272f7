"""Tensors of which several ranks have copies, which must be equal."""

from __future__ import annotations

from collections.abc import Sequence

from rankless.errors import CorruptCheckpointError
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.tensor_bytes import digest_tensor


def check_copies(copies: Sequence[tuple[str, Sequence[StoredTensor]]], source: str) -> None:
    """Raise ``CorruptCheckpointError`` naming the first tensor of which ranks have different copies."""
    for name, tensors in copies:
        first = digest_tensor(tensors[0])
        if any(digest_tensor(other) != first for other in tensors[1:]):
            raise CorruptCheckpointError(
                f"{source}: {name!r} differs between tensor-parallel ranks, which must have equal copies: the files "
                "are from two saves, or one is corrupt; if the ranks have drifted apart, verify=False loads the "
                "first rank's"
            )
