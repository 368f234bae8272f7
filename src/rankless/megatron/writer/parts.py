"""The parts of Megatron's tensors: ranges of elements of the source's tensors. Pure data and functions.

The other modules of this package plan with it, on each rank. All ranks must get equal parts: these are in the order of
their positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rankless.conversion.tensor_filter import Key
from rankless.ondisk.data_files import TensorInfo

#: The groups of the model's tensors, of the same tensors as 32-bit master weights, and of the optimizer's states.
MODEL, MASTER, OPTIMIZER = "model", "master", "optimizer"


class Part(NamedTuple):
    """Elements ``[start, start + size)`` of the parameter ``name``, which are at ``at`` in a tensor of Megatron."""

    name: str
    start: int
    size: int
    at: int

    def moved(self, by: int) -> Part:
        """Return the part at a later position."""
        return self._replace(at=self.at + by)


@dataclass(frozen=True)
class LayerTensor:
    """A tensor of one layer in Megatron's orientation. Elements that no part has are zero."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def names(self) -> list[str]:
        """The source's parameters in it, each once."""
        return list(dict.fromkeys(part.name for part in self.parts))


@dataclass(frozen=True)
class StoredEntry:
    """A tensor of the checkpoint, with the keys of the source's tensors by the names in its parts."""

    info: TensorInfo
    parts: tuple[Part, ...]
    sources: dict[str, Key]


def join_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return parts in the order of their positions, with adjacent ones merged."""
    joined: list[Part] = []
    for part in sorted(parts, key=lambda part: part.at):
        last = joined[-1] if joined else None
        if last and (last.name, last.start + last.size, last.at + last.size) == (part.name, part.start, part.at):
            joined[-1] = last._replace(size=last.size + part.size)
        else:
            joined.append(part)
    return tuple(joined)
