"""Descriptions of tensors that ranks exchange: names, dtypes, shapes, layouts. They contain no coordinates of shards.

A spec does not depend on the rank that wrote it, and meshes are in a table of their own. So thousands of ranks share a
few of both, and each rank derives from them which ranks hold which shards.

:mod:`rankless.state.capture` and :mod:`rankless.live_copy.copy_targets` build them on each rank;
:mod:`rankless.engine.comm.spec_directory` sends them. Equal specs must have equal bytes on all ranks, because ranks
compare digests.
"""

from __future__ import annotations

import hashlib

import msgspec

from rankless.engine.plan.element_ranges import IndexBox
from rankless.engine.plan.layout_types import MeshShape, Placement
from rankless.engine.plan.split_tensors import Splits

#: The group of tensors that belong to single ranks; their names begin with the rank and a slash.
PER_RANK = "ranks"

#: The group of tensors in the values that ranks share or merge. Of a tensor that several ranks have, the one of the
#: lowest rank is stored; others may have another shape.
STATE = "state"

#: In a spec, the group of tensors of the rank itself. Their names lack the rank, so that ranks can share a spec.
OWN = "own"


class LayoutSpec(msgspec.Struct, frozen=True, array_like=True):
    """A layout over mesh number ``mesh`` of the rank's table."""

    mesh: int
    placements: tuple[Placement, ...]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. ``layout`` is an index into the spec's layouts; ``None`` if every rank that names it has all of it.

    Ranks that hold a ``shared`` tensor must have equal values and divide the writing. If it is not shared (a
    buffer, or a tensor in merged values), the value of the lowest rank is saved. ``splits`` are the stored tensors,
    if it is not stored as one tensor of its name. A tensor that is ``apart`` shares no file with tensors that are
    not.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int | None = None
    shared: bool = True
    splits: Splits = ()
    apart: bool = False


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """All tensors of one rank.

    ``tied`` is ``{group: {tied name: stored name}}``, for example ``{"model": {"lm_head.weight": "embed.weight"}}``;
    ``known_names`` are other names that the rank knows, by their kind.
    """

    layouts: tuple[LayoutSpec, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()
    tied: dict[str, dict[str, str]] = {}
    known_names: dict[str, list[str]] = {}

    def encode(self) -> bytes:
        """Return the spec as bytes; equal specs have equal bytes."""
        return _encode(self)


class HeldPieces(msgspec.Struct, frozen=True, array_like=True):
    """The parts that a rank holds of a tensor that is not divided by the rule of its layout.

    Either ``boxes`` of the tensor, or the ``sizes`` of its shard in each dimension: then the place of the shard follows
    from the sizes of the shards before it. For example, a shard with ``sizes`` ``(5, 4)`` begins at row 3 if the shard
    before it has 3 rows. ``is_empty_by_rule`` is true if the rule, too, gives the rank no element, in a shard of other
    sizes: only if other ranks hold more or less than their share does it matter where that is.
    """

    sizes: tuple[int, ...] = ()
    boxes: tuple[IndexBox, ...] | None = None
    is_empty_by_rule: bool = False


class NamedPieces(msgspec.Struct, frozen=True, array_like=True):
    """The pieces that a rank holds of the tensor with this name."""

    group: str
    name: str
    pieces: HeldPieces


class Meshes(msgspec.Struct, frozen=True, array_like=True):
    """The meshes of one rank's spec, over global ranks, and the rank's pieces of tensors with other divisions.

    Few tensors have such divisions, and most ranks none; the pieces differ on each rank.
    """

    table: tuple[MeshShape, ...] = ()
    pieces: tuple[NamedPieces, ...] = ()

    def encode(self) -> bytes:
        """Return the table as bytes; equal tables have equal bytes."""
        return _encode(self)


_encode = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(Spec).decode
decode_meshes = msgspec.msgpack.Decoder(Meshes).decode


def digest_bytes(raw: bytes, size: int = 16) -> bytes:
    """Return a digest of ``size`` bytes."""
    return hashlib.blake2b(raw, digest_size=size).digest()
