"""ZeRO-1 states: joins and shards the rows that each data-parallel rank has of every parameter's state.

A parameter of N rows is padded with zero rows to a multiple of the number of ranks; rank i has the i-th of equal parts.
Source: ``distributed/zero_redundancy_optimizer.py`` of torch_xla 2.9, and NxD's
``optimizer/convert_zero_checkpoints.py`` for the format of whole states.

:mod:`rankless.nxd.reader.nxd_checkpoint` joins with it on each rank; the converters join and shard in one process.
Padding and order are the same as in NxD. For example, on 4 ranks a parameter of 6 rows gets 2 rows of zeros, and rank 1
has rows 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.chunked_tensor_slices import (
    Chunks,
    JoinedTensor,
    cut_slice,
    offset_along,
    offset_slices,
    slice_along,
)
from rankless.formats.reader import FileExtent
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader.rank_file import RankFile, RankShard
from rankless.nxd.reader.replica_evidence import ReplicaEvidence
from rankless.ondisk.data_files import TensorInfo

BASE, SHAPES, MASTERS = "base_state", "shape_info", "sharded_master_weights"

#: A further key if experts have a separate data-parallel group: see ``NeuronEPZero1Optimizer``.
EXPERTS = "ep_param_id_offset"


@dataclass(frozen=True, eq=False)
class ShardRows(StoredTensor):
    """Rows of a tensor: its bytes ``[start, stop)``, followed by zeros."""

    info: TensorInfo
    whole: StoredTensor
    start: int
    stop: int

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`. The padding is in none of the extents."""
        extents = (
            self.whole.find_extents(self.start + start, min(self.start + stop, self.stop))
            if start < self.nbytes
            else []
        )
        return [
            FileExtent(extent.file, extent.offset, extent.start - self.start, extent.stop - self.start)
            for extent in extents
        ]

    @property
    def nbytes(self) -> int:
        """The number of bytes without the padding."""
        return self.stop - self.start


def is_zero(root: object) -> bool:
    """Return whether the root of a rank's file is the state of a ZeRO-1 optimizer."""
    return isinstance(root, dict) and isinstance(root.get(BASE), dict) and isinstance(root.get(SHAPES), dict)


def parameter_shape(root: Mapping[str, Any], pid: Any, path: Path) -> tuple[int, ...]:
    """Return the shape of a parameter on a tensor-parallel rank.

    Raises ``CorruptCheckpointError`` naming the file ``path`` if it has no such shape.
    """
    shape = root[SHAPES].get(pid)
    if not isinstance(shape, list | tuple) or not shape or not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptCheckpointError(f"{path} has no valid shape of parameter {pid!r}: its {SHAPES} is corrupt")
    return tuple(shape)


def join_zero_states(files: Sequence[RankFile], evidence: ReplicaEvidence) -> dict[str, Any]:
    """Join the files of all data-parallel ranks, in their order, to the state of one tensor-parallel rank.

    Raises ``CorruptCheckpointError`` naming a file that is not of the same save, ``FormatError`` for a state with
    shards that cannot be joined.
    """
    return _ZeroJoiner(files, evidence).join_files()


