"""What a rank's files are, byte for byte but for the elements of tensors: planned, not written.

Source: ``trainer/checkpoint.py`` of NxD 0.18, and files that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.compat.nxd.format.file_names import INFO, TENSORS
from holdfast.compat.nxd.format.rank_file import RankShard
from holdfast.errors import UnsupportedValueError
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.torchfile.allowed_globals import NAMES as ALLOWED
from holdfast.formats.torchfile.objects import TorchSize
from holdfast.formats.torchfile.pickler import TORCH, PickledGlobal, PlainTensor, StorageRef, pickle_tree
from holdfast.formats.torchfile.zip_writer import ZipFrame

#: torch's hash of the names of a file's entries, by the number of its storages.
NamesOf = Callable[[int], int]

_REFERENCE = PickledGlobal("torch_xla.utils.serialization", "TensorReference")


@dataclass(frozen=True)
class PlannedFile:
    """A file below a checkpoint's folder: the frame of it, and the tensors whose elements it has."""

    name: str
    frame: ZipFrame
    tensors: Sequence[StoredTensor]


def plan_rank_files(name: str, root: Any, names_of: NamesOf, *, xser: bool) -> list[PlannedFile]:
    """The files of a rank: one, or with ``xser`` one for each tensor, a tree with references, and what these are of."""
    return _Planning(name, names_of).separate(root) if xser else [_Planning(name, names_of).together(root)]


class _Planning:
    def __init__(self, name: str, names_of: NamesOf) -> None:
        self._name, self._names_of = name, names_of
        self._numbers: dict[Hashable, int] = {}
        self._tensors: list[StoredTensor] = []

    def together(self, root: Any) -> PlannedFile:
        outside: dict[int, StorageRef] = {}
        tree = self._rebuilt(
            root, lambda number: outside.setdefault(number, StorageRef(self._tensors[number].info, number))
        )
        return self._file(self._name, tree, self._tensors)

    def separate(self, root: Any) -> list[PlannedFile]:
        references: dict[int, PlainTensor] = {}
        tree = self._rebuilt(
            root, lambda number: references.setdefault(number, PlainTensor(_REFERENCE, {"tid": number}))
        )
        single = [
            self._file(f"{self._name}{TENSORS}/tensor_{number}.pt", StorageRef(tensor.info, 0), [tensor])
            for number, tensor in enumerate(self._tensors)
        ]
        info = {number: _info(tensor) for number, tensor in enumerate(self._tensors)}
        return [self._file(self._name, tree, ()), self._file(self._name + INFO, info, ()), *single]

    def _file(self, name: str, tree: Any, tensors: Sequence[StoredTensor]) -> PlannedFile:
        root = name.rpartition("/")[2].removesuffix(".pt")
        sizes = [tensor.info.nbytes for tensor in tensors]
        return PlannedFile(name, ZipFrame(root, pickle_tree(tree), sizes, self._names_of(len(sizes))), tuple(tensors))

    def _rebuilt(self, value: Any, made: Callable[[int], Any]) -> Any:
        """As NxD's arena makes it: dicts and lists for what is like them; each tensor once, in the order it is met."""
        if isinstance(value, StoredTensor):
            if value.identity not in self._numbers:
                self._numbers[value.identity] = len(self._tensors)
                self._tensors.append(value)
            return made(self._numbers[value.identity])
        if isinstance(value, dict):
            return {key: self._rebuilt(item, made) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._rebuilt(item, made) for item in value]
        if isinstance(value, set | frozenset):
            raise UnsupportedValueError(f"{self._name}: NxD's files have no sets")
        return value


def _info(tensor: StoredTensor) -> dict[str, Any]:
    expert = bool(tensor.expert) if isinstance(tensor, RankShard) else False
    dtype = ALLOWED[f"torch.{TORCH[tensor.info.dtype]}"]
    return {"dtype": dtype, "shape": TorchSize(tensor.info.shape), "expert_model_parallel": expert}
