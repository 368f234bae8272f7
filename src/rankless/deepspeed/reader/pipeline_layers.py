"""The layers of a pipeline: each has a file of its own, by its number, with names that count from the layer.

:mod:`rankless.deepspeed.reader.tag_contents` calls it on each rank that opens a checkpoint of a pipeline. A layer that
several stages share must be refused if it is unknown which one it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rankless.deepspeed.reader.deepspeed_file_names import TagFiles
from rankless.deepspeed.reader.file_access import FileAccess
from rankless.deepspeed.reader.zero_partitions import Shapes
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.stored_tensor import StoredTensor

#: The name of a parameter of a layer that several stages share.
_TIED = re.compile(r"(?P<prefix>tied_modules\.[^.]+)\.(?P<name>.+)")

#: The tensors of each layer by their names in it.
Layers = Mapping[int, Mapping[str, Any]]


def read_layers(files: TagFiles, access: FileAccess) -> dict[int, dict[str, Any]]:
    """Return the tensors of each layer by their names in it.

    Raises ``FormatError`` if tensor-parallel ranks divide the layers.
    """
    divided = next((path for layer, path in files.layers.items() if layer.tp), None)
    if divided is not None:
        raise FormatError(
            f"{divided} is of a layer that is divided among tensor-parallel ranks, which rankless does not read: "
            "save it with tensor parallelism 1"
        )
    layers = {layer.layer: access.read_dict(path) for layer, path in files.layers.items()}
    if not all(isinstance(name, str) for tensors in layers.values() for name in tensors):
        raise CorruptCheckpointError(f"{files.folder}: a file of a layer must have tensors by name")
    return layers


def name_layers(layers: Layers) -> dict[str, Any]:
    """Return the tensors of all layers by their names in the pipeline's model: ``0.weight``.

    For example, ``weight`` of layer 3 is ``3.weight``.
    """
    return {f"{number}.{name}": value for number, tensors in layers.items() for name, value in tensors.items()}


def find_shared_names(layers: Layers, shape_groups: Sequence[Shapes], source: str) -> dict[str, str]:
    """Return other names of parameters of layers that several stages share: ``{"tied_modules.a.weight": "0.weight"}``.

    ``shape_groups`` have the former names. Raises ``FormatError`` if it is unknown which layer it is.
    """
    shapes = {name: shape for group in shape_groups for name, shape in group.items()}
    shared: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _TIED.fullmatch(name)
        if match is not None:
            shared.setdefault(match["prefix"], {})[match["name"]] = shape
    unnamed = {
        number: tensors
        for number, tensors in layers.items()
        if tensors and not any(f"{number}.{name}" in shapes for name in tensors)
    }
    names: dict[str, str] = {}
    for prefix, parameters in shared.items():
        number = _find_tied_layer(prefix, parameters, unnamed, source)
        names |= {f"{prefix}.{name}": f"{number}.{name}" for name in parameters}
    return names


def _find_tied_layer(prefix: str, parameters: Shapes, layers: Layers, source: str) -> int:
    """Return the layer that has the shared parameters. Raises ``FormatError`` unless there is exactly one."""
    fitting = [number for number, tensors in layers.items() if _has_shapes(tensors, parameters)]
    if len(fitting) != 1:
        raise FormatError(
            f"{source}: the layers {fitting} could be {prefix}, which several stages of the pipeline share, and no "
            "file says which it is: save the weights in DeepSpeed"
        )
    return fitting[0]


def _has_shapes(tensors: Mapping[str, Any], parameters: Shapes) -> bool:
    return all(
        isinstance(tensors.get(name), StoredTensor) and tensors[name].info.shape == shape
        for name, shape in parameters.items()
    )
