"""A model and optimizers as hooks have left them, read like a checkpoint: into any layout, by the same rules."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.conversion.torch_target import raw_bytes
from holdfast.engine.io.sources import InMemorySource
from holdfast.errors import UnsupportedTensorError
from holdfast.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from holdfast.formats.stored_tensor import InlineTensor
from holdfast.formats.tree.contents import classify_tree
from holdfast.formats.tree.tree_reader import TreeReader
from holdfast.lightning.lazy_state import StoredModelState
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.ondisk.validation import strip_wrapper_prefixes
from holdfast.ondisk.values import ArrayCodec
from holdfast.state.model.view import EXTRA
from holdfast.state.tensors import NAMES


class HookedModel:
    """A model of which some tensors are in memory, and the rest lies in a checkpoint.

    See :class:`holdfast.formats.reader.Reader`.
    """

    def __init__(self, reader: Reader, entries: Mapping[str, Any]) -> None:
        self._reader = reader
        self._unread = dict(entries.unread) if isinstance(entries, StoredModelState) else {}
        there = reader.groups.get("model", {})
        given = {strip_wrapper_prefixes(name): entries[name] for name in entries if name not in self._unread}
        tensors = {name: value for name, value in given.items() if _is_tensor(name, value)}
        self._sources = {name: InMemorySource(raw_bytes(_whole(tensor))) for name, tensor in tensors.items()}
        self._values = {name: value for name, value in given.items() if name not in tensors}
        infos = {name: there[stored] for name, stored in self._unread.items()}
        infos |= {name: _info(name, tensor) for name, tensor in tensors.items()}
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {"model": infos}
        self.tied: Mapping[str, Mapping[str, str]] = {}
        self.path, self.files = reader.path, reader.files
        self.format, self.unread = reader.format, tuple[UnreadTensorNote, ...]()
        told = "\n".join(f"{name} {info}" for name, info in sorted(infos.items()))
        self.fingerprint = f"{reader.fingerprint}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """Where bytes of a tensor lie."""
        if name in self._sources:
            return [FileExtent(self._sources[name], start, start, stop)]
        return self._reader.extents(group, self._unread[name], start, stop)

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Those of the checkpoint, for what lies there."""
        return None if name in self._sources else self._reader.crcs(group, self._unread[name])

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> CheckpointValues:
        """The entries that are not tensors."""
        del rank, shared, own
        return CheckpointValues({"model": self._values})

    def check_files(self) -> None:
        """As the checkpoint does."""
        self._reader.check_files()

    def is_current(self) -> bool:
        """As the checkpoint is."""
        return self._reader.is_current()


def hooked_optimizers(reader: Reader, states: Sequence[Mapping[str, Any]]) -> Reader:
    """State dicts of optimizers, as a file of Lightning's that holds nothing else."""
    tree = _stored([dict(state) for state in states], "optimizer_states")
    nbytes = sum(one.info.nbytes for one in _leaves(tree))
    contents = classify_tree({"optimizer_states": tree}, {}, ReadBudget(nbytes), str(reader.path))
    return TreeReader(reader.path, reader.format, [], f"{reader.fingerprint}-given", contents)


def _is_tensor(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and name.rpartition(".")[2] != EXTRA


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    if tensor.dtype not in NAMES:
        raise UnsupportedTensorError(f"tensor {name!r}, which a hook has put there, is of dtype {tensor.dtype}")
    return TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape))


def _stored(value: Any, name: str) -> Any:
    """A tree with tensors as readers have them."""
    if isinstance(value, torch.Tensor):
        return InlineTensor(_info(name, value), raw_bytes(_whole(value)))
    if isinstance(value, Mapping):
        return {key: _stored(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_stored(one, f"{name}.{i}") for i, one in enumerate(value))
    return value


def _leaves(tree: Any) -> list[InlineTensor]:
    if isinstance(tree, InlineTensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for child in children for leaf in _leaves(child)]
