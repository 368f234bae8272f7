"""ZeRO-1 states: each data-parallel rank has some rows of every parameter's. Put together, and divided again.

A parameter of N rows is filled up with zero rows until they are a multiple of the number of ranks; rank i has the
i-th of as many equal parts. Source: ``distributed/zero_redundancy_optimizer.py`` of torch_xla 2.9, and NxD's own
``optimizer/convert_zero_checkpoints.py`` for what whole states are like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.format.consistency import ReplicaEvidence
from holdfast.compat.nxd.format.rank_file import RankFile, RankShard
from holdfast.compat.nxd.format.slicing import JoinedTensor, Parts, cut_slice, offset_slices, slice_along, slice_at
from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.reader import FileExtent
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.files import TensorInfo

BASE, SHAPES, MASTERS = "base_state", "shape_info", "sharded_master_weights"

#: What the dict has, too, where experts have a data-parallel group of their own: see ``NeuronEPZero1Optimizer``.
EXPERTS = "ep_param_id_offset"


@dataclass(frozen=True, eq=False)
class ShardRows(StoredTensor):
    """Rows of a tensor: bytes from ``start`` to ``stop`` of it, and zeros after them."""

    info: TensorInfo
    whole: StoredTensor
    start: int
    stop: int

    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`. The zeros are in none of them."""
        found = self.whole.extents(self.start + start, min(self.start + stop, self.stop)) if start < self.nbytes else []
        return [FileExtent(one.file, one.offset, one.start - self.start, one.stop - self.start) for one in found]

    @property
    def nbytes(self) -> int:
        """Bytes that are not filling."""
        return self.stop - self.start


def is_zero(root: object) -> bool:
    """Whether a rank's file has the state of a ZeRO-1 optimizer."""
    return isinstance(root, dict) and isinstance(root.get(BASE), dict) and isinstance(root.get(SHAPES), dict)


def shape_of(root: Mapping[str, Any], pid: Any, where: Path) -> tuple[int, ...]:
    """The shape of a parameter, as tensor-parallel ranks have it. Raises ``CorruptCheckpointError``."""
    shape = root[SHAPES].get(pid)
    if not isinstance(shape, list | tuple) or not shape or not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptCheckpointError(f"{where} says of no shape that parameter {pid!r} has: its {SHAPES} is damaged")
    return tuple(shape)


def join_zero_states(files: Sequence[RankFile], evidence: ReplicaEvidence) -> dict[str, Any]:
    """The state of one tensor-parallel rank, of the files of its data-parallel ranks in their order.

    Raises ``CorruptCheckpointError`` naming a file that is not of the same save, ``FormatError`` for a state whose parts nobody
    can put together.
    """
    return _Joining(files, evidence).joined()


