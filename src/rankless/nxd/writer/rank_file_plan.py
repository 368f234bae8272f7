"""Plans the files of a rank: every byte except the elements of tensors. Nothing is written here.

Source: ``trainer/checkpoint.py`` of NxD 0.18, and files that it wrote.

:class:`~rankless.nxd.writer.nxd_files.NxdWriter` plans with it on rank 0 of a conversion, in the vote "converting", and
:mod:`rankless.nxd.offline_zero_conversion` in one process. :mod:`rankless.nxd.writer.torch_files` writes the files. The
bytes must be those that NxD writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from rankless.errors import UnsupportedValueError
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.torchfile.allowed_globals import NAMES as ALLOWED
from rankless.formats.torchfile.pickler import PickledGlobal, PickledObject, StorageRef, pickle_tree
from rankless.formats.torchfile.torch_placeholders import TorchSize
from rankless.formats.torchfile.zip_frame import ZipFrame
from rankless.nxd.reader.nxd_file_names import INFO, TENSORS
from rankless.nxd.reader.rank_file import RankShard
from rankless.ondisk.dtypes import TORCH_NAMES

#: Returns torch's hash of the names of a file's entries, for the number of its storages.
NamesHash = Callable[[int], int]

_REFERENCE = PickledGlobal("torch_xla.utils.serialization", "TensorReference")


@dataclass(frozen=True)
class PlannedFile:
    """A file below a checkpoint's folder: its zip frame, and its tensors in the order of the frame's storages."""

    name: str
    frame: ZipFrame
    tensors: Sequence[StoredTensor]


def plan_rank_files(name: str, root: Any, names_hash: NamesHash, *, xser: bool) -> list[PlannedFile]:
    """Plan the files of a rank: a single file, or with ``xser`` one for each tensor.

    With ``xser`` there are also a tree with references, and a file with the dtypes and shapes.
    """
    return (
        _RankFilePlanner(name, names_hash).plan_tensor_files(root)
        if xser
        else [_RankFilePlanner(name, names_hash).plan_single_file(root)]
    )


class _RankFilePlanner:
    """Plans the files of one rank, and numbers its tensors."""

    def __init__(self, name: str, names_hash: NamesHash) -> None:
        self._name, self._names_hash = name, names_hash
        self._numbers: dict[Hashable, int] = {}
        self._tensors: list[StoredTensor] = []

    def plan_single_file(self, root: Any) -> PlannedFile:
        """Plan one file with all tensors in it."""
        storages: dict[int, StorageRef] = {}
        tree = self._replace_tensors(
            root, lambda number: storages.setdefault(number, StorageRef(self._tensors[number].info, number))
        )
        return self._plan_file(self._name, tree, self._tensors)

    def plan_tensor_files(self, root: Any) -> list[PlannedFile]:
        """Plan a file for the tree, one for the dtypes and shapes, and one for each tensor."""
        references: dict[int, PickledObject] = {}
        tree = self._replace_tensors(
            root, lambda number: references.setdefault(number, PickledObject(_REFERENCE, {"tid": number}))
        )
        tensor_files = [
            self._plan_file(f"{self._name}{TENSORS}/tensor_{number}.pt", StorageRef(tensor.info, 0), [tensor])
            for number, tensor in enumerate(self._tensors)
        ]
        tensor_infos = {number: _tensor_info(tensor) for number, tensor in enumerate(self._tensors)}
        return [
            self._plan_file(self._name, tree, ()),
            self._plan_file(self._name + INFO, tensor_infos, ()),
            *tensor_files,
        ]

    def _plan_file(self, name: str, tree: Any, tensors: Sequence[StoredTensor]) -> PlannedFile:
        root = name.rpartition("/")[2].removesuffix(".pt")
        sizes = [tensor.info.nbytes for tensor in tensors]
        return PlannedFile(name, ZipFrame(root, pickle_tree(tree), sizes, self._names_hash(len(sizes))), tuple(tensors))

    def _replace_tensors(self, value: Any, make_reference: Callable[[int], Any]) -> Any:
        """Return the value with its tensors replaced by ``make_reference``, as NxD's arena does.

        Mappings and sequences become dicts and lists; each tensor is numbered once, when it is found first.
        """
        if isinstance(value, StoredTensor):
            if value.identity not in self._numbers:
                self._numbers[value.identity] = len(self._tensors)
                self._tensors.append(value)
            return make_reference(self._numbers[value.identity])
        if isinstance(value, dict):
            return {key: self._replace_tensors(item, make_reference) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._replace_tensors(item, make_reference) for item in value]
        if isinstance(value, set | frozenset):
            raise UnsupportedValueError(f"{self._name}: NxD's files cannot store sets: use a list")
        return value


def _tensor_info(tensor: StoredTensor) -> dict[str, Any]:
    expert = bool(tensor.expert) if isinstance(tensor, RankShard) else False
    dtype = ALLOWED[f"torch.{TORCH_NAMES[tensor.info.dtype]}"]
    return {"dtype": dtype, "shape": TorchSize(tensor.info.shape), "expert_model_parallel": expert}
