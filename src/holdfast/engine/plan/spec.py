"""What ranks tell each other of the tensors they hold: names, dtypes, shapes, layouts. No coordinates of chunks.

A spec does not depend on the rank that wrote it, and meshes are in a table of their own, so that thousands of
ranks share a few of both, and each rank derives from them who holds what.
"""

from __future__ import annotations

import hashlib

import msgspec

from holdfast.engine.plan.placements import MeshShape, Placement
from holdfast.engine.plan.split_tensors import Splits

#: The group of tensors that belong to single ranks; their names begin with the rank and a slash.
PER_RANK = "ranks"

#: In a spec, those of the rank itself, named without it, so that ranks which differ in nothing else share a spec.
OWN = "own"


class LayoutSpec(msgspec.Struct, frozen=True, array_like=True):
    """A layout over mesh number ``mesh`` of the rank's table."""

    mesh: int
    placements: tuple[Placement, ...]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. ``layout`` is an index into the spec's layouts; ``None`` is whole on every rank that names it.

    Holders of a ``shared`` tensor must have equal values and split the writing; of one that is not (a buffer)
    the lowest holder's value counts. ``splits`` are what it is stored as, where that is not one tensor of its name.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int | None = None
    shared: bool = True
    splits: Splits = ()


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """All tensors of one rank; ``{group: {tied name: stored name}}``; and other names it knows, by what they name."""

    layouts: tuple[LayoutSpec, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()
    tied: dict[str, dict[str, str]] = {}
    names: dict[str, list[str]] = {}

    def encode(self) -> bytes:
        """The spec's bytes; equal specs have equal bytes."""
        return _encode(self)


class Meshes(msgspec.Struct, frozen=True, array_like=True):
    """The meshes of one rank's spec, over the job-wide numbers of ranks."""

    table: tuple[MeshShape, ...] = ()

    def encode(self) -> bytes:
        """The table's bytes; equal tables have equal bytes."""
        return _encode(self)


_encode = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(Spec).decode
decode_meshes = msgspec.msgpack.Decoder(Meshes).decode


def digest_spec(raw: bytes, size: int = 16) -> bytes:
    """``size`` bytes that stand for some."""
    return hashlib.blake2b(raw, digest_size=size).digest()
