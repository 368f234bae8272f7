"""Readers for one rank's file: a tree, with tensors in it or in separate files next to it. No pickle is run.

Source: ``trainer/checkpoint.py`` of NxD 0.5 to 0.18, ``utils/serialization.py`` of torch_xla.

The readers of this package open files with it, on each rank, and :mod:`rankless.nxd.offline_zero_conversion` in its
process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rankless.engine.io.tensor_sources import SourceChunk, StridedLocation
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.chunked_tensor_slices import Chunks
from rankless.formats.contained_paths import check_contained
from rankless.formats.pickles.builtin_types import plain_record
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from rankless.formats.reader import FileExtent
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.torchfile import archive, legacy_file
from rankless.formats.torchfile.allowed_globals import NAMES
from rankless.formats.torchfile.torch_placeholders import TorchDtype, TorchTensor
from rankless.formats.torchfile.zip_reader import FileWindow, is_zip
from rankless.formats.tree.expanded_size import check_expanded_size
from rankless.formats.tree.tree_traversal import rebuild_tree, show_path
from rankless.nxd.reader.nxd_file_names import INFO, TENSORS
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import BY_TORCH_NAME
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

#: Classes of references to tensors in separate files. The second is a bug of NxD, which it does not correct on load.
_REFERENCES = (
    "torch_xla.utils.serialization.TensorReference",
    "neuronx_distributed.trainer.checkpoint._InternalTensorReference",
)
_ALLOWED: Mapping[str, object] = {**NAMES, **{name: AllowedCallable(name, plain_record(name)) for name in _REFERENCES}}


@dataclass(frozen=True)
class RankFileAccess:
    """An open checkpoint: its folder, the readers of its files, and the budget that all of them share."""

    root: Path
    readers: ReaderPool
    budget: ReadBudget = field(default_factory=ReadBudget)


@dataclass(frozen=True, eq=False)
class RankShard(StoredTensor):
    """A rank's shard of a tensor. ``expert`` says whether it belongs to an expert, if the file records it."""

    info: TensorInfo
    file: Path
    load_tensor: Callable[[], TorchTensor]
    expert: bool | None = None

    @cached_property
    def tensor(self) -> TorchTensor:
        """The tensor in the file, read when it is first needed. Raises ``CorruptCheckpointError`` if it differs."""
        tensor = self.load_tensor()
        if tensor.info != self.info:
            actual, expected = ([stored.info.dtype, list(stored.info.shape)] for stored in (tensor, self))
            raise CorruptCheckpointError(
                f"{self.file} has a tensor of {actual}, and should have one of {expected}: it is from another save"
            )
        return tensor

    @property
    def exists(self) -> bool:
        """True if its file exists."""
        return store_of(self.file).file_exists(self.file)

    @property
    def identity(self) -> Hashable:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        return id(self)

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        return self.tensor.find_extents(start, stop)

    def _find_location(self) -> StridedLocation:
        return self.tensor.find_location()

    def as_chunks(self) -> Chunks:
        """Return the whole shard as one chunk; none for an empty shard."""
        whole = IndexBox((0,) * len(self.info.shape), self.info.shape)
        return (SourceChunk(whole, self._find_location, (self.file, 0)),) if self.info.nbytes else ()


@dataclass(frozen=True)
class RankFile:
    """The file of a rank. ``nbytes`` and ``digest`` are of the pickle; ``files`` are its existing files."""

    path: Path
    root: Any
    nbytes: int
    digest: int
    files: Sequence[Path]
    shards: Sequence[RankShard]
    xser: bool

    def check_tensors(self) -> None:
        """Check every tensor's file. Raises ``CorruptCheckpointError`` naming the first that is missing or invalid."""
        for shard in self.shards:
            end = shard.tensor.storage.start + shard.tensor.storage.nbytes
            if end > store_of(shard.file).file_size(shard.file):
                raise CorruptCheckpointError(f"{shard.file} is truncated: its tensor ends at byte {end}")


def read_rank_file(path: Path, access: RankFileAccess, redirect: Path | None = None) -> RankFile:
    """Read a rank's file. Tensors that are not next to it are looked up next to ``redirect``."""
    return _RankFileReader(path, access, redirect).read_file()


