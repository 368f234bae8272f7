"""What a rank's files are, byte for byte but for the elements of tensors: planned, not written.

Source: ``trainer/checkpoint.py`` of NxD 0.18, and files that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UnstorableError
from holdfast.formats.arrange.stored import Stored
from holdfast.formats.nxd.names import INFO, TENSORS
from holdfast.formats.nxd.rankfile import Shard
from holdfast.formats.torchfile.frame import Frame
from holdfast.formats.torchfile.names import NAMES as ALLOWED
from holdfast.formats.torchfile.objects import Size
from holdfast.formats.torchfile.pickled import TORCH, Global, Outside, Plain, pickled

#: torch's hash of the names of a file's entries, by the number of its storages.
NamesOf = Callable[[int], int]

_REFERENCE = Global("torch_xla.utils.serialization", "TensorReference")


@dataclass(frozen=True)
class PlannedFile:
    """A file below a checkpoint's folder: the frame of it, and the tensors whose elements it has."""

    name: str
    frame: Frame
    tensors: Sequence[Stored]


def rank_files(name: str, root: Any, names_of: NamesOf, *, xser: bool) -> list[PlannedFile]:
    """The files of a rank: one, or with ``xser`` one for each tensor, a tree with references, and what these are of."""
    return _Planning(name, names_of).separate(root) if xser else [_Planning(name, names_of).together(root)]


class _Planning:
    def __init__(self, name: str, names_of: NamesOf) -> None:
        self._name, self._names_of = name, names_of
        self._numbers: dict[Hashable, int] = {}
        self._tensors: list[Stored] = []

    def together(self, root: Any) -> PlannedFile:
        outside: dict[int, Outside] = {}
        tree = self._rebuilt(
            root, lambda number: outside.setdefault(number, Outside(self._tensors[number].info, number))
        )
        return self._file(self._name, tree, self._tensors)

    def separate(self, root: Any) -> list[PlannedFile]:
        references: dict[int, Plain] = {}
        tree = self._rebuilt(root, lambda number: references.setdefault(number, Plain(_REFERENCE, {"tid": number})))
        single = [
            self._file(f"{self._name}{TENSORS}/tensor_{number}.pt", Outside(tensor.info, 0), [tensor])
            for number, tensor in enumerate(self._tensors)
        ]
        info = {number: _info(tensor) for number, tensor in enumerate(self._tensors)}
        return [self._file(self._name, tree, ()), self._file(self._name + INFO, info, ()), *single]

    def _file(self, name: str, tree: Any, tensors: Sequence[Stored]) -> PlannedFile:
        root = name.rpartition("/")[2].removesuffix(".pt")
        sizes = [tensor.info.nbytes for tensor in tensors]
        return PlannedFile(name, Frame(root, pickled(tree), sizes, self._names_of(len(sizes))), tuple(tensors))

    def _rebuilt(self, value: Any, made: Callable[[int], Any]) -> Any:
        """As NxD's arena makes it: dicts and lists for what is like them; each tensor once, in the order it is met."""
        if isinstance(value, Stored):
            if value.identity not in self._numbers:
                self._numbers[value.identity] = len(self._tensors)
                self._tensors.append(value)
            return made(self._numbers[value.identity])
        if isinstance(value, dict):
            return {key: self._rebuilt(item, made) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._rebuilt(item, made) for item in value]
        if isinstance(value, set | frozenset):
            raise UnstorableError(f"{self._name}: NxD's files have no sets")
        return value


def _info(tensor: Stored) -> dict[str, Any]:
    expert = bool(tensor.expert) if isinstance(tensor, Shard) else False
    dtype = ALLOWED[f"torch.{TORCH[tensor.info.dtype]}"]
    return {"dtype": dtype, "shape": Size(tensor.info.shape), "expert_model_parallel": expert}
