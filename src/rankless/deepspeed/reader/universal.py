"""Universal checkpoints: a folder for each parameter, with a file for its fp32 weights and for each of its states.

Source: ``checkpoint/ds_to_universal.py``. A file has a dict with the tensor as ``param``, or of ZeRO-3 a flat tensor.

:mod:`rankless.deepspeed.reader.tag_contents` calls it on each rank that opens such a checkpoint. The names of files and
keys are DeepSpeed's. The name of a parameter must not lead out of the folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.deepspeed.reader.concatenated_tensor import concatenate_ranks
from rankless.deepspeed.reader.file_access import FileAccess
from rankless.deepspeed.reader.joined_optimizer import JoinedOptimizer
from rankless.deepspeed.reader.rank_optimizer import STEP
from rankless.deepspeed.reader.zero_partitions import PlacedParameter, Shapes
from rankless.errors import CorruptCheckpointError, FormatError, UnsafeNameError
from rankless.formats.stored_tensor import StoredTensor
from rankless.ondisk.data_files import TensorInfo
from rankless.storage.store import store_of

#: The files of the weights, and of the values that the ranks shared.
_WEIGHTS, _SHARED = "fp32", "optimizer_state.pt"

#: Keys with values that are not per parameter.
_VALUES = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def read_universal(folder: Path, shape_groups: Sequence[Shapes], access: FileAccess) -> JoinedOptimizer:
    """Read the optimizer in a universal checkpoint, given the folder of its parameters.

    Raises ``CorruptCheckpointError`` naming a file that is missing or does not fit, ``FormatError`` if its groups are
    unknown.
    """
    shared = access.read_dict(folder / _SHARED)
    joined = JoinedOptimizer(values={key: shared[key] for key in _VALUES if shared.get(key) is not None})
    steps = _list_steps(shared, len(shape_groups))
    for shapes, step in zip(shape_groups, steps, strict=True):
        tables = {name: _read_parameter(folder, name, shape, access) for name, shape in shapes.items()}
        _check_same_states(tables, folder)
        for name, states in tables.items():
            joined.masters[name] = states.pop(_WEIGHTS)
            if states and step is not None:
                states.setdefault(STEP, step)
            joined.states[name] = states
    joined.groups = list(_name_groups(shared, shape_groups, folder / _SHARED))
    return joined


def _read_parameter(folder: Path, name: str, shape: tuple[int, ...], access: FileAccess) -> dict[str, Any]:
    """Return the states of a parameter, and its weights."""
    if "/" in name or "\0" in name:
        raise UnsafeNameError(f"{folder}: the parameter {name!r:.100} cannot have a folder of its own")
    files = [file for file in store_of(folder).list_files(folder / name) if file.suffix == ".pt"]
    states = {file.stem: _reshape(access.read_root(file), shape, file) for file in files}
    if not isinstance(states.get(_WEIGHTS), StoredTensor):
        raise CorruptCheckpointError(
            f"{folder / name / _WEIGHTS}.pt, with the weights of a parameter, is missing: the conversion did not finish"
        )
    return states


def _check_same_states(tables: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Check that the parameters of a group have the same states: DeepSpeed cuts them from flat tensors.

    Those without any got no gradient, or have no elements.
    """
    states = dict.fromkeys(state for table in tables.values() for state in table)
    for name, table in tables.items():
        missing = next((state for state in states if state not in table), None)
        if missing is not None and table.keys() > {_WEIGHTS}:
            raise CorruptCheckpointError(
                f"{folder / name / missing}.pt is missing, and other parameters of its group have that state: the "
                "conversion did not finish, or files were removed"
            )


def _reshape(root: Any, shape: tuple[int, ...], path: Path) -> Any:
    """Return the value in a file; a tensor with the elements of the parameter gets its shape."""
    value = root.get("param") if isinstance(root, dict) else root
    if not isinstance(value, StoredTensor) or value.info.shape in {shape, ()}:
        return value
    whole = TensorInfo(value.info.dtype, shape)
    if whole.nbytes != value.info.nbytes:
        raise CorruptCheckpointError(
            f"{path} has a tensor of the shape {list(value.info.shape)}, and its parameter has {list(shape)}: it is "
            "from another conversion"
        )
    placed = PlacedParameter(path.parent.name, shape, 0, math.prod(shape))
    return concatenate_ranks(placed, [value])


def _list_steps(shared: Mapping[str, Any], number: int) -> list[Any]:
    """Return the number of steps of each sub-group of ZeRO-3, which has no files for them; else ``None``."""
    inner = shared.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    if not isinstance(states, dict):
        return [None] * number
    tables = [states.get(index) for index in range(number)]
    return [table.get(STEP) if isinstance(table, dict) else None for table in tables]


def _name_groups(shared: Mapping[str, Any], shape_groups: Sequence[Shapes], path: Path) -> list[dict[str, Any]]:
    """Return the settings of each group with the names of its parameters."""
    groups = shared.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise CorruptCheckpointError(f"{path}: param_groups must be a list of the groups of an optimizer")
    if [n for group in groups for n in group["params"]] != list(range(len(shape_groups))):
        raise FormatError(
            f"{path} has no parameter groups that fit param_shapes: convert the checkpoint again with ds_to_universal "
            "of DeepSpeed 0.14 or newer, or open the original one"
        )
    return [
        {
            **{key: value for key, value in group.items() if key not in {"params", STEP}},
            "params": [name for number in group["params"] for name in shape_groups[number]],
        }
        for group in groups
    ]
