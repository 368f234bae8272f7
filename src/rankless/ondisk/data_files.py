"""The file and byte offset of each tensor: a pure function of names, dtypes and shapes.

Tensors are ordered by dtype width, widest first, then by name, so that each is aligned to its
dtype. Each is stored whole and row-major. A new file starts if the next tensor would exceed the
limit, or after the last tensor that is not kept apart from others. The number of ranks has no influence.

The plan of a save packs files with it on every rank (:mod:`rankless.engine.plan.save_plan`), and so do conversions and
saves of components. The names of files, the order of tensors and the alignment are bytes of the checkpoint, and must be
equal on all ranks.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TypeVar

import msgspec

from rankless.errors import InvalidArgumentError, UnsupportedTensorError
from rankless.ondisk import block_crcs
from rankless.ondisk.dtypes import PACKED_BITS, count_values_of_rows, dtype_width
from rankless.ondisk.header import DIMENSIONS, HeaderEntry, encode_header

#: The items that are distributed over files.
Item = TypeVar("Item")

#: Key of the header metadata that holds the block CRCs, in the order of the data.
CRC_KEY = "rankless.crc64nvme"

#: Key of the header metadata that holds ``{tied name: stored name}`` as JSON.
TIED_KEY = "rankless.tied"

#: The group of a PEFT adapter, ``default``. The groups of other adapters have their name after a slash, for example
#: ``adapter/style``.
ADAPTER = "adapter"

#: The folder of a weights directory that has the manifests of published versions.
WEIGHT_VERSIONS = "versions"

#: PEFT's name of the file with the configuration of an adapter.
ADAPTER_CONFIG = "adapter_config.json"

#: How a save treats the PEFT adapters of a model: it stores the model, also its adapters, or only its adapters.
NO_ADAPTERS, WITH_ADAPTERS, ONLY_ADAPTERS = "model", "model and adapters", "adapters"

#: The file with the configuration of a model of transformers.
CONFIG = "config.json"

#: The file with the parameters of generation of a model of transformers.
GENERATION_CONFIG = "generation_config.json"

#: The file with the names and layouts that the tensors of a model have on the Hub.
HUB_LAYOUT = "hub_layout.json"

#: PEFT's name of the file with the tensors of an adapter, without the suffix.
ADAPTER_STEM = "adapter_model"

#: A file takes no more tensors once their names and CRCs fill this many bytes of header.
_HEADER_BUDGET = 32_000_000

#: The approximate size in bytes of a header entry without its name and CRCs.
_ENTRY_BYTES = 128

#: The number of a file in its name.
_NUMBER = re.compile(r"-\d+-of-\d+(?=\.safetensors$)")

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class TensorInfo(msgspec.Struct, frozen=True, dict=True):
    """A tensor of a checkpoint: its dtype by safetensors name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * dtype_width(self.dtype)

    @property
    def value_shape(self) -> tuple[int, ...]:
        """The shape as files have it, for people. A packed dtype has several values in an element."""
        return count_values_of_rows(self.dtype, self.shape)