class _ZeroJoiner:
    """Joins the ZeRO-1 states of the data-parallel ranks of one tensor-parallel rank."""

    def __init__(self, files: Sequence[RankFile], evidence: ReplicaEvidence) -> None:
        self._files, self._evidence = files, evidence
        self._first = files[0]
        for file in files:
            if not is_zero(file.root):
                raise FormatError(f"{file.path} has no {BASE}: it is not the state of a ZeRO-1 optimizer")

    def join_files(self) -> dict[str, Any]:
        self._require_same_keys("the state", [file.root for file in self._files])
        return {key: self._join_entry(key) for key in self._first.root}

    def _join_entry(self, key: str) -> Any:
        values = [file.root[key] for file in self._files]
        if key == BASE:
            return self._join_parameters(key, values, self._join_parameter_states)
        if key == MASTERS:
            return self._join_parameters(
                key,
                values,
                lambda pid, shards: self._join_rows(f"{MASTERS} of {pid}", shards, self._parameter_shape(pid)),
            )
        return self._require_equal(key, values)

    def _join_parameters(self, key: str, values: list[Any], join: Callable[[Any, list[Any]], Any]) -> dict[Any, Any]:
        self._require_same_keys(key, values)
        return {pid: join(pid, [value[pid] for value in values]) for pid in values[0]}

    def _parameter_shape(self, pid: Any) -> tuple[int, ...]:
        return parameter_shape(self._first.root, pid, self._first.path)

    def _join_parameter_states(self, pid: Any, values: list[Any]) -> dict[Any, Any]:
        subject = f"{BASE} of {pid}"
        self._require_same_keys(subject, values)
        return {
            name: self._join_state(f"{subject}, {name}", name, [value[name] for value in values], pid)
            for name in values[0]
        }

    def _join_state(self, subject: str, name: Any, values: list[Any], pid: Any) -> Any:
        if not all(isinstance(value, RankShard) for value in values):
            return self._require_equal(subject, values)
        shape, ranks = self._parameter_shape(pid), len(values)
        if ranks == 1:
            return values[0]
        local_shape = (-(-shape[0] // ranks), *shape[1:])
        if is_sharded_by_rows(str(name), values[0].info.shape, local_shape, subject):
            return self._join_rows(subject, values, shape[: len(values[0].info.shape)])
        return self._require_replicated(subject, values)

    def _join_rows(self, subject: str, shards: list[Any], shape: tuple[int, ...]) -> StoredTensor:
        """Join the rows of all ranks to one tensor."""
        expected = (-(-shape[0] // len(shards)), *shape[1:])
        for file, shard in zip(self._files, shards, strict=True):
            if not isinstance(shard, RankShard) or shard.info.shape != expected:
                actual = list(shard.info.shape) if isinstance(shard, RankShard) else "no tensor"
                raise CorruptCheckpointError(
                    f"{subject} has shape {actual} in {file.path}; of {list(shape)}, each of {len(shards)} "
                    f"data-parallel ranks has {list(expected)}: files are missing, or from another save "
                    "(with context parallelism, NxD ranks overwrite each other's files)"
                )
        if len(shards) == 1:
            return shards[0]  # type: ignore[no-any-return]
        info = TensorInfo(shards[0].info.dtype, shape)
        if any(shard.info.dtype != info.dtype for shard in shards):
            raise CorruptCheckpointError(
                f"{subject} has different dtypes in {self._first.path} and the files of other ranks"
            )
        return JoinedTensor(info, self._row_chunks(subject, shards, shape, expected))

    def _row_chunks(
        self, subject: str, shards: list[RankShard], shape: tuple[int, ...], expected: tuple[int, ...]
    ) -> Chunks:
        """Return the chunks of the joined rows, and record the padding as evidence."""
        chunks: Chunks = ()
        for rank, shard in enumerate(shards):
            first = rank * expected[0]
            n_rows = max(0, min(expected[0], shape[0] - first))
            chunks += offset_slices(
                cut_slice(shard.as_chunks(), slice_along(expected, 0, 0, n_rows)), offset_along(shape, 0, first)
            )
            if n_rows < expected[0] and shard.info.nbytes:
                self._evidence.padding.append((subject, shard, shard.info.nbytes // expected[0] * n_rows))
        return chunks

    def _require_replicated(self, subject: str, shards: list[RankShard]) -> StoredTensor:
        """Return a state that is not sharded by rows: all ranks must have the same, such as a number of steps."""
        if any(shard.info != shards[0].info for shard in shards):
            raise FormatError(
                f"{subject} has different shapes on data-parallel ranks, and not those of their rows: cannot tell how "
                "to join it"
            )
        self._evidence.copies.append((subject, shards))
        return shards[0]

    def _require_equal(self, subject: str, values: list[Any]) -> Any:
        """Return a value that must be equal on all ranks."""
        for file, value in zip(self._files, values, strict=True):
            if not have_equal_values(subject, values[0], value, self._evidence):
                raise CorruptCheckpointError(
                    f"{subject} in {file.path} differs from {self._first.path}: the files are from two different "
                    "steps or runs"
                )
        return values[0]

    def _require_same_keys(self, subject: str, values: list[Any]) -> None:
        """Raise ``CorruptCheckpointError`` if ranks have dicts with different keys."""
        for file, value in zip(self._files, values, strict=True):
            if not isinstance(value, dict) or value.keys() != values[0].keys():
                raise CorruptCheckpointError(
                    f"{subject} in {file.path} has other entries than in {self._first.path}: the files are from "
                    "two different saves"
                )


def have_equal_values(subject: str, value: Any, other: Any, evidence: ReplicaEvidence) -> bool:
    """Return whether values are equal. Tensors in them are added to the evidence, to be compared later."""
    if isinstance(value, RankShard) and isinstance(other, RankShard):
        if value is not other:
            evidence.copies.append((subject, (value, other)))
        return value.info == other.info
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        same_keys = value.keys() == other.keys()
        return same_keys and all(
            have_equal_values(f"{subject}, {key}", value[key], other[key], evidence) for key in value
        )
    if isinstance(value, list | tuple):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(have_equal_values(subject, *pair, evidence) for pair in pairs)
    return bool(value == other) or value != value  # noqa: PLR0124 - a value that is not a number


def is_sharded_by_rows(name: str, shape: tuple[int, ...], parameter: tuple[int, ...], subject: str) -> bool:
    """Return whether a state is sharded by rows as its parameter is; otherwise all ranks have the same.

    ``shape`` and ``parameter`` are the shapes of the state and the parameter. Raises ``FormatError`` if neither shape
    nor name tells.
    """
    if not shape:
        return False
    rows, columns = shape == parameter[: len(shape)], shape == parameter[len(parameter) - len(shape) :]
    if rows and columns and shape != parameter:
        by_name = [kind for kind in ("row", "col") if kind in name.lower()]
        if len(by_name) != 1:
            raise FormatError(f"{subject}: cannot tell from its shape or name whether it is sharded by rows or columns")
        return by_name == ["row"]
    return rows


def shard_zero_state(root: Mapping[str, Any], ranks: int, path: Path) -> list[dict[str, Any]]:
    """Shard a whole state for a number of data-parallel ranks. All ranks get values that are not sharded by rows."""
    return [{key: _shard_entry(root, key, rank, ranks, path) for key in root} for rank in range(ranks)]


def _shard_entry(root: Mapping[str, Any], key: str, rank: int, ranks: int, path: Path) -> Any:
    if key == MASTERS:
        return {pid: rank_slice(whole, rank, ranks) for pid, whole in root[key].items()}
    if key != BASE:
        return root[key]
    return {
        pid: {
            name: rank_slice(value, rank, ranks)
            if isinstance(value, StoredTensor)
            and is_sharded_by_rows(
                str(name), value.info.shape, parameter_shape(root, pid, path), f"{BASE} of {pid}, {name}"
            )
            else value
            for name, value in states.items()
        }
        for pid, states in root[key].items()
    }


def rank_slice(whole: StoredTensor, rank: int, ranks: int) -> StoredTensor:
    """Return the rows of a tensor that one of some data-parallel ranks has."""
    n_rows, *dims = whole.info.shape
    rows_per_rank = -(-n_rows // ranks)
    row_bytes = whole.info.nbytes // n_rows if n_rows else 0
    start, stop = (min(n_rows, number * rows_per_rank) * row_bytes for number in (rank, rank + 1))
    return ShardRows(TensorInfo(whole.info.dtype, (rows_per_rank, *dims)), whole, start, stop)
