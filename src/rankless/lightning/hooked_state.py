"""Readers for a model and optimizers that hooks have changed, so that they load into any layout like a checkpoint.

:mod:`rankless.lightning.load_state` passes them to a load as its reader, on every rank. The fingerprints must be equal
on all ranks: the load compares them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rankless.conversion.torch_target import raw_bytes
from rankless.engine.io.tensor_sources import InMemorySource
from rankless.errors import UnsupportedTensorError
from rankless.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from rankless.formats.stored_tensor import InlineTensor
from rankless.formats.torch_file import LIGHTNING_FILE
from rankless.formats.tree.tree_contents import classify_tree
from rankless.formats.tree.tree_reader import TreeReader
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.values import ArrayCodec
from rankless.ondisk.wrapper_prefixes import wrapper_cleaner
from rankless.state.model.model_view import EXTRA
from rankless.state.tensor_views import NAMES


class HookedModel:
    """A model as hooks have left it, in memory.

    See :class:`rankless.formats.reader.Reader`.
    """

    def __init__(self, reader: Reader, entries: Mapping[str, Any]) -> None:
        self._reader = reader
        clean = wrapper_cleaner(entries)
        named = {clean(name): value for name, value in entries.items()}
        tensors = {name: value for name, value in named.items() if _is_tensor(name, value)}
        self._sources = {name: InMemorySource(raw_bytes(_full_tensor(tensor))) for name, tensor in tensors.items()}
        self._values = {name: value for name, value in named.items() if name not in tensors}
        infos = {name: _tensor_info(name, tensor) for name, tensor in tensors.items()}
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {"model": infos}
        self.tied: Mapping[str, Mapping[str, str]] = {}
        self.path, self.files = reader.path, reader.files
        self.format, self.unread = reader.format, tuple[UnreadTensorNote, ...]()
        description = "\n".join(f"{name} {info}" for name, info in sorted(infos.items()))
        self.fingerprint = f"{reader.fingerprint}-{hashlib.sha256(description.encode()).hexdigest()[:16]}"

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """Return the file ranges of a tensor's bytes."""
        del group
        return [FileExtent(self._sources[name], start, start, stop)]

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Return ``None``: a tensor in memory has no CRCs."""
        del group, name
        return None

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the entries that are not tensors."""
        del rank, shared_codec, rank_codec
        return CheckpointValues({"model": self._values})

    def check_files(self) -> None:
        """Check the files of the checkpoint."""
        self._reader.check_files()

    def is_current(self) -> bool:
        """Return whether the checkpoint is still the one that was opened."""
        return self._reader.is_current()


def hooked_optimizers(reader: Reader, states: Sequence[Mapping[str, Any]]) -> Reader:
    """Return a reader for state dicts of optimizers, like a Lightning file that holds nothing else."""
    tree = _to_inline_tensors([dict(state) for state in states], "optimizer_states")
    nbytes = sum(leaf.info.nbytes for leaf in _list_tensors(tree))
    contents = classify_tree({"optimizer_states": tree}, {}, ReadBudget(nbytes), str(reader.path), LIGHTNING_FILE)
    return TreeReader(reader.path, reader.format, [], f"{reader.fingerprint}-given", contents)


def _is_tensor(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and name.rpartition(".")[2] != EXTRA


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _tensor_info(name: str, tensor: torch.Tensor) -> TensorInfo:
    if tensor.dtype not in NAMES:
        raise UnsupportedTensorError(f"tensor {name!r}, which a hook has added, has dtype {tensor.dtype}")
    return TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape))


def _to_inline_tensors(value: Any, name: str) -> Any:
    """Return a tree with its tensors as readers represent them."""
    if isinstance(value, torch.Tensor):
        return InlineTensor(_tensor_info(name, value), raw_bytes(_full_tensor(value)))
    if isinstance(value, Mapping):
        return {key: _to_inline_tensors(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_inline_tensors(item, f"{name}.{i}") for i, item in enumerate(value))
    return value


def _list_tensors(tree: Any) -> list[InlineTensor]:
    if isinstance(tree, InlineTensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for child in children for leaf in _list_tensors(child)]