def read_tree(path: Path, access: RankFileAccess, budget: ReadBudget | None = None) -> archive.ArchiveTree:
    """Read the tree in a file of ``torch.save``, including NxD's references, within a ``budget`` or the shared one.

    Raises ``UnsafeNameError`` if the file is not in the folder that was opened.
    """
    check_contained(path, access.root)
    window = FileWindow(path, 0, store_of(path).file_size(path), access.readers)
    used_budget = access.budget if budget is None else budget
    return (
        archive.read_archive(window, used_budget, _ALLOWED)
        if is_zip(window)
        else legacy_file.read_legacy_archive(window, used_budget, _ALLOWED)
    )


class _RankFileReader:
    """Reads a rank's file."""

    def __init__(self, path: Path, access: RankFileAccess, redirect: Path | None) -> None:
        self._path, self._access, self._redirect = path, access, redirect
        self._shards: dict[Hashable, RankShard] = {}
        self._infos: Mapping[Any, Any] = {}

    def read_file(self) -> RankFile:
        tree = read_tree(self._path, self._access)
        info_path = self._with_suffix(INFO)
        info_files = [info_path] if store_of(info_path).file_exists(info_path) else []
        if info_files:
            infos = read_tree(info_path, self._access).root
            self._infos = infos if isinstance(infos, dict) else {}
        try:
            check_expanded_size(tree.root, self._access.budget)
            root = rebuild_tree(tree.root, self._convert_leaf)
        except RecursionError as error:
            raise CorruptCheckpointError(f"{self._path}: its values are nested too deeply") from error
        except (CorruptCheckpointError, FormatError) as error:
            raise type(error)(f"{self._path}: {error}") from error
        shards = list(self._shards.values())
        files = [
            self._path,
            *info_files,
            *dict.fromkeys(shard.file for shard in shards if shard.file != self._path and shard.exists),
        ]
        xser = bool(info_files) or store_of(info_path).is_directory(self._with_suffix(TENSORS))
        return RankFile(self._path, root, tree.nbytes, tree.digest, files, shards, xser)

    def _with_suffix(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)

    def _convert_leaf(self, path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, TorchTensor):
            return self._shards.setdefault(value.identity, RankShard(value.info, self._path, lambda: value))
        if isinstance(value, OpaqueObject) and value.name in _REFERENCES:
            tid = value.state.get("tid") if isinstance(value.state, dict) else None
            if type(tid) is not int or tid < 0:
                raise CorruptCheckpointError(f"{show_path(path)} refers to a tensor without a number")
            if tid not in self._shards:
                self._shards[tid] = self._open_reference(tid)
            return self._shards[tid]
        return value

    def _open_reference(self, tid: int) -> RankShard:
        """Return the shard that a reference stands for. Its file is only read now if nothing describes the tensor."""
        description = self._infos.get(tid)
        description = description if isinstance(description, dict) else {}
        expert = description.get("expert_model_parallel")
        file = self._find_tensor_file(tid)
        load_tensor = partial(_read_tensor_file, file, self._access)
        dtype, shape = description.get("dtype"), description.get("shape")
        if isinstance(dtype, TorchDtype) and dtype.name in BY_TORCH_NAME and isinstance(shape, tuple):
            return RankShard(TensorInfo(BY_TORCH_NAME[dtype.name], tuple(shape)), file, load_tensor, expert)
        tensor = load_tensor()
        return RankShard(tensor.info, file, lambda: tensor, expert)

    def _find_tensor_file(self, tid: int) -> Path:
        """Return the path of a tensor's file. Further expert-parallel ranks only store the tensors of experts."""
        rank_path = self._with_suffix(TENSORS) / f"tensor_{tid}.pt"
        if self._redirect is not None and not store_of(rank_path).file_exists(rank_path):
            first_path = self._redirect.with_name(self._redirect.name + TENSORS) / rank_path.name
            return first_path if store_of(first_path).file_exists(first_path) else rank_path
        return rank_path


def _read_tensor_file(file: Path, access: RankFileAccess) -> TorchTensor:
    if not store_of(file).file_exists(file):
        raise CorruptCheckpointError(f"{file} is missing; the file of its rank refers to it")
    tensor = read_tree(file, access, ReadBudget()).root
    if not isinstance(tensor, TorchTensor):
        raise FormatError(f"{file} must hold a tensor, but holds {getattr(tensor, 'why', 'something else')}")
    return tensor
