"""One rank's file: a tree, with tensors in it or in files of their own beside it. No pickle is run.

Source: ``trainer/checkpoint.py`` of NxD 0.5 to 0.18, ``utils/serialization.py`` of torch_xla.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.format.file_names import INFO, TENSORS
from holdfast.compat.nxd.format.slicing import Parts
from holdfast.engine.io.sources import SourceChunk, StridedLocation
from holdfast.engine.plan.ranges import IndexBox
from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.contained_paths import check_contained
from holdfast.formats.pickles.builtin_types import plain_record
from holdfast.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from holdfast.formats.reader import FileExtent
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.torchfile import archive, legacy
from holdfast.formats.torchfile.allowed_globals import NAMES
from holdfast.formats.torchfile.dtypes import DTYPES
from holdfast.formats.torchfile.objects import TorchDtype, TorchTensor
from holdfast.formats.torchfile.zip_reader import FileWindow, is_zip
from holdfast.formats.tree.expanded_size import check_expanded_size
from holdfast.formats.tree.traversal import rebuild_tree, show_path
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.storage import posix
from holdfast.storage.reader_pool import ReaderPool

#: What stands where a tensor is in a file of its own. The second is a mistake of NxD's, which nothing there undoes.
_REFERENCES = (
    "torch_xla.utils.serialization.TensorReference",
    "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
)
_ALLOWED: Mapping[str, object] = {**NAMES, **{name: AllowedCallable(name, plain_record(name)) for name in _REFERENCES}}


@dataclass(frozen=True)
class FileAccess:
    """A checkpoint that is open: its folder, what reads files in it, and what all of them may cost."""

    root: Path
    readers: ReaderPool
    budget: ReadBudget = field(default_factory=ReadBudget)


@dataclass(frozen=True, eq=False)
class RankShard(StoredTensor):
    """What one rank has of a tensor. ``expert`` says whether it is an expert's, where that was written down."""

    info: TensorInfo
    file: Path
    find: Callable[[], TorchTensor]
    expert: bool | None = None

    @cached_property
    def tensor(self) -> TorchTensor:
        """The tensor in the file, looked for when it is first needed. Raises ``CorruptCheckpointError``."""
        found = self.find()
        if found.info != self.info:
            there, here = ([one.info.dtype, list(one.info.shape)] for one in (found, self))
            raise CorruptCheckpointError(
                f"{self.file} has a tensor of {there}, and should have one of {here}: it is of another save"
            )
        return found

    @property
    def exists(self) -> bool:
        """Whether its file is there."""
        return posix.is_taken(self.file)

    @property
    def identity(self) -> Hashable:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        return id(self)

    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        return self.tensor.extents(start, stop)

    def _place(self) -> StridedLocation:
        return self.tensor.place()

    def parts(self) -> Parts:
        """All of it, as a box."""
        whole = IndexBox((0,) * len(self.info.shape), self.info.shape)
        return (SourceChunk(whole, self._place, (self.file, 0)),) if self.info.nbytes else ()


@dataclass(frozen=True)
class RankFile:
    """What a rank saved. ``nbytes`` and ``digest`` are those of the pickle; ``files``: those that are there of it."""

    path: Path
    root: Any
    nbytes: int
    digest: int
    files: Sequence[Path]
    shards: Sequence[RankShard]
    xser: bool

    def check(self) -> None:
        """Look at every tensor's file. Raises ``CorruptCheckpointError`` naming the first that is not as it should be."""
        for shard in self.shards:
            end = shard.tensor.storage.start + shard.tensor.storage.nbytes
            if end > posix.size_of(shard.file):
                raise CorruptCheckpointError(f"{shard.file} is cut short: its tensor ends at byte {end}")


def read_rank_file(path: Path, access: FileAccess, redirect: Path | None = None) -> RankFile:
    """Read a rank's file. Tensors that are not beside it are looked for beside ``redirect``."""
    return _Loading(path, access, redirect).read()


