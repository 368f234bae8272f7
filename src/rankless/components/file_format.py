"""The file format of a component, as determined by the arguments and the path.

:mod:`rankless.components.component_calls` asks it on each rank. The text must name all arguments that the files depend
on, but the path and the model: ranks compare it, as they compare those two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rankless.components.component_files import FileSet
from rankless.components.destination import Destination
from rankless.components.file_or_folder import (
    Layout,
    adapter_folder,
    safetensors_file,
    safetensors_folder,
    torch_file,
    torch_folder,
)
from rankless.components.stored_component import StoredComponent
from rankless.state.model.fused_layout import stored_layout

#: Extensions of torch.save files.
TORCH = frozenset({".pt", ".pth", ".bin"})


@dataclass(frozen=True)
class FileFormat:
    """The layout of a component in files, and a text that describes it."""

    layout: Layout
    text: str


def model_file_format(
    destination: Destination, limit: int, *, use_safetensors: bool, model: Any, dtype: str | None = None
) -> FileFormat:
    """Return the format of a model's files. In folders, a transformers model is stored as transformers does.

    ``limit``: the most bytes of tensors in one file of a folder. ``dtype``: that which the tensors are cast to; the
    configuration names it, too.
    """
    if dtype is not None:
        uncast = model_file_format(destination, limit, use_safetensors=use_safetensors, model=model)
        return FileFormat(lambda content: uncast.layout(content.with_dtype(dtype)), f"{uncast.text}, cast to {dtype}")
    if destination.folder:
        kind = "safetensors" if use_safetensors else "torch"
        first = model[0] if isinstance(model, list | tuple) and model else model

        def layout(content: StoredComponent) -> FileSet:
            if not use_safetensors:
                return torch_folder(content.stored_as(partial(stored_layout, first)), limit)
            return safetensors_folder(content.in_torchao_form().stored_as(partial(stored_layout, first)), limit)

        return FileFormat(layout, f"a folder of {kind} files of {limit} bytes")
    return _single_file_format(destination, use_safetensors=use_safetensors)


def adapter_file_format() -> FileFormat:
    """Return the format of the adapters of a model."""
    return FileFormat(adapter_folder, "a folder of PEFT")


def optimizer_file_format(destination: Destination, limit: int) -> FileFormat:
    """Return the format of an optimizer's files. See :func:`model_file_format`."""
    if destination.folder:
        return FileFormat(lambda content: safetensors_folder(content, limit), f"a folder of files of {limit} bytes")
    return _single_file_format(destination, use_safetensors=True)


def _single_file_format(destination: Destination, *, use_safetensors: bool) -> FileFormat:
    name, suffix = destination.path.name, destination.path.suffix
    if suffix in TORCH or (suffix != ".safetensors" and not use_safetensors):
        return FileFormat(lambda content: torch_file(content, name), "a file of torch.save")
    return FileFormat(lambda content: safetensors_file(content, name), "a safetensors file")
