"""The file format of a component, as determined by the arguments and the path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rankless.components.destination import Destination
from rankless.components.file_layouts import (
    Layout,
    adapter_folder,
    safetensors_file,
    safetensors_folder,
    torch_file,
    torch_folder,
)
from rankless.errors import InvalidArgumentError
from rankless.state.model.hf_layout import stored_layout

#: Extensions of torch.save files.
TORCH = frozenset({".pt", ".pth", ".bin"})

_MIB = 2**20


@dataclass(frozen=True)
class FileFormat:
    """The layout of a component in files, and a text that describes it."""

    layout: Layout
    text: str


def model_file_format(
    destination: Destination, size_per_shard: float, *, use_safetensors: bool, model: Any
) -> FileFormat:
    """Return the format of a model's files. In folders, a transformers model is stored as transformers does.

    Raises ``InvalidArgumentError`` if the size is not a positive number.
    """
    if destination.folder:
        limit = shard_bytes(size_per_shard)
        kind = "safetensors" if use_safetensors else "torch"
        layout = safetensors_folder if use_safetensors else torch_folder
        first = model[0] if isinstance(model, list | tuple) and model else model
        return FileFormat(
            lambda content: layout(content.stored_as(partial(stored_layout, first)), limit),
            f"a folder of {kind} files of {limit} bytes",
        )
    return _single_file_format(destination, use_safetensors=use_safetensors)


def adapter_file_format() -> FileFormat:
    """Return the format of the adapters of a model."""
    return FileFormat(adapter_folder, "a folder of PEFT")


def optimizer_file_format(destination: Destination, size_per_shard: float) -> FileFormat:
    """Return the format of an optimizer's files. Raises ``InvalidArgumentError`` for an invalid size."""
    if destination.folder:
        limit = shard_bytes(size_per_shard)
        return FileFormat(lambda content: safetensors_folder(content, limit), f"a folder of files of {limit} bytes")
    return _single_file_format(destination, use_safetensors=True)


def shard_bytes(size_per_shard: float) -> int:
    """Convert MiB to bytes. Raises ``InvalidArgumentError`` if the size is not a positive number."""
    if not isinstance(size_per_shard, int | float) or not size_per_shard > 0:
        raise InvalidArgumentError(f"size_per_shard must be a number of MiB above 0; got {size_per_shard!r}")
    return max(1, int(size_per_shard * _MIB))


def _single_file_format(destination: Destination, *, use_safetensors: bool) -> FileFormat:
    name, suffix = destination.path.name, destination.path.suffix
    if suffix in TORCH or (suffix != ".safetensors" and not use_safetensors):
        return FileFormat(lambda content: torch_file(content, name), "a file of torch.save")
    return FileFormat(lambda content: safetensors_file(content, name), "a safetensors file")
