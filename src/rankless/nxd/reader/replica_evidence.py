"""Evidence that the files of ranks belong together: copies are equal, and the padding of the last rows is zero.

The reader collects on each rank, and compares when files are checked; the offline converter before it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rankless.errors import CorruptCheckpointError
from rankless.formats.chunked_tensor_slices import JoinedTensor
from rankless.formats.read_stored_tensor import digest_tensor, read_tensor_bytes
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader.rank_file import RankShard


@dataclass
class ReplicaEvidence:
    """Tensors to compare, which are collected while files are joined. Comparing them means reading them.

    ``replicas`` are copies that each tensor-parallel rank has computed by itself, so they may have drifted apart.
    """

    copies: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)
    replicas: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)
    padding: list[tuple[str, RankShard, int]] = field(default_factory=list)

    def require_consistent(self, *, replicas: bool = True) -> None:
        """Raise ``CorruptCheckpointError`` naming the first tensor, and its file, that is inconsistent."""
        for subject, shards in self.copies:
            _check_equal(subject, shards, "")
        for subject, shards in self.replicas if replicas else ():
            _check_equal(subject, shards, ". If the ranks have drifted apart, use the first rank's: --key copies=first")
        for subject, shard, start in self.padding:
            if any(read_tensor_bytes(shard, start, shard.info.nbytes)):
                raise CorruptCheckpointError(
                    f"{subject}: the padding of the tensor in {shard.file}, from its byte {start} on, is not zero: the "
                    "file is from a save by another number of ranks, or corrupt"
                )


def _check_equal(subject: str, shards: Sequence[StoredTensor], advice: str) -> None:
    first = digest_tensor(shards[0])
    for other in shards[1:]:
        if digest_tensor(other) != first:
            raise CorruptCheckpointError(
                f"{subject} differs between {_file_name(shards[0])} and {_file_name(other)}, but ranks must have equal "
                f"copies: the files are from two different steps, or one is corrupt{advice}"
            )


def _file_name(stored: StoredTensor) -> str:
    if isinstance(stored, JoinedTensor) and stored.chunks:
        return str(stored.chunks[0].order_hint[0])
    return str(stored.file) if isinstance(stored, RankShard) else "another file"
