"""Parsing the file of a model: its tensors, the shapes of its parameters, and other values.

Source: ``_common_checkpoint_state`` and ``_save_checkpoint`` in ``runtime/engine.py``.

:mod:`rankless.deepspeed.reader.pipeline_stages` calls it on each rank that opens a checkpoint. The keys are
DeepSpeed's: every other key is client state of the user.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.deepspeed.reader.file_access import FileAccess
from rankless.deepspeed.reader.zero_partitions import Shapes
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.ondisk.read_budget import ReadBudget

#: The most dimensions of a parameter, and the limit of its number of elements.
_DIMENSIONS, _LARGEST = 64, 2**60

#: Units of work for a parameter, and for each of its dimensions.
_PARAMETER = 4

#: Keys that rankless reads into a model, an optimizer or a scheduler.
_FORMAT_KEYS = frozenset(
    {
        *("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("buffer_names", "lr_scheduler"),
    }
)

#: Keys of DeepSpeed that are left out if they are empty. All others are the user's client state.
_OPTIONAL_KEYS = frozenset(
    {
        *("data_sampler", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names", "num_experts"),
        *("ds_autoep_layers", "autoep_layers", "universal_checkpoint_info", "folding"),
    }
)

_AUTO_EP = ("ds_autoep_layers", "autoep_layers")


@dataclass(frozen=True)
class DeepSpeedModelFile:
    """The file of a model.

    Attributes:
        path: The file.
        module: The state dict of the model; empty for a stage of a pipeline: its layers have files of their own.
        shapes: The shapes of the trained parameters of each group, or sub-group of ZeRO-3; ``None`` without ZeRO.
        frozen_shapes: The shapes of the frozen parameters, if they are known.
        frozen: The part of each frozen parameter that a rank of ZeRO-3 has.
        shared: The names of tied parameters: ``{name: name of the parameter that is stored}``.
        buffers: The names of the buffers.
        optimizer: The state of the optimizer without ZeRO, or ``None``.
        scheduler: The state of the scheduler, or ``None``.
        values: The counters of DeepSpeed and the client state.
    """

    path: Path
    module: Mapping[str, Any]
    shapes: Sequence[Shapes] | None
    frozen_shapes: Shapes
    frozen: Mapping[str, Any]
    shared: Mapping[str, str]
    buffers: Sequence[str]
    optimizer: Any
    scheduler: Any
    values: Mapping[str, Any]


def read_model_file(path: Path, access: FileAccess) -> DeepSpeedModelFile:
    """Read the file of a model.

    Raises ``FormatError`` if it has a form that rankless does not read, ``CorruptCheckpointError`` if it is invalid.
    """
    root = access.read_dict(path)
    if "module" not in root:
        raise FormatError(f"{path} has no module: it is not a model that DeepSpeed saved")
    if any(root.get(key) for key in _AUTO_EP):
        raise FormatError(
            f"{path} has layers of AutoEP, which rankless reads neither here nor in universal checkpoints: train "
            "without AutoEP, or save the weights in DeepSpeed"
        )
    shapes = root.get("param_shapes")
    return DeepSpeedModelFile(
        path,
        _get_table(root, "module", path),
        None if shapes is None else _parse_shape_groups(shapes, path, access.budget),
        _parse_shapes(root.get("frozen_param_shapes") or {}, "frozen_param_shapes", path, access.budget),
        _get_table(root, "frozen_param_fragments", path),
        _get_table(root, "shared_params", path, of_names=True),
        _get_names(root, path),
        root.get("optimizer"),
        root.get("lr_scheduler"),
        {
            key: value
            for key, value in root.items()
            if key not in _FORMAT_KEYS and not (key in _OPTIONAL_KEYS and not value)
        },
    )


def _get_table(root: Mapping[str, Any], key: str, path: Path, *, of_names: bool = False) -> dict[str, Any]:
    """Return a dict by name, which may be missing or ``None``."""
    table = root.get(key)
    if table is None:
        return {}
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise CorruptCheckpointError(f"{path}: {key} must be a dict by the names of parameters")
    if of_names and not all(isinstance(name, str) for name in table.values()):
        raise CorruptCheckpointError(f"{path}: {key} must have the names of parameters")
    return table


def _get_names(root: Mapping[str, Any], path: Path) -> list[str]:
    names = root.get("buffer_names") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptCheckpointError(f"{path}: buffer_names must be a list of names")
    return names


def _parse_shape_groups(value: Any, path: Path, budget: ReadBudget) -> list[Shapes]:
    """Return the shapes of each group, or of each sub-group of ZeRO-3. Versions before 0.4 have one dict.

    Raises ``CorruptCheckpointError`` if they are not shapes by name, or if a name is in two groups.
    """
    groups = [value] if isinstance(value, dict) else value
    if not isinstance(groups, list):
        raise CorruptCheckpointError(f"{path}: param_shapes must be a list of dicts")
    parsed = [_parse_shapes(group, "param_shapes", path, budget) for group in groups]
    names: set[str] = set()
    for shapes in parsed:
        duplicate = next((name for name in shapes if name in names), None)
        if duplicate is not None:
            raise CorruptCheckpointError(f"{path}: param_shapes has the parameter {duplicate!r:.100} in two groups")
        names |= shapes.keys()
    return parsed


def _parse_shapes(value: Any, key: str, path: Path, budget: ReadBudget) -> Shapes:
    """Return the shapes in a dict. Raises ``CorruptCheckpointError`` if it is not one of shapes by name."""
    if not isinstance(value, Mapping):
        raise CorruptCheckpointError(f"{path}: {key} must have the shapes of parameters by their names")
    return {_check_name(name, key, path): _check_shape(shape, name, path, budget) for name, shape in value.items()}


def _check_name(name: Any, key: str, path: Path) -> str:
    if not isinstance(name, str):
        raise CorruptCheckpointError(f"{path}: a name in {key} is not a text")
    return name


def _check_shape(shape: Any, name: str, path: Path, budget: ReadBudget) -> tuple[int, ...]:
    is_list = isinstance(shape, tuple | list) and len(shape) <= _DIMENSIONS
    if not is_list or not all(type(size) is int and 0 <= size < _LARGEST for size in shape):
        raise CorruptCheckpointError(f"{path}: the shape of {name!r:.100} is not a list of sizes")
    budget.spend(_PARAMETER * (1 + len(shape)))
    if math.prod(size or 1 for size in shape) >= _LARGEST:
        raise CorruptCheckpointError(f"{path}: the shape of {name!r:.100}, {list(shape)[:8]}, is too large")
    return tuple(shape)
