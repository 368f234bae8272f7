"""Parsing the description of how tensor-parallel ranks divide each parameter, which AutoTP writes since 0.19.8.

Source: ``checkpoint/affine.py`` and ``collect_autotp_universal_checkpoint_info`` in ``module_inject/layers.py``.

:mod:`rankless.deepspeed.reader.tag_contents` parses with it on each rank that opens a checkpoint of AutoTP. The keys
are DeepSpeed's. A map of an unknown form must be refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.tiling import check_tiling
from rankless.ondisk.read_budget import ReadBudget

#: The key of the description among the values of a file of a model.
UNIVERSAL_INFO = "universal_checkpoint_info"

_MAP, _UNSUPPORTED, _VERSION = "affine_map", "autotp_unsupported_parameter_patterns", 1

#: The most dimensions of a parameter, the limit of its elements, and the steps for a piece.
_DIMENSIONS, _LARGEST, _PIECE = 64, 2**60, 16


class AffinePiece(NamedTuple):
    """A box of the whole tensor. In the tensor of ``rank`` it begins at the index ``inside``."""

    box: IndexBox
    rank: int
    inside: tuple[int, ...]


@dataclass(frozen=True)
class ShardMap:
    """The division of a parameter among ranks: its shape, the shape that each rank has, and the pieces of all ranks."""

    shape: tuple[int, ...]
    shard_shapes: Sequence[tuple[int, ...]]
    pieces: Sequence[AffinePiece]

    def holders(self) -> dict[IndexBox, list[AffinePiece]]:
        """Return the pieces of each box. Several ranks may have the same one."""
        holders: dict[IndexBox, list[AffinePiece]] = {}
        for piece in self.pieces:
            holders.setdefault(piece.box, []).append(piece)
        return holders


def replicate(shape: tuple[int, ...], ranks: int) -> ShardMap:
    """Return the map of a tensor that each rank has whole."""
    origin = (0,) * len(shape)
    pieces = [AffinePiece(IndexBox(origin, shape), rank, origin) for rank in range(ranks)]
    return ShardMap(shape, [shape] * ranks, pieces)


def parse_shard_maps(
    info: Any, names: Iterable[str], ranks: int, path: Path, budget: ReadBudget
) -> dict[str, ShardMap]:
    """Return the maps of the parameters that have one, by name.

    Raises ``FormatError`` if there are none, or if one is of a form that rankless does not read.
    """
    table = info.get(_MAP) if isinstance(info, Mapping) else None
    if table is None:
        raise FormatError(
            f"{path} is of one of {ranks} tensor-parallel ranks (AutoTP, Megatron-DeepSpeed), and has no affine_map, "
            "which says how they divide the parameters: save with AutoTP of DeepSpeed 0.19.8 or newer, with tensor "
            "parallelism 1, or gather the weights in DeepSpeed (see save_16bit_model)"
        )
    unsupported = info.get(_UNSUPPORTED)
    if unsupported:
        raise FormatError(f"{path}: AutoTP itself cannot tell how it divided {next(iter(unsupported))!r:.100}")
    params = table.get("params") if isinstance(table, Mapping) else None
    if not isinstance(params, Mapping) or table.get("version") != _VERSION:
        raise FormatError(f"{path}: its affine_map has not the version {_VERSION}, the one that rankless reads")
    by_pattern = {f"^{re.escape(name)}$": name for name in names}
    maps = {}
    for pattern, entry in params.items():
        if pattern in by_pattern:
            maps[by_pattern[pattern]] = _parse_map(entry, by_pattern[pattern], ranks, path, budget)
    return maps


def _parse_map(entry: Any, name: str, ranks: int, path: Path, budget: ReadBudget) -> ShardMap:
    try:
        shape = _as_sizes(entry["logical_shape"])
        by_rank = {int(rank): value for rank, value in entry["ranks"].items()}
        shard_shapes = [_as_sizes(by_rank[rank]["shard_shape"]) for rank in range(ranks)]
        pieces = [
            piece
            for rank in range(ranks)
            for piece in _parse_pieces(by_rank[rank]["pieces"], rank, shape, shard_shapes[rank])
        ]
        budget.spend(_PIECE * len(pieces))
        if len(by_rank) != ranks:
            raise CorruptCheckpointError(
                f"{path}: {len(by_rank)} tensor-parallel ranks divide {name!r:.100}, and there are files of {ranks}: "
                "the save did not finish, or files were removed"
            )
        shard_map = ShardMap(shape, shard_shapes, pieces)
        check_tiling([box for box in shard_map.holders() if 0 not in box.shape], shape, budget)
    except _ScaledPieceError:
        raise FormatError(
            f"{path}: AutoTP stores {name!r:.100}, the bias of a layer whose inputs are divided, in parts that are "
            "scaled, which rankless does not read: save with tensor parallelism 1"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{path}: the affine_map of {name!r:.100} does not describe boxes that make up the parameter: "
            f"{error!r:.200}"
        ) from error
    return shard_map


class _ScaledPieceError(Exception):
    """A piece has other values than the parameter."""


def _parse_pieces(
    pieces: Any, rank: int, shape: tuple[int, ...], shard_shape: tuple[int, ...]
) -> Iterable[AffinePiece]:
    for piece in pieces:
        if piece.get("scale", 1.0) != 1.0:
            raise _ScaledPieceError
        size = _as_sizes(piece["shape"])
        box = IndexBox(_index_of(piece["source"], size, shape), size)
        yield AffinePiece(box, rank, _index_of(piece["dest"], size, shard_shape))


def _as_sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError("a shape is not a list of sizes")
    if len(value) > _DIMENSIONS or math.prod(size or 1 for size in value) >= _LARGEST:
        raise ValueError("a shape is too large")
    return tuple(value)


def _index_of(view: Any, size: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first index of a box, which is given as an offset and strides in a tensor of ``shape``."""
    offset, strides = view
    whole = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    fits = len(size) == len(shape) == len(strides)
    if not fits or any(
        extent > 1 and given != stride for extent, given, stride in zip(size, strides, whole, strict=True)
    ):
        raise ValueError("a piece is not a box")
    index = []
    for stride in whole:
        index.append(offset // stride if stride else 0)
        offset -= index[-1] * stride
    if offset or any(at < 0 or at + extent > limit for at, extent, limit in zip(index, size, shape, strict=True)):
        raise ValueError("a piece reaches beyond its tensor")
    return tuple(index)
