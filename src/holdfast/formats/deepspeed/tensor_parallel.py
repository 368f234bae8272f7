"""Joining what tensor-parallel ranks have of a model and its optimizer, as AutoTP describes it."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.engine.plan.ranges import IndexBox, boxes_of_range
from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.deepspeed.affine_map import ShardMap, ShardPiece, replicate
from holdfast.formats.deepspeed.joined_optimizer import JoinedOptimizer
from holdfast.formats.reader import FileExtent
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo


@dataclass(frozen=True, eq=False)
class ShardedTensor(StoredTensor):
    """A tensor that consists of boxes of the tensors of ranks, the ``shards``."""

    info: TensorInfo
    pieces: Sequence[ShardPiece]
    shards: Sequence[StoredTensor]

    @property
    def identity(self) -> Hashable:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        return self.info, tuple(shard.identity for shard in self.shards)

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        width = dtype_width(self.info.dtype)
        runs = [
            run
            for box in boxes_of_range(self.info.shape, start // width, -(-stop // width))
            for piece in self.pieces
            for run in self._find_runs(box, piece)
        ]
        extents: list[FileExtent] = []
        for first, size, rank, position in sorted(runs):
            shift = (first - position) * width
            low, high = max(start, first * width), min(stop, (first + size) * width)
            extents += [
                FileExtent(extent.file, extent.offset, extent.start + shift, extent.stop + shift)
                for extent in self.shards[rank].find_extents(low - shift, high - shift)
            ]
        return extents

    def _find_runs(self, box: IndexBox, piece: ShardPiece) -> Iterator[tuple[int, int, int, int]]:
        """Yield the runs of elements of a box that are in a piece: first element, size, rank, position in its shard."""
        starts = tuple(map(max, box.offset, piece.box.offset))
        sizes = tuple(min(a + b, c + d) - e for a, b, c, d, e in zip(*box, *piece.box, starts, strict=True))
        if any(size <= 0 for size in sizes):
            return
        inside = [a - b + c for a, b, c in zip(starts, piece.box.offset, piece.inside, strict=True)]
        whole, shard = self.info.shape, self.shards[piece.rank].info.shape
        outer = len(sizes)
        while outer > 0 and (outer == len(sizes) or sizes[outer] == whole[outer] == shard[outer]):
            outer -= 1
        run = math.prod(sizes[outer:])
        for index in itertools.product(*map(range, sizes[:outer])):
            shifts = (*index, *(0 for _ in sizes[outer:]))
            first = _flat_index(map(operator.add, starts, shifts), whole)
            yield first, run, piece.rank, _flat_index(map(operator.add, inside, shifts), shard)


def _flat_index(index: Iterator[int], shape: Sequence[int]) -> int:
    flat = 0
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at
    return flat


@dataclass
class RankJoiner:
    """A joiner of the tensors of all ranks. ``maps`` have the parameters; ``paths`` are the files of the ranks.

    ``replicas`` are whole tensors that must be alike, each with a label: the same one from other ranks.
    """

    maps: Mapping[str, ShardMap]
    paths: Sequence[Path]
    replicas: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)

    def join_module(self, modules: Sequence[Mapping[str, Any]], buffers: Sequence[str]) -> dict[str, Any]:
        """Return the state dict of the whole model. Tied parameters have the map of the one that is described."""
        first = modules[0]
        aliases = {first[name].identity: name for name in self.maps if isinstance(first.get(name), StoredTensor)}
        for module, path in zip(modules, self.paths, strict=True):
            if module.keys() != first.keys():
                raise CorruptCheckpointError(
                    f"{path} has other tensors than {self.paths[0]}: the files are from two saves"
                )
        joined = {}
        for name, value in first.items():
            described = aliases.get(value.identity) if isinstance(value, StoredTensor) else None
            if described is None and isinstance(value, StoredTensor) and name not in buffers:
                raise FormatError(f"{self.paths[0]}: its affine_map does not say how ranks divide {name!r:.100}")
            joined[name] = self._join(f"tensor {name!r:.100}", described, [module[name] for module in modules])
        return joined

    def join_optimizers(self, optimizers: Sequence[JoinedOptimizer]) -> JoinedOptimizer:
        """Return the optimizer of whole parameters."""
        first = optimizers[0]
        for other, path in zip(optimizers, self.paths, strict=True):
            if other.groups != first.groups or other.masters.keys() != first.masters.keys():
                raise CorruptCheckpointError(
                    f"{path}: the optimizer has other groups or parameters than that of {self.paths[0]}: the files "
                    "are from two saves"
                )
        joined = JoinedOptimizer(groups=first.groups, values=first.values)
        for name in first.masters:
            masters = [optimizer.masters[name] for optimizer in optimizers]
            joined.masters[name] = self._join(f"master weight of {name!r:.100}", name, masters)
            joined.states[name] = self._join_states(name, [optimizer.states.get(name, {}) for optimizer in optimizers])
        joined.replicas = [*(replica for optimizer in optimizers for replica in optimizer.replicas), *self.replicas]
        return joined

    def _join_states(self, name: str, tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if any(table.keys() != tables[0].keys() for table in tables):
            raise CorruptCheckpointError(f"{self.paths[0]}: tensor-parallel ranks have other states of {name!r:.100}")
        states = {}
        for state, value in tables[0].items():
            is_divided = isinstance(value, StoredTensor) and bool(value.info.shape)
            values = [table[state] for table in tables]
            label = f"state {state!r:.100} of {name!r:.100}"
            states[state] = self._join(label, name if is_divided else None, values)
        return states

    def _join(self, label: str, described: str | None, values: Sequence[Any]) -> Any:
        """Return a whole tensor, or a value that all ranks have alike."""
        first = values[0]
        if not isinstance(first, StoredTensor):
            if any(type(value) is not type(first) or value != first for value in values):
                raise CorruptCheckpointError(f"{self.paths[0]}: the {label} differs between tensor-parallel ranks")
            return first
        shard_map = replicate(first.info.shape, len(values)) if described is None else self._require_map(described)
        for value, shape, path in zip(values, shard_map.shard_shapes, self.paths, strict=True):
            if not isinstance(value, StoredTensor) or value.info != TensorInfo(first.info.dtype, shape):
                raise CorruptCheckpointError(
                    f"{path}: the {label} has not the dtype {first.info.dtype} and the shape {list(shape)} that the "
                    "other ranks and affine_map need: the files are from two saves"
                )
        info = TensorInfo(first.info.dtype, shard_map.shape)
        holders = list(shard_map.holders().values())
        copies = [
            ShardedTensor(info, [pieces[min(copy, len(pieces) - 1)] for pieces in holders], values)
            for copy in range(max(map(len, holders), default=1))
        ]
        if len(copies) > 1:
            self.replicas.append((label, copies))
        return copies[0]

    def _require_map(self, name: str) -> ShardMap:
        if name not in self.maps:
            raise FormatError(f"{self.paths[0]}: its affine_map does not say how ranks divide {name!r:.100}")
        return self.maps[name]
