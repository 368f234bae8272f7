"""The values of single ranks: the states of their random number generators, one file for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.formats.accelerate.generator_states import StoredArray, convert_generators
from holdfast.formats.reader import UnreadTensorNote
from holdfast.formats.stored_tensor import StoredTensor, UnreadTensor
from holdfast.ondisk import values

#: The group of values that are no component, in notes.
CONTENT = "user_content"

_RNG = "rng"

_ADVICE = "remove such files if the states of random number generators are not needed"


class _Encoder:
    """An encoder of stored tensors and arrays, which it collects by their keys."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}

    def encode(self, value: object, key: str) -> Any:
        """See :class:`holdfast.ondisk.values.ArrayCodec`."""
        if isinstance(value, StoredArray):
            self.tensors[key] = value.tensor
            return {"$array": key}
        if isinstance(value, StoredTensor):
            self.tensors[key] = value
            return {"$tensor": key}
        return NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """Return ``NotImplemented``: this codec only encodes."""
        del tag, payload
        return NotImplemented


@dataclass
class RankValues:
    """The encoded values of all ranks, the tensors in them by name, and notes about ranks that cannot be read."""

    ranks: list[Any] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    unread: list[UnreadTensorNote] = field(default_factory=list)


def build_rank_values(files: Mapping[int, Path], trees: Mapping[int, Any]) -> RankValues:
    """Return the values of all ranks, or none and a note if those of one rank are missing or cannot be read."""
    unread = list(_find_problems(files, trees))
    if unread:
        return RankValues(unread=unread)
    encoder, ranks = _Encoder(), []
    for rank in sorted(trees):
        try:
            states = convert_generators(trees[rank], rank)
        except ValueError as error:
            return RankValues(unread=[_note(files[rank], f"{error}: {_ADVICE}")])
        ranks.append(values.encode_value({_RNG: states}, encoder, f"{rank}/"))
    return RankValues(ranks, encoder.tensors)


def _find_problems(files: Mapping[int, Path], trees: Mapping[int, Any]) -> Iterator[UnreadTensorNote]:
    for rank, tree in trees.items():
        if isinstance(tree, UnreadTensor):
            yield _note(files[rank], tree.why)
    missing = next((rank for rank in range(len(files)) if rank not in files), None)
    if missing is not None:
        yield _note(files[max(files)], f"is of rank {max(files)}, but there is no file of rank {missing}: {_ADVICE}")


def _note(file: Path, why: str) -> UnreadTensorNote:
    return UnreadTensorNote(CONTENT, file.name, why, is_value=True)