def read_tree(path: Path, access: FileAccess, budget: ReadBudget | None = None) -> archive.ArchiveTree:
    """The tree in a file of ``torch.save``, with what NxD puts into it, paid from a ``budget`` or from the common one.

    Raises ``UnsafeNameError`` where the file is not in the folder that was opened.
    """
    check_contained(path, access.root)
    window = FileWindow(path, 0, posix.size_of(path), access.readers)
    paid = access.budget if budget is None else budget
    return (
        archive.read_archive(window, paid, _ALLOWED)
        if is_zip(window)
        else legacy.read_legacy_archive(window, paid, _ALLOWED)
    )


class _Loading:
    def __init__(self, path: Path, access: FileAccess, redirect: Path | None) -> None:
        self._path, self._access, self._redirect = path, access, redirect
        self._shards: dict[Hashable, RankShard] = {}
        self._infos: Mapping[Any, Any] = {}

    def read(self) -> RankFile:
        tree = read_tree(self._path, self._access)
        info = self._beside(INFO)
        extra = [info] if posix.is_taken(info) else []
        if extra:
            found = read_tree(info, self._access).root
            self._infos = found if isinstance(found, dict) else {}
        try:
            check_expanded_size(tree.root, self._access.budget)
            root = rebuild_tree(tree.root, self._leaf)
        except RecursionError as error:
            raise CorruptCheckpointError(f"{self._path}: its values are nested too deeply") from error
        except (CorruptCheckpointError, FormatError) as error:
            raise type(error)(f"{self._path}: {error}") from error
        shards = list(self._shards.values())
        files = [
            self._path,
            *extra,
            *dict.fromkeys(one.file for one in shards if one.file != self._path and one.exists),
        ]
        xser = bool(extra) or posix.is_directory(self._beside(TENSORS))
        return RankFile(self._path, root, tree.nbytes, tree.digest, files, shards, xser)

    def _beside(self, ending: str) -> Path:
        return self._path.with_name(self._path.name + ending)

    def _leaf(self, path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, TorchTensor):
            return self._shards.setdefault(value.identity, RankShard(value.info, self._path, lambda: value))
        if isinstance(value, OpaqueObject) and value.name in _REFERENCES:
            tid = value.state.get("tid") if isinstance(value.state, dict) else None
            if type(tid) is not int or tid < 0:
                raise CorruptCheckpointError(f"{show_path(path)} refers to no tensor")
            if tid not in self._shards:
                self._shards[tid] = self._referred(tid)
            return self._shards[tid]
        return value

    def _referred(self, tid: int) -> RankShard:
        row = self._infos.get(tid)
        row = row if isinstance(row, dict) else {}
        expert = row.get("expert_model_parallel")
        file = self._tensor_file(tid)
        find = partial(_tensor, file, self._access)
        dtype, shape = row.get("dtype"), row.get("shape")
        if isinstance(dtype, TorchDtype) and dtype.name in DTYPES and isinstance(shape, tuple):
            return RankShard(TensorInfo(DTYPES[dtype.name], tuple(shape)), file, find, expert)
        found = find()
        return RankShard(found.info, file, lambda: found, expert)

    def _tensor_file(self, tid: int) -> Path:
        """A rank of experts has the files of their tensors only; all else is beside the first such rank's."""
        own = self._beside(TENSORS) / f"tensor_{tid}.pt"
        if self._redirect is not None and not posix.is_taken(own):
            other = self._redirect.with_name(self._redirect.name + TENSORS) / own.name
            return other if posix.is_taken(other) else own
        return own


def _tensor(file: Path, access: FileAccess) -> TorchTensor:
    if not posix.is_taken(file):
        raise CorruptCheckpointError(f"{file} is missing; the file of its rank names it")
    found = read_tree(file, access, ReadBudget()).root
    if not isinstance(found, TorchTensor):
        raise FormatError(f"{file} should hold a tensor, and holds {getattr(found, 'why', 'something else')}")
    return found
