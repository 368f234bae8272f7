"""Shards whole tensors among tensor-parallel ranks as a layout says: the inverse of :mod:`.unshard`.

:mod:`rankless.nxd.writer.parameters` shards with it, on rank 0. A change of the division here needs the same change
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankless.errors import FormatError, InvalidArgumentError
from rankless.formats.chunked_tensor_slices import (
    Chunks,
    JoinedTensor,
    chunks_of_extent,
    cut_slice,
    offset_along,
    offset_slices,
    permute_slices,
    slice_along,
    unsqueeze_slices,
)
from rankless.formats.reader import Reader
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader.sharding_spec import (
    EXPERT,
    ShardingRule,
    ShardingSpec,
    ShardPiece,
    match_number,
    rank_block,
    shard_pieces,
)
from rankless.nxd.reader.unshard import slices_of
from rankless.ondisk.data_files import TensorInfo


def stored_slices(reader: Reader, group: str, name: str) -> JoinedTensor:
    """Return a tensor of a checkpoint of any format, as chunks of files.

    Raises ``FormatError`` if it is stored neither in ranges nor in boxes of files.
    """
    info = reader.groups[group][name]
    chunks: Chunks = ()
    for extent in reader.find_extents(group, name, 0, info.nbytes):
        extent_chunks = chunks_of_extent(extent, info)
        if extent_chunks is None:
            raise FormatError(
                f"{reader.path}: {group} tensor {name!r} is stored neither in ranges nor in boxes of files; convert "
                "the checkpoint to native first"
            )
        chunks += extent_chunks
    return JoinedTensor(info, chunks)


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of NxD: its rule, and the names of the whole parameters of its pieces, in order."""

    name: str
    rule: ShardingRule
    names: Sequence[str]


def shard_tensor(spec: ShardingSpec, whole: Sequence[str]) -> list[ShardedParameter]:
    """Return the NxD parameters that some whole parameters make up, in their order.

    Raises ``InvalidArgumentError`` if the layout has no rule for one, or if a parameter is missing that a rule needs.
    """
    names = dict.fromkeys(spec.stored_name(name) for name in whole)
    sharded = []
    for name in names:
        rule = spec.rule_for(name)
        piece_names = list(
            dict.fromkeys(
                piece_name for piece in shard_pieces(rule, name) for piece_name in _expand_experts(piece.name, whole)
            )
        )
        missing = next((piece_name for piece_name in piece_names if piece_name not in set(whole)), None)
        if missing is not None or not piece_names:
            raise InvalidArgumentError(
                f"the NxD parameter {name!r} needs {missing or name!r}, which the checkpoint does not have"
            )
        sharded.append(ShardedParameter(name, rule, piece_names))
    used = {piece_name for parameter in sharded for piece_name in parameter.names}
    unused = next((name for name in whole if name not in used), None)
    if unused is not None:
        raise InvalidArgumentError(
            f"the layout puts {unused!r} into the NxD parameter {spec.stored_name(unused)!r}, which is not made of it"
        )
    return sharded


def _expand_experts(pattern: str, whole: Sequence[str]) -> list[str]:
    """Expand a pattern to the names of all experts."""
    if EXPERT not in pattern:
        return [pattern]
    numbers = sorted({number for name in whole if (number := match_number(pattern, name)) is not None})
    return [pattern.replace(EXPERT, str(index)) for index in range(len(numbers))]


def local_slices(parameter: ShardedParameter, whole: Mapping[str, StoredTensor], tp: int, rank: int) -> StoredTensor:
    """Return the shard that one of some tensor-parallel ranks has of a parameter."""
    rule = parameter.rule
    pieces = shard_pieces(rule, parameter.name)
    joined = {piece.name: _join_piece(rule, piece.name, parameter.names, whole) for piece in pieces}
    if rule.dim is None:
        return joined[pieces[0].name]
    shape, chunks = _RankPieces(rule.dim, tp, rank, parameter.name).join_pieces(pieces, joined)
    return JoinedTensor(TensorInfo(joined[pieces[0].name].info.dtype, shape), chunks)


@dataclass(frozen=True)
class _RankPieces:
    """Concatenates the pieces of one rank along a dimension."""

    dim: int
    tp: int
    rank: int
    name: str

    def join_pieces(
        self, pieces: Sequence[ShardPiece], joined: Mapping[str, StoredTensor]
    ) -> tuple[tuple[int, ...], Chunks]:
        """Return the shape and the chunks of the concatenated pieces."""
        blocks_done: dict[str, int] = {}
        chunks: Chunks = ()
        size, shape = 0, joined[pieces[0].name].info.shape
        repeats = {piece.name: sum(other.name == piece.name for other in pieces) for piece in pieces}
        for piece in pieces:
            whole = joined[piece.name]
            count, block = rank_block(piece, self.tp, self.rank)
            block_size = self._block_size(whole.info.shape, count * repeats[piece.name])
            start = (blocks_done.setdefault(piece.name, 0) + block) * block_size
            blocks_done[piece.name] += count
            rank_chunks = cut_slice(
                slices_of(whole), slice_along(whole.info.shape, self.dim, start, start + block_size)
            )
            chunks += offset_slices(rank_chunks, offset_along(whole.info.shape, self.dim, size))
            size += block_size
        return slice_along(shape, self.dim, 0, size).shape, chunks

    def _block_size(self, shape: tuple[int, ...], blocks: int) -> int:
        if self.dim >= len(shape) or shape[self.dim] % blocks:
            raise InvalidArgumentError(
                f"{self.name!r} has a piece of shape {list(shape)}, whose dimension {self.dim} is no multiple "
                f"of {blocks}, as {self.tp} tensor-parallel ranks need"
            )
        return shape[self.dim] // blocks


def _join_piece(
    rule: ShardingRule, pattern: str, names: Sequence[str], whole: Mapping[str, StoredTensor]
) -> StoredTensor:
    """Return a piece in NxD's format: experts stacked, and transposed if the rule says so."""
    if EXPERT not in pattern:
        return _transpose(rule, whole[pattern])
    experts = [_transpose(rule, whole[name]) for name in names if match_number(pattern, name) is not None]
    chunks = tuple(
        chunk for index, expert in enumerate(experts) for chunk in unsqueeze_slices(slices_of(expert), index)
    )
    return JoinedTensor(TensorInfo(experts[0].info.dtype, (len(experts), *experts[0].info.shape)), chunks)


def _transpose(rule: ShardingRule, stored: StoredTensor) -> StoredTensor:
    if not rule.transposed or len(stored.info.shape) < 2:  # noqa: PLR2004 - rows and columns
        return stored
    order = list(range(len(stored.info.shape)))
    order[-2:] = order[:-3:-1]
    shape = tuple(stored.info.shape[index] for index in order)
    return JoinedTensor(TensorInfo(stored.info.dtype, shape), permute_slices(slices_of(stored), order))
