"""Joins tensor-parallel shards to whole tensors as a layout says.

:class:`~rankless.nxd.reader.nxd_reader.NxdReader` has one on each rank that opens a checkpoint.
:mod:`rankless.nxd.writer.shard` is the inverse: a change of the division here needs the same change there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from rankless.formats.chunked_tensor_slices import (
    Chunks,
    JoinedTensor,
    cut_slice,
    offset_along,
    offset_slices,
    permute_slices,
    slice_along,
)
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader.rank_file import RankShard
from rankless.nxd.reader.replica_evidence import ReplicaEvidence
from rankless.nxd.reader.sharding_spec import (
    EXPERT,
    ShardingRule,
    ShardingSpec,
    ShardPiece,
    rank_block,
    shard_pieces,
)
from rankless.ondisk.data_files import TensorInfo

#: The maximum number of experts of a layer: each gets an object, so a forged shape must not ask for more.
_MAX_EXPERTS = 2**16

#: The shards of one tensor, by expert-parallel and tensor-parallel rank.
Shards = Sequence[Sequence[StoredTensor]]


@dataclass
class Unsharder:
    """Joins shards to whole tensors. The same shards give the same objects."""

    spec: ShardingSpec
    evidence: ReplicaEvidence
    _cache: dict[Hashable, dict[str, StoredTensor]] = field(default_factory=dict)

    def join_shards(self, name: str, shards: Shards, subject: str) -> dict[str, StoredTensor]:
        """Join the shards of an NxD parameter, or of a state of its shape, to the tensors of whole parameters, by name.

        ``subject`` names the tensor in messages. Raises ``CorruptCheckpointError`` if shards do not fit together,
        ``InvalidArgumentError`` if the layout does not fit them.
        """
        rule = self.spec.rule_for(name)
        key = (rule, tuple(shard.identity for row in shards for shard in row))
        if key not in self._cache:
            row = self._join_expert_ranks(rule, shards, subject)
            self._check_same_info(row, subject)
            self._cache[key] = self._join_ranks(rule, name, row, subject)
        return self._cache[key]

    def _join_expert_ranks(self, rule: ShardingRule, shards: Shards, subject: str) -> Sequence[StoredTensor]:
        """Return the tensor of each tensor-parallel rank, with the experts of expert-parallel ranks concatenated."""
        first = shards[0]
        is_expert = rule.experts or (isinstance(first[0], RankShard) and first[0].expert)
        if len(shards) == 1:
            return first
        if not is_expert:
            for row in shards[1:]:
                self.evidence.replicas += [
                    (subject, pair) for pair in zip(first, row, strict=True) if pair[0] is not pair[1]
                ]
            return first
        columns = list(zip(*shards, strict=True))
        for column in columns:
            self._check_same_info(column, subject)
        return [_concatenate_experts(column) for column in columns]

    def _check_same_info(self, row: Sequence[StoredTensor], subject: str) -> None:
        """Raise ``CorruptCheckpointError`` if ranks have different dtypes or shapes."""
        for other in row[1:]:
            if other.info != row[0].info:
                expected, actual = ([stored.info.dtype, list(stored.info.shape)] for stored in (row[0], other))
                file = other.file if isinstance(other, RankShard) else "a file of another rank"
                raise CorruptCheckpointError(
                    f"{subject} is {actual} in {file}, and {expected} on the first rank: the files are from two saves"
                )

    def _join_ranks(
        self, rule: ShardingRule, name: str, row: Sequence[StoredTensor], subject: str
    ) -> dict[str, StoredTensor]:
        """Join the shards of tensor-parallel ranks."""
        if rule.dim is None or not row[0].info.shape:
            if len(row) > 1:
                self.evidence.replicas.append((subject, row))
            return self._split_experts(rule, {piece.name: row[0] for piece in shard_pieces(rule, name)})
        return self._split_experts(rule, self._join_pieces(rule, name, row, subject))

    def _join_pieces(
        self, rule: ShardingRule, name: str, row: Sequence[StoredTensor], subject: str
    ) -> dict[str, StoredTensor]:
        """Join the shards of ranks that divide a dimension."""
        dim, info, pieces = rule.dim or 0, row[0].info, shard_pieces(rule, name)
        common = math.gcd(*(piece.share for piece in pieces))
        shares = sum(piece.share for piece in pieces) // common
        if dim >= len(info.shape) or info.shape[dim] % shares:
            raise InvalidArgumentError(
                f"{subject} has shape {list(info.shape)}, but the layout divides its dimension {dim} into {shares} "
                "parts"
            )
        joined: dict[str, tuple[int, Chunks]] = {}
        start = 0
        for piece in pieces:
            size = piece.share // common * (info.shape[dim] // shares)
            before, chunks = joined.get(piece.name, (0, ()))
            count, piece_chunks = self._join_blocks(piece, row, (dim, start, size), subject)
            joined[piece.name] = (
                before + count * size,
                chunks + offset_slices(piece_chunks, offset_along(info.shape, dim, before)),
            )
            start += size
        return {
            key: JoinedTensor(TensorInfo(info.dtype, slice_along(info.shape, dim, 0, size).shape), chunks)
            for key, (size, chunks) in joined.items()
        }

    def _join_blocks(
        self, piece: ShardPiece, row: Sequence[StoredTensor], span: tuple[int, int, int], subject: str
    ) -> tuple[int, Chunks]:
        """Return the number of blocks of a piece, and the chunks of the concatenated blocks.

        ``span`` is the dimension, the start and the size of the piece. Further copies of a block are added to the
        evidence.
        """
        dim, start, size = span
        shape = row[0].info.shape
        chunks_by_block: dict[int, Chunks] = {}
        chunks: Chunks = ()
        count = 1
        for rank, stored in enumerate(row):
            count, block = rank_block(piece, len(row), rank)
            rank_chunks = cut_slice(slices_of(stored), slice_along(shape, dim, start, start + size))
            if block in chunks_by_block:
                info = TensorInfo(stored.info.dtype, slice_along(shape, dim, 0, size).shape)
                self.evidence.replicas.append(
                    (subject, (JoinedTensor(info, chunks_by_block[block]), JoinedTensor(info, rank_chunks)))
                )
                continue
            chunks_by_block[block] = rank_chunks
            chunks += offset_slices(rank_chunks, offset_along(shape, dim, block * size))
        return count, chunks

    def _split_experts(self, rule: ShardingRule, joined: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Split stacked experts into single ones, and transpose tensors if the rule says so."""
        if not rule.transposed and not any(EXPERT in name for name in joined):
            return joined
        return {name: stored for key, whole in joined.items() for name, stored in _split_tensor(rule, key, whole)}


