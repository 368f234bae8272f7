"""What ranks tell each other of the tensors they hold: names, dtypes, shapes, layouts. No coordinates of chunks.

A spec does not depend on the rank that wrote it, so that thousands of ranks share a few of them, and
each rank derives from them who holds what.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from holdfast.engine.runs import Layout
from holdfast.errors import DisagreementError
from holdfast.layout.files import TensorInfo

#: The group of tensors that each rank has of its own; their names get the rank before them.
PER_RANK = "ranks"


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. ``layout`` is an index into the spec's layouts; ``None`` is whole on every rank that names it.

    Holders of a ``shared`` tensor must have equal values and split the writing; of one that is not (a buffer)
    the lowest holder's value counts.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int | None = None
    shared: bool = True


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """All tensors of one rank, and ``{group: {tied name: stored name}}``."""

    layouts: tuple[Layout, ...]
    tensors: tuple[TensorSpec, ...]
    tied: dict[str, dict[str, str]]

    def encode(self) -> bytes:
        """The spec's bytes; equal specs have equal bytes."""
        return _encode(self)


_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Spec).decode


def digest(raw: bytes) -> bytes:
    """16 bytes that stand for a spec."""
    return hashlib.blake2b(raw, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the checkpoint, with who holds it: ``layout`` if it is sharded, else whole on ``holders``."""

    group: str
    name: str
    info: TensorInfo
    layout: Layout | None
    holders: tuple[int, ...]
    shared: bool


@dataclass(frozen=True)
class Membership:
    """The distinct specs of a job, and which of them each rank has."""

    specs: Sequence[Spec]
    spec_of: Sequence[int]

    @cached_property
    def members(self) -> list[tuple[int, ...]]:
        """The ranks, ascending, of each spec."""
        ranks: list[list[int]] = [[] for _ in self.specs]
        for rank, spec in enumerate(self.spec_of):
            ranks[spec].append(rank)
        return [tuple(members) for members in ranks]

    def tensors(self) -> Iterator[Held]:
        """Every tensor that some rank holds. Raises ``DisagreementError`` where ranks describe one differently."""
        naming: dict[tuple[str, str], list[int]] = {}
        table = [{(tensor.group, tensor.name): tensor for tensor in spec.tensors} for spec in self.specs]
        for number, tensors in enumerate(table):
            for key in tensors:
                naming.setdefault(key, []).append(number)
        for key, numbers in naming.items():
            yield from self._held(table[numbers[0]][key], [(number, table[number][key]) for number in numbers])

    def _held(self, tensor: TensorSpec, named: Sequence[tuple[int, TensorSpec]]) -> Iterator[Held]:
        if tensor.group == PER_RANK:
            for number, own in named:
                for rank in self.members[number]:
                    yield Held(
                        PER_RANK, f"{rank}/{own.name}", TensorInfo(own.dtype, own.shape), None, (rank,), shared=True
                    )
            return
        for what in ("dtype", "shape"):
            self._agree(tensor, what, [(number, getattr(other, what)) for number, other in named])
        layouts = [(number, self._layout(number, other)) for number, other in named]
        self._agree(tensor, "layout", layouts)
        holders = [self.members[number] for number, _ in named]
        members = holders[0] if len(holders) == 1 else tuple(sorted(itertools.chain(*holders)))
        info = TensorInfo(tensor.dtype, tensor.shape)
        yield Held(tensor.group, tensor.name, info, layouts[0][1], members, tensor.shared)

    def _layout(self, number: int, tensor: TensorSpec) -> Layout | None:
        return None if tensor.layout is None else self.specs[number].layouts[tensor.layout]

    def _agree(self, tensor: TensorSpec, what: str, said: Sequence[tuple[int, object]]) -> None:
        """Raise ``DisagreementError`` where specs, by number, say different things of one tensor."""
        first, mine = said[0]
        for number, other in said[1:]:
            if other != mine:
                raise DisagreementError(
                    f"ranks disagree about the {what} of {tensor.group} tensor {tensor.name!r}: "
                    f"rank {self.members[first][0]} has {mine}, rank {self.members[number][0]} has {other}; "
                    "parts of one tensor must be a DTensor, and different tensors need different names"
                )

    def tied(self) -> dict[str, dict[str, str]]:
        """``{group: {tied name: stored name}}`` over all ranks."""
        result: dict[str, dict[str, str]] = {}
        for spec in self.specs:
            for group, names in spec.tied.items():
                result.setdefault(group, {}).update(names)
        return result


def infos(tensors: Sequence[Held]) -> dict[str, Mapping[str, TensorInfo]]:
    """``{group: {name: dtype and shape}}``."""
    groups: dict[str, dict[str, TensorInfo]] = {}
    for held in tensors:
        groups.setdefault(held.group, {})[held.name] = held.info
    return dict(sorted(groups.items()))
