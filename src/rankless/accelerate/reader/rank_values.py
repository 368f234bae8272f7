"""The values of single ranks: the states of their random number generators, one file for each rank.

:class:`~rankless.accelerate.reader.training_reader.TrainingReader` builds them on each rank. Files must give no values
unless one save by all ranks has written them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankless.accelerate.reader.generator_states import StoredArray, convert_generators
from rankless.formats.reader import UnreadTensorNote
from rankless.formats.stored_tensor import StoredTensor, UnreadTensor
from rankless.ondisk import values

#: The group of values that are no component, in notes.
CONTENT = "user_content"

_RNG = "rng"

#: The file that the ``Trainer`` writes in a single process, and those that several ranks write.
_SINGLE, _NUMBERED = "rng_state.pth", re.compile(r"rng_state_\d{1,9}\.pth")

_ADVICE = "remove such files if the states of random number generators are not needed"


class _RankValueEncoder:
    """An encoder of stored tensors and arrays, which it collects by their keys."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}

    def encode(self, value: object, key: str) -> Any:
        """See :class:`rankless.ondisk.values.ArrayCodec`."""
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


def build_rank_values(files: Mapping[int, Path], trees: Mapping[int, Any], writers: int) -> RankValues:
    """Return the values of all ranks, or none and a note if one rank's are missing or cannot be read.

    ``writers`` is how many ranks have saved the checkpoint at least.
    """
    unread = list(_find_problems(files, trees, writers))
    if unread:
        return RankValues(unread=unread)
    encoder, ranks = _RankValueEncoder(), []
    for rank in sorted(trees):
        try:
            states = convert_generators(trees[rank], rank)
        except ValueError as error:
            return RankValues(unread=[_note(files[rank], f"{error}: {_ADVICE}")])
        ranks.append(values.encode_value({_RNG: states}, encoder, f"{rank}/"))
    return RankValues(ranks, encoder.tensors)


def _find_problems(files: Mapping[int, Path], trees: Mapping[int, Any], writers: int) -> Iterator[UnreadTensorNote]:
    for rank, tree in trees.items():
        if isinstance(tree, UnreadTensor):
            yield _note(files[rank], tree.why)
    if files and (why := _find_difference(files, trees, writers)) is not None:
        yield _note(files[max(files)], f"{why}: {_ADVICE}")


def _find_difference(files: Mapping[int, Path], trees: Mapping[int, Any], writers: int) -> str | None:
    """Return why the files are not from all ranks of one save, or ``None``."""
    is_numbered = any(_NUMBERED.fullmatch(file.name) for file in files.values())
    missing = next((n for n in range(max(len(files), writers, 1 + is_numbered)) if n not in files), None)
    if missing is not None:
        return f"is of rank {max(files)}, but there is no file of rank {missing}"
    if is_numbered and files[0].name == _SINGLE:
        return f"is of another save than {_SINGLE}, which a single process writes"
    steps = {tree["step"] for tree in trees.values() if isinstance(tree, dict) and type(tree.get("step")) is int}
    return f"is of another save: files of ranks have the steps {sorted(steps)[:8]}" if len(steps) > 1 else None


def _note(file: Path, why: str) -> UnreadTensorNote:
    return UnreadTensorNote(CONTENT, file.name, why, is_value=True)
