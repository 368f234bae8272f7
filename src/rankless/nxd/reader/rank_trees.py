"""Readers for one tree per rank: ``parallel_layers.save``, Lightning's ``NeuronCheckpointIO``, early ZeRO-1 optimizers.

The tree is a model, a dict with a model under ``model``, or Lightning's checkpoint with ``state_dict`` and
``optimizer_states``.

:mod:`rankless.nxd.reader.nxd_checkpoint` calls it on each rank that opens such a folder. The keys are those that these
programs write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader import nxd_file_names
from rankless.nxd.reader.nxd_file_names import RankCoordinates
from rankless.nxd.reader.rank_file import RankFile, RankFileAccess, read_rank_file
from rankless.nxd.reader.zero_states import BASE

_MODELS = ("model", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optimizer_states", "optimizer_state_dict")
_SCHEDULERS = ("scheduler", "lr_schedulers", "lr_scheduler")

#: Keys that early ZeRO-1 files have next to a state.
_RANK_FIELDS = ("dp_rank", "tp_rank")

Files = dict[RankCoordinates, RankFile]


def read_legacy_files(path: Path, access: RankFileAccess) -> tuple[Files, Files, dict[str, Any]]:
    """Read the models and optimizers of all ranks, and the values of the first rank."""
    rank_files, zero_files = nxd_file_names.find_legacy_files(path), nxd_file_names.find_legacy_zero_files(path)
    files = {rank: read_rank_file(file, access) for rank, file in rank_files.files.items()} if rank_files else {}
    models = {rank: file for rank, file in _select_component(files, _MODELS).items() if not rank.dp}
    if not models:
        models = {rank: file for rank, file in files.items() if not rank.dp and _is_model(file.root)}
    optimizers = _select_component(files, _OPTIMIZERS)
    if zero_files:
        optimizers = {
            rank: _without_rank_fields(read_rank_file(file, access)) for rank, file in zero_files.files.items()
        }
    first = files.get(RankCoordinates(0, 0, 0, 0))
    values = _collect_values(first.root) if first is not None and RankCoordinates(0, 0, 0, 0) in models else {}
    return models, _drop_replicated(optimizers), values


def _select_component(files: Mapping[RankCoordinates, RankFile], keys: tuple[str, ...]) -> Files:
    """Return the component under the first matching key of each file."""
    components: Files = {}
    for rank, file in files.items():
        root = file.root if isinstance(file.root, dict) else {}
        component = next((root[key] for key in keys if isinstance(root.get(key), dict | list) and root[key]), None)
        if isinstance(component, list):
            if len(component) != 1:
                raise CorruptCheckpointError(f"{file.path} has {len(component)} optimizers; NxD has one")
            component = component[0]
        if component is not None:
            components[rank] = replace(file, root=component)
    return components


def _drop_replicated(optimizers: Files) -> Files:
    """Drop the optimizers of further data-parallel ranks, unless each rank has its own shard."""
    is_zero = any(BASE in file.root for file in optimizers.values() if isinstance(file.root, dict))
    return {rank: file for rank, file in optimizers.items() if is_zero or not rank.dp}


def _is_model(root: Any) -> bool:
    return isinstance(root, dict) and bool(root) and all(isinstance(value, StoredTensor) for value in root.values())


def _without_rank_fields(file: RankFile) -> RankFile:
    """Return the file without the keys that identify its rank."""
    root = (
        {key: value for key, value in file.root.items() if key not in _RANK_FIELDS}
        if isinstance(file.root, dict)
        else {}
    )
    return replace(file, root=root)


def _collect_values(root: Any) -> dict[str, Any]:
    """Return the scheduler and the user content of a tree."""
    if not isinstance(root, dict) or _is_model(root):
        return {}
    values: dict[str, Any] = {}
    schedulers = next((root[key] for key in _SCHEDULERS if root.get(key)), None)
    if schedulers is not None:
        values["scheduler"] = schedulers[0] if isinstance(schedulers, list) and len(schedulers) == 1 else schedulers
    component_keys = {*_MODELS, *_OPTIMIZERS, *_SCHEDULERS}
    user_content = {key: value for key, value in root.items() if key not in component_keys}
    if user_content:
        values["user_content"] = user_content
    return values
