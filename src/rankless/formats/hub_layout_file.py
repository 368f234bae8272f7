"""The file of a checkpoint that says how ``save_pretrained`` stores its model, so that exports need no transformers.

transformers renames, divides and joins some tensors of a model in its files. That depends on the class, the
configuration and the version of transformers, which a process that converts need not have. The file is left out if all
tensors are stored as they are in memory.

A training save writes the file on rank 0 (:mod:`rankless.save.hub_layout`), conversions read it in one process or on
each rank. Its members are a part of the format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.split_tensors import Splits, split_ranges, split_tiles
from rankless.errors import CorruptCheckpointError
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader
from rankless.formats.remapped_reader import NamedRange, TensorMapping
from rankless.ondisk import strict_json
from rankless.ondisk.data_files import HUB_LAYOUT, TensorInfo
from rankless.process.prepared_types import prepared


@prepared
class HubLayout(msgspec.Struct, frozen=True):
    """The difference between the files of ``save_pretrained`` and a checkpoint.

    ``splits`` has, for each tensor that is stored otherwise, the elements that each tensor in the files has of it.
    ``left_out`` are the tensors that are not stored. Quantized tensors have torchao's names.
    """

    splits: dict[str, Splits] = {}
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return bool(self.splits or self.left_out)


def encode_layout(layout: HubLayout) -> bytes:
    """Return the contents of the file."""
    return msgspec.json.encode(layout)


def layout_file(reader: Reader) -> bytes | None:
    """Return the contents of the file in a checkpoint, or ``None`` if it has none."""
    if not isinstance(reader, NativeReader):
        return None
    name = (reader.model_folder.relative_to(reader.path) / HUB_LAYOUT).as_posix()
    return reader.read_small_file(name) if name in reader.manifest.files else None


def read_layout(reader: Reader) -> HubLayout:
    """Return the layout of the model in a checkpoint. Raises ``CorruptCheckpointError``."""
    raw = layout_file(reader)
    if raw is None:
        return HubLayout()
    try:
        return msgspec.convert(strict_json.parse_json(raw, f"{reader.path}: {HUB_LAYOUT}"), HubLayout)
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"{reader.path}: {HUB_LAYOUT} is corrupt: {error}") from error


def join_tensors(splits: Mapping[str, Splits], infos: Mapping[str, TensorInfo]) -> dict[str, TensorMapping]:
    """Return the tensors in the files of ``save_pretrained``, as ranges of the tensors ``infos`` of a checkpoint.

    Raises ``CorruptCheckpointError`` if they are not exactly the tensors with ``splits``.
    """
    ranges: dict[str, list[tuple[int, NamedRange]]] = {}
    stored: dict[str, set[TensorInfo]] = {}
    for name, of_tensor in splits.items():
        info = infos[name]
        if not split_tiles(math.prod(info.shape), of_tensor):
            raise _corrupt(name)
        for split in of_tensor:
            stored.setdefault(split.name, set()).add(TensorInfo(info.dtype, split.shape))
            ranges.setdefault(split.name, [])
        for (start, stop), stored_name, at in split_ranges(info, of_tensor):
            ranges[stored_name].append((at, NamedRange(name, start, stop)))
    return dict(_make_mappings(stored, ranges))


def _make_mappings(
    stored: Mapping[str, set[TensorInfo]], ranges: Mapping[str, list[tuple[int, NamedRange]]]
) -> Iterator[tuple[str, TensorMapping]]:
    for name, (info, *others) in stored.items():
        reached = 0
        for at, (_, start, stop) in sorted(ranges[name]):
            if at != reached:
                raise _corrupt(name)
            reached += stop - start
        if others or min(info.shape, default=0) < 0 or reached != info.nbytes:
            raise _corrupt(name)
        yield name, TensorMapping(info, [part for _, part in sorted(ranges[name])])


def _corrupt(name: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{HUB_LAYOUT} is corrupt: the parts of tensor {name!r} are not the whole tensor")


def is_stored_as(name: str, shape: tuple[int, ...], splits: Splits) -> bool:
    """Return whether splits are the whole tensor ``name`` of this shape, unchanged."""
    first, *others = splits
    is_same = not others and (first.name, first.shape, first.at) == (name, shape, 0)
    return is_same and list(first.iter_ranges()) in ([], [ElementRange(0, math.prod(shape))])