@lru_cache(maxsize=128)
def intern_info(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """Return the first description of such tensors: tensors have few shapes, and the size is computed once.

    Few are kept, because each is compared with all others if a file has shapes of one hash.
    """
    return TensorInfo(dtype, shape)


class DataFile(msgspec.Struct, frozen=True, dict=True):
    """A safetensors file to be written: its path inside the checkpoint and its tensors in order.

    ``notes`` are further entries of its header's metadata.
    """

    path: str
    entries: Mapping[str, HeaderEntry]
    tied: Mapping[str, str]
    notes: Mapping[str, str] = msgspec.field(default_factory=dict)

    def build_header(self, crcs: Iterable[int]) -> bytes:
        """Return the bytes before the data, given the CRC of each block of each tensor, in order."""
        return self.build_header_from_text(block_crcs.to_hex(crcs))

    def build_header_from_text(self, crcs: str) -> bytes:
        """Return the bytes before the data, given the CRCs as :func:`rankless.ondisk.block_crcs.to_hex` writes them."""
        metadata = {"format": "pt", **self.notes, CRC_KEY: crcs}
        if self.tied:
            metadata[TIED_KEY] = json.dumps(dict(sorted(self.tied.items())), separators=(",", ":"))
        return encode_header(self.entries, metadata)

    @cached_property
    def data_start(self) -> int:
        """The offset of the data in bytes. It does not depend on the CRCs, which have a fixed width."""
        blocks = sum(block_crcs.count_blocks(entry.nbytes) for entry in self.entries.values())
        return len(self.build_header_from_text("0" * (block_crcs.DIGITS * blocks)))

    @cached_property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.data_start + sum(entry.nbytes for entry in self.entries.values())


def adapter_group(name: str) -> str:
    """Return the group of the PEFT adapter called ``name``, which is also its folder inside the checkpoint.

    For example, ``style`` has the group ``adapter/style``, and ``default`` has ``adapter``.
    """
    return ADAPTER if name == "default" else f"{ADAPTER}/{name}"


def is_adapter_group(group: str) -> bool:
    """Return whether a group of tensors is a PEFT adapter."""
    return group.partition("/")[0] == ADAPTER


#: The most bytes of tensors in one file, unless a caller passes another size. Smaller files are shared more often by
#: checkpoints, and were neither slower to save nor to load; many more files take time on network file systems.
SHARD_SIZE = "1GB"


def parse_size(size: int | str) -> int:
    """Parse a size such as ``5_000_000_000``, ``"5GB"`` or ``"512MiB"`` into bytes. ``GB`` is decimal."""
    if isinstance(size, str):
        number = size.strip().upper().rstrip("BIKMGT")
        unit = size.strip().upper()[len(number) :] or "B"
        try:
            size = int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            raise InvalidArgumentError(
                f"cannot parse the size {size!r}; pass a number of bytes, or a number with a unit such as '5GB'"
            ) from None
    if not isinstance(size, int) or size <= 0:
        raise InvalidArgumentError(f"a size must be a positive number of bytes or a text such as '5GB'; got {size!r}")
    return size


def split_by_size(sizes: Mapping[Item, int], limit: int) -> Iterator[list[Item]]:
    """Yield the items of each file, in order: at most ``limit`` bytes or one item. Yield one file at least.

    For example, sizes of 3, 4 and 9 bytes with a limit of 8 give two files: the first two items, and the last one.
    """
    items: list[Item] = []
    file_bytes = 0
    for item, nbytes in sizes.items():
        if file_bytes and file_bytes + nbytes > limit:
            yield items
            items, file_bytes = [], 0
        items.append(item)
        file_bytes += nbytes
    yield items


def pack_files(
    group: str,
    tensors: Mapping[str, TensorInfo],
    tied: Mapping[str, str],
    limit: int,
    apart: Collection[str] = (),
) -> list[DataFile]:
    """Return the files of one group of tensors, in order.

    ``group`` is ``"model"``, ``"optimizer"``, ``"model/gen"`` (a folder and the stem of its files), a group of
    adapters, or ``"state"`` or ``"ranks"`` (files next to the manifest). A tensor is never split over files. No file
    has both tensors in ``apart`` and others.
    Raises ``UnsupportedTensorError`` for a tensor that could not be read back.

    Each rank calls it while it plans a save, in the vote on the preparation.
    """
    limit = sys.maxsize if is_adapter_group(group) else limit  # PEFT reads one file only
    order = sorted(tensors, key=lambda name: (name in apart, -dtype_width(tensors[name].dtype), name))
    names_by_file: list[list[str]] = []
    file_bytes = header_bytes = 0
    for name in order:
        nbytes = tensors[name].nbytes
        is_full = file_bytes + nbytes > limit or header_bytes > _HEADER_BUDGET
        if not names_by_file or is_full or (name in apart) != (names_by_file[-1][0] in apart):
            names_by_file.append([])
            file_bytes = header_bytes = 0
        names_by_file[-1].append(name)
        file_bytes += nbytes
        header_bytes += _estimate_header_bytes(name, tensors[name])
    return [
        _data_file(path, _build_entries(names, tensors), tied)
        for path, names in zip(_file_paths(group, len(names_by_file)), names_by_file, strict=True)
    ]


def _data_file(path: str, entries: Mapping[str, HeaderEntry], tied: Mapping[str, str]) -> DataFile:
    return DataFile(path, entries, {alias: name for alias, name in tied.items() if name in entries})


def _estimate_header_bytes(name: str, info: TensorInfo) -> int:
    """Estimate the bytes of header that a tensor needs. Raises ``UnsupportedTensorError`` if no header can hold it."""
    if name == "__metadata__":
        raise UnsupportedTensorError(
            f"a tensor has the name {name!r}, which is reserved in safetensors files; rename it"
        )
    if len(info.shape) > DIMENSIONS:
        raise UnsupportedTensorError(
            f"tensor {name!r} has {len(info.shape)} dimensions; at most {DIMENSIONS} are supported"
        )
    if info.dtype in PACKED_BITS and not info.shape:
        raise UnsupportedTensorError(
            f"tensor {name!r} of {info.dtype} has no dimension whose values could be counted: give it one"
        )
    try:
        quoted = msgspec.json.encode(name)
    except UnicodeEncodeError as error:
        raise UnsupportedTensorError(
            f"a tensor has the name {name!r}, which is not valid Unicode text: {error}"
        ) from error
    return len(quoted) + _ENTRY_BYTES + block_crcs.DIGITS * block_crcs.count_blocks(info.nbytes)


def _build_entries(names: Sequence[str], tensors: Mapping[str, TensorInfo]) -> dict[str, HeaderEntry]:
    entries, end = {}, 0
    for name in names:
        info = tensors[name]
        entries[name] = HeaderEntry(info.dtype, info.shape, (end, end + info.nbytes))
        end += info.nbytes
    return entries


def file_stem(group: str) -> str:
    """Return the path of a group's files inside the checkpoint, without number and suffix.

    For example, ``model`` gives ``model/model``, and ``model/gen`` gives ``model/gen/model``.
    """
    if is_adapter_group(group):
        return f"{group}/{ADAPTER_STEM}"
    return group if group in {"state", "ranks"} else f"{group}/{group.split('/', maxsplit=1)[0]}"


def _file_paths(group: str, n: int) -> list[str]:
    if n == 1:
        return [f"{file_stem(group)}.safetensors"]
    return [f"{file_stem(group)}-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def index_path(files: Sequence[DataFile]) -> str:
    """Return the path of the index of a group's files, such as ``model/model.safetensors.index.json``."""
    return f"{_NUMBER.sub('', files[0].path)}.index.json"


def build_index(files: Sequence[DataFile]) -> bytes:
    """Return the index of several files in Hugging Face's format: the total size and each tensor's file.

    Rank 0 writes the index when it commits.
    """
    total = sum(entry.nbytes for file in files for entry in file.entries.values())
    weight_map = {name: file.path.rsplit("/")[-1] for file in files for name in file.entries}
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(table, indent=2).encode() + b"\n"