class _Joining:
    def __init__(self, files: Sequence[RankFile], evidence: ReplicaEvidence) -> None:
        self._files, self._evidence = files, evidence
        self._first = files[0]
        for file in files:
            if not is_zero(file.root):
                raise FormatError(f"{file.path} has no {BASE}: it is no state of a ZeRO-1 optimizer")

    def joined(self) -> dict[str, Any]:
        self._same_keys("the state", [file.root for file in self._files])
        return {key: self._entry(key) for key in self._first.root}

    def _entry(self, key: str) -> Any:
        values = [file.root[key] for file in self._files]
        if key == BASE:
            return self._each(key, values, self._states)
        if key == MASTERS:
            return self._each(
                key, values, lambda pid, shards: self._rows(f"{MASTERS} of {pid}", shards, self._shape(pid))
            )
        return self._same(key, values)

    def _each(self, key: str, values: list[Any], join: Callable[[Any, list[Any]], Any]) -> dict[Any, Any]:
        self._same_keys(key, values)
        return {pid: join(pid, [value[pid] for value in values]) for pid in values[0]}

    def _shape(self, pid: Any) -> tuple[int, ...]:
        return shape_of(self._first.root, pid, self._first.path)

    def _states(self, pid: Any, values: list[Any]) -> dict[Any, Any]:
        what = f"{BASE} of {pid}"
        self._same_keys(what, values)
        return {
            name: self._state(f"{what}, {name}", name, [value[name] for value in values], pid) for name in values[0]
        }

    def _state(self, what: str, name: Any, values: list[Any], pid: Any) -> Any:
        if not all(isinstance(value, RankShard) for value in values):
            return self._same(what, values)
        shape, ranks = self._shape(pid), len(values)
        if ranks == 1:
            return values[0]
        local = (-(-shape[0] // ranks), *shape[1:])
        if goes_with_rows(str(name), values[0].info.shape, local, what):
            return self._rows(what, values, shape[: len(values[0].info.shape)])
        return self._alike(what, values)

    def _rows(self, what: str, shards: list[Any], shape: tuple[int, ...]) -> StoredTensor:
        expected = (-(-shape[0] // len(shards)), *shape[1:])
        for file, shard in zip(self._files, shards, strict=True):
            if not isinstance(shard, RankShard) or shard.info.shape != expected:
                has = list(shard.info.shape) if isinstance(shard, RankShard) else "no tensor"
                raise CorruptCheckpointError(
                    f"{what} has shape {has} in {file.path}; of {list(shape)}, each of {len(shards)} data-parallel "
                    f"ranks has {list(expected)}: files are missing, or of another save (with context parallelism, NxD "
                    "let ranks write over each other's files)"
                )
        if len(shards) == 1:
            return shards[0]  # type: ignore[no-any-return]
        info = TensorInfo(shards[0].info.dtype, shape)
        if any(shard.info.dtype != info.dtype for shard in shards):
            raise CorruptCheckpointError(f"{what} has different dtypes in {self._first.path} and files beside it")
        return JoinedTensor(info, self._parts(what, shards, shape, expected))

    def _parts(self, what: str, shards: list[RankShard], shape: tuple[int, ...], expected: tuple[int, ...]) -> Parts:
        parts: Parts = ()
        for rank, shard in enumerate(shards):
            first = rank * expected[0]
            number = max(0, min(expected[0], shape[0] - first))
            parts += offset_slices(
                cut_slice(shard.parts(), slice_along(expected, 0, 0, number)), slice_at(shape, 0, first)
            )
            if number < expected[0] and shard.info.nbytes:
                self._evidence.padding.append((what, shard, shard.info.nbytes // expected[0] * number))
        return parts

    def _alike(self, what: str, shards: list[RankShard]) -> StoredTensor:
        """What is no parameter's rows: a number of steps, or a state that ranks must have alike."""
        if any(shard.info != shards[0].info for shard in shards):
            raise FormatError(
                f"{what} has another shape on other data-parallel ranks, and not that of their rows: how it is to be "
                "put together, nobody can tell"
            )
        self._evidence.copies.append((what, shards))
        return shards[0]

    def _same(self, what: str, values: list[Any]) -> Any:
        for file, value in zip(self._files, values, strict=True):
            if not have_equal_values(f"{what}", values[0], value, self._evidence):
                raise CorruptCheckpointError(
                    f"{what} in {file.path} is not what it is in {self._first.path}: they are of two different "
                    "steps, or of two runs"
                )
        return values[0]

    def _same_keys(self, what: str, values: list[Any]) -> None:
        for file, value in zip(self._files, values, strict=True):
            if not isinstance(value, dict) or value.keys() != values[0].keys():
                raise CorruptCheckpointError(
                    f"{what} in {file.path} has other entries than in {self._first.path}: they are of two "
                    "different saves"
                )


def have_equal_values(what: str, one: Any, other: Any, evidence: ReplicaEvidence) -> bool:
    """Whether values are equal; tensors in them are evidence, to be compared later."""
    if isinstance(one, RankShard) and isinstance(other, RankShard):
        if one is not other:
            evidence.copies.append((what, (one, other)))
        return one.info == other.info
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        keys = one.keys() == other.keys()
        return keys and all(have_equal_values(f"{what}, {key}", one[key], other[key], evidence) for key in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(have_equal_values(what, *pair, evidence) for pair in pairs)
    return bool(one == other) or one != one  # noqa: PLR0124 - a value that is not a number


def goes_with_rows(name: str, shape: tuple[int, ...], parameter: tuple[int, ...], what: str) -> bool:
    """Whether a state of some shape is divided as the rows of its parameter are; else all ranks have the same.

    Raises ``FormatError`` where neither shape nor name tells.
    """
    if not shape:
        return False
    rows, columns = shape == parameter[: len(shape)], shape == parameter[len(parameter) - len(shape) :]
    if rows and columns and shape != parameter:
        by_name = [kind for kind in ("row", "col") if kind in name.lower()]
        if len(by_name) != 1:
            raise FormatError(f"{what}: whether it is of rows or of columns, neither its shape nor its name tells")
        return by_name == ["row"]
    return rows


def shard_zero_state(root: Mapping[str, Any], ranks: int, where: Path) -> list[dict[str, Any]]:
    """The states of so many data-parallel ranks. What is no rows all of them get."""
    return [{key: _entry(root, key, rank, ranks, where) for key in root} for rank in range(ranks)]


def _entry(root: Mapping[str, Any], key: str, rank: int, ranks: int, where: Path) -> Any:
    if key == MASTERS:
        return {pid: rank_slice(whole, rank, ranks) for pid, whole in root[key].items()}
    if key != BASE:
        return root[key]
    return {
        pid: {
            name: rank_slice(value, rank, ranks)
            if isinstance(value, StoredTensor)
            and goes_with_rows(str(name), value.info.shape, shape_of(root, pid, where), f"{BASE} of {pid}, {name}")
            else value
            for name, value in states.items()
        }
        for pid, states in root[key].items()
    }


def rank_slice(whole: StoredTensor, rank: int, ranks: int) -> StoredTensor:
    """The rows that one of some data-parallel ranks has."""
    first, *rest = whole.info.shape
    rows = -(-first // ranks)
    size = whole.info.nbytes // first if first else 0
    start, stop = (min(first, number * rows) * size for number in (rank, rank + 1))
    return ShardRows(TensorInfo(whole.info.dtype, (rows, *rest)), whole, start, stop)
