"""Joining the tensor-parallel ranks' parts of a model and its optimizer, as AutoTP describes it.

:mod:`rankless.deepspeed.reader.tag_contents` joins with it on each rank that opens a checkpoint of AutoTP. Copies of a
tensor on several ranks must be equal: :class:`RankJoiner` collects them for the check.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rankless.deepspeed.reader.autotp_shard_map import AffinePiece, ShardMap, replicate
from rankless.deepspeed.reader.joined_optimizer import JoinedOptimizer
from rankless.engine.io.tensor_sources import SourceChunk
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.chunked_tensor_slices import chunks_of_extent, cut_slice, offset_slices
from rankless.formats.reader import FileExtent
from rankless.formats.stored_tensor import StoredTensor
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.read_budget import ReadBudget

#: Units of work for a chunk of a tensor.
_CHUNK = 16


@dataclass(frozen=True, eq=False)
class ShardedTensor(StoredTensor):
    """A tensor that consists of boxes of the tensors of ranks, the ``shards``.

    ``label`` names it in messages. Its chunks are charged to ``budget``.
    """

    label: str
    info: TensorInfo
    pieces: Sequence[AffinePiece]
    shards: Sequence[StoredTensor]
    budget: ReadBudget

    @property
    def identity(self) -> Hashable:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        return self.info, tuple(shard.identity for shard in self.shards)

    @cached_property
    def _whole(self) -> StoredTensor:
        """The shard that has all of it, or a tensor of chunks. A read takes many rows at once."""
        piece = self.pieces[0] if len(self.pieces) == 1 else None
        if piece is not None and piece.box.shape == self.info.shape == self.shards[piece.rank].info.shape:
            return self.shards[piece.rank]
        return ChunkedTensor(self.info, tuple(chunk for piece in self.pieces for chunk in self._find_chunks(piece)))

    def _find_chunks(self, piece: AffinePiece) -> Iterator[SourceChunk]:
        shard, box = self.shards[piece.rank], IndexBox(piece.inside, piece.box.shape)
        for extent in shard.find_extents(0, shard.info.nbytes):
            chunks = chunks_of_extent(extent, shard.info)
            if chunks is None:
                raise FormatError(f"{self.label} is stored neither in ranges nor in boxes of files")
            self.budget.spend(_CHUNK * len(chunks))
            yield from offset_slices(cut_slice(chunks, box), piece.box.offset)

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        return self._whole.find_extents(start, stop)


@dataclass
class RankJoiner:
    """A joiner of the tensors of all ranks. ``maps`` have the parameters; ``paths`` are the files of the ranks.

    ``replicas`` are whole tensors that must be alike, each with a label: the same one from other ranks.
    """

    maps: Mapping[str, ShardMap]
    paths: Sequence[Path]
    budget: ReadBudget
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
        source = f"{self.paths[0]}: the {label}"
        copies = [
            ShardedTensor(source, info, [pieces[min(copy, len(pieces) - 1)] for pieces in holders], values, self.budget)
            for copy in range(max(map(len, holders), default=1))
        ]
        if len(copies) > 1:
            self.replicas.append((label, copies))
        return copies[0]

    def _require_map(self, name: str) -> ShardMap:
        if name not in self.maps:
            raise FormatError(f"{self.paths[0]}: its affine_map does not say how ranks divide {name!r:.100}")
        return self.maps[name]