def _split_tensor(rule: ShardingRule, name: str, whole: StoredTensor) -> list[tuple[str, StoredTensor]]:
    """Return the tensors of a joined tensor by name: one for each expert, in torch's order of dimensions."""
    shape = whole.info.shape
    order = list(range(len(shape)))
    if rule.transposed and len(shape) > 1:
        order[-2:] = order[:-3:-1]
    if EXPERT not in name:
        return [(name, _permute_tensor(whole, slices_of(whole), shape, order))]
    if shape[0] > _MAX_EXPERTS:
        raise CorruptCheckpointError(f"{name!r} has {shape[0]} experts, more than the maximum of {_MAX_EXPERTS}")
    boxes = [slice_along(shape, 0, number, number + 1) for number in range(shape[0])]
    return [
        (name.replace(EXPERT, str(number)), _permute_tensor(whole, cut_slice(slices_of(whole), box), shape, order[1:]))
        for number, box in enumerate(boxes)
    ]


def _permute_tensor(whole: StoredTensor, chunks: Chunks, shape: Sequence[int], order: Sequence[int]) -> StoredTensor:
    return JoinedTensor(
        TensorInfo(whole.info.dtype, tuple(shape[index] for index in order)), permute_slices(chunks, order)
    )


def slices_of(stored: StoredTensor) -> Chunks:
    """Return the chunks of a tensor. Raises ``CorruptCheckpointError`` if they are unknown."""
    if isinstance(stored, RankShard):
        return stored.as_chunks()
    if isinstance(stored, JoinedTensor):
        return stored.chunks
    raise CorruptCheckpointError("the bytes of a tensor are in no known file")


def _concatenate_experts(column: Sequence[StoredTensor]) -> StoredTensor:
    """Concatenate the experts of expert-parallel ranks."""
    info = column[0].info
    n_experts = info.shape[0]
    chunks: Chunks = ()
    for rank, stored in enumerate(column):
        chunks += offset_slices(slices_of(stored), offset_along(info.shape, 0, rank * n_experts))
    return JoinedTensor(TensorInfo(info.dtype, (n_experts * len(column), *info.shape[1:])), chunks)
