"""What must be so where ranks' files belong together: copies are equal, and what fills up the last rows is zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.compat.nxd.format.rank_file import RankShard
from holdfast.compat.nxd.format.slicing import JoinedTensor
from holdfast.errors import CorruptCheckpointError
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.blocks import crc64

#: Bytes that are read at a time.
_CHUNK = 4 * 2**20


@dataclass
class ReplicaEvidence:
    """Noted while files are put together, looked at when somebody wants to be sure: it means reading.

    ``replicas`` are copies that tensor-parallel ranks have calculated each for itself; nothing keeps them equal.
    """

    copies: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)
    replicas: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)
    padding: list[tuple[str, RankShard, int]] = field(default_factory=list)

    def check(self, *, replicas: bool = True) -> None:
        """Raise ``CorruptCheckpointError`` naming the first tensor, and its file, that is not as it should be."""
        for what, shards in self.copies:
            _check_equal(what, shards, "")
        for what, shards in self.replicas if replicas else ():
            _check_equal(what, shards, ". If its ranks have drifted apart, take the first one's: --key copies=first")
        for what, shard, start in self.padding:
            if any(read_evidence(shard, start, shard.info.nbytes)):
                raise CorruptCheckpointError(
                    f"{what}: what {shard.file} has from byte {start} of its tensor on only fills it up, and is not "
                    "zero: it is of a save by another number of ranks, or damaged"
                )


def _check_equal(what: str, shards: Sequence[StoredTensor], advice: str) -> None:
    first = digest_evidence(shards[0])
    for other in shards[1:]:
        if digest_evidence(other) != first:
            raise CorruptCheckpointError(
                f"{what} differs between {_file(shards[0])} and {_file(other)}, and ranks have the same of it: they "
                f"are of two different steps, or one is damaged{advice}"
            )


def _file(stored: StoredTensor) -> str:
    if isinstance(stored, JoinedTensor) and stored.parts:
        return str(stored.parts[0].near[0])
    return str(stored.file) if isinstance(stored, RankShard) else "another file"


def read_evidence(stored: StoredTensor, start: int, stop: int) -> bytes:
    """Bytes of a tensor."""
    from holdfast.engine.io.source_reader import SourceReader  # noqa: PLC0415 - NumPy takes its time, and to show a file needs none

    into = bytearray(stop - start)
    extents = stored.extents(start, stop)
    with SourceReader([extent.file for extent in extents]) as opened:
        for number, (_, offset, low, high) in enumerate(extents):
            opened.read(number, offset, memoryview(into)[low - start : high - start])
    return bytes(into)


def digest_evidence(stored: StoredTensor) -> int:
    """The CRC of a tensor's bytes."""
    crc = 0
    for start in range(0, stored.info.nbytes, _CHUNK):
        crc = crc64(read_evidence(stored, start, min(start + _CHUNK, stored.info.nbytes)), crc)
    return crc
