"""Changes of DCP's metadata that keep it a pickle of the right classes."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

_SIZES = (0, 1, 2, 3, 7, 2**16, 2**31, 2**40, 2**62)

Edit = Callable[[Metadata, random.Random], object]


def _choose_tensor(metadata: Metadata, chance: random.Random) -> TensorStorageMetadata:
    entries = metadata.state_dict_metadata.values()
    return chance.choice([entry for entry in entries if isinstance(entry, TensorStorageMetadata) and entry.chunks])


def _change_size(size: torch.Size, chance: random.Random) -> torch.Size:
    given = list(size) or [1]
    given[chance.randrange(len(given))] = chance.choice(_SIZES)
    return torch.Size(given[: chance.choice((len(given), len(given), len(given) - 1))])


def _change_shape(metadata: Metadata, chance: random.Random) -> None:
    entry = _choose_tensor(metadata, chance)
    entry.size = _change_size(entry.size, chance)


def _change_chunk(metadata: Metadata, chance: random.Random) -> None:
    chunk = chance.choice(_choose_tensor(metadata, chance).chunks)
    part = chance.choice(("offsets", "sizes"))
    setattr(chunk, part, _change_size(getattr(chunk, part), chance))


def _overlap_chunks(metadata: Metadata, chance: random.Random) -> None:
    chunks = _choose_tensor(metadata, chance).chunks
    chunks.append(chance.choice(chunks))


def _remove_chunk(metadata: Metadata, chance: random.Random) -> None:
    chunks = _choose_tensor(metadata, chance).chunks
    del chunks[chance.randrange(len(chunks))]


def _change_dtype(metadata: Metadata, chance: random.Random) -> None:
    _choose_tensor(metadata, chance).properties.dtype = chance.choice((torch.float64, torch.int8, torch.complex128))


def _change_location(metadata: Metadata, chance: random.Random) -> None:
    info = chance.choice(list(metadata.storage_data.values()))
    part = chance.choice(("offset", "length"))
    setattr(info, part, chance.choice((*_SIZES, -1, getattr(info, part) + chance.randint(-9, 9))))


def _change_file(metadata: Metadata, chance: random.Random) -> None:
    info = chance.choice(list(metadata.storage_data.values()))
    info.relative_path = chance.choice(("../c", "/etc/passwd", "", ".", ".metadata", "x\0y", "a/b", "__0_1.distcp"))


def _swap_locations(metadata: Metadata, chance: random.Random) -> None:
    table: dict[MetadataIndex, Any] = metadata.storage_data
    first, second = chance.choice(list(table)), chance.choice(list(table))
    table[first], table[second] = table[second], table[first]


def _remove_location(metadata: Metadata, chance: random.Random) -> None:
    del metadata.storage_data[chance.choice(list(metadata.storage_data))]


def _change_path(metadata: Metadata, chance: random.Random) -> None:
    paths = metadata.planner_data or {}  # Megatron has no paths
    values = (("model",), ("model", 2**40), (), ("a",) * 500, (0,), ("model", "w", "x"), "text", ("x\ud800",))
    paths[chance.choice(list(paths))] = chance.choice(values)


def _add_cycle(metadata: Metadata, _: random.Random) -> None:
    nested: list[Any] = []
    nested.append(nested)
    metadata.planner_data = {**(metadata.planner_data or {}), "loop": nested}


_EDITS: tuple[Edit, ...] = (
    *(
        _change_shape,
        _change_chunk,
        _change_chunk,
        _overlap_chunks,
        _remove_chunk,
        _change_dtype,
        _change_location,
        _change_location,
        _change_file,
        _swap_locations,
        _remove_location,
        _change_path,
        _add_cycle,
    ),
)


def edit_metadata(raw: bytes, chance: random.Random) -> bytes:
    """Change metadata that torch has written in one to three ways."""
    metadata = pickle.loads(raw)  # noqa: S301 - made by this campaign
    for _ in range(chance.randint(1, 3)):
        with suppress(IndexError):  # an earlier edit left nothing to change
            chance.choice(_EDITS)(metadata, chance)
    return pickle.dumps(metadata)
