"""What ``parallel_layers.save``, Lightning's ``NeuronCheckpointIO`` and early ZeRO-1 optimizers wrote: a tree a rank.

It is a model by itself, one under ``model``, or Lightning's checkpoint, with ``state_dict`` and ``optimizer_states``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.format import file_names
from holdfast.compat.nxd.format.file_names import RankCoordinates
from holdfast.compat.nxd.format.rank_file import FileAccess, RankFile, read_rank_file
from holdfast.compat.nxd.format.zero import BASE
from holdfast.errors import CorruptCheckpointError
from holdfast.formats.stored_tensor import StoredTensor

_MODELS = ("model", "state_dict", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optimizer_states", "optimizer_state_dict")
_SCHEDULERS = ("scheduler", "lr_schedulers", "lr_scheduler")

#: What early ZeRO-1 files have beside a state.
_PLACE = ("dp_rank", "tp_rank")

Files = dict[RankCoordinates, RankFile]


def read_legacy_files(path: Path, access: FileAccess) -> tuple[Files, Files, dict[str, Any]]:
    """The models, the optimizers, and the values of the first rank."""
    found, early = file_names.find_legacy(path), file_names.find_legacy_zero(path)
    whole = {rank: read_rank_file(file, access) for rank, file in found.files.items()} if found else {}
    models = {rank: file for rank, file in _parts(whole, _MODELS).items() if not rank.dp}
    if not models:
        models = {rank: file for rank, file in whole.items() if not rank.dp and _is_model(file.root)}
    optimizers = _parts(whole, _OPTIMIZERS)
    if early:
        optimizers = {rank: _without_place(read_rank_file(file, access)) for rank, file in early.files.items()}
    first = whole.get(RankCoordinates(0, 0, 0, 0))
    values = _values(first.root) if first is not None and RankCoordinates(0, 0, 0, 0) in models else {}
    return models, _once(optimizers), values


def _parts(whole: Mapping[RankCoordinates, RankFile], keys: tuple[str, ...]) -> Files:
    """What is under one of some keys of each file."""
    found: Files = {}
    for rank, file in whole.items():
        root = file.root if isinstance(file.root, dict) else {}
        part = next((root[key] for key in keys if isinstance(root.get(key), dict | list) and root[key]), None)
        if isinstance(part, list):
            if len(part) != 1:
                raise CorruptCheckpointError(f"{file.path} has {len(part)} optimizers, of which NxD has one")
            part = part[0]
        if part is not None:
            found[rank] = replace(file, root=part)
    return found


def _once(optimizers: Files) -> Files:
    """Those of further data-parallel ranks only where each has its own."""
    is_zero = any(BASE in file.root for file in optimizers.values() if isinstance(file.root, dict))
    return {rank: file for rank, file in optimizers.items() if is_zero or not rank.dp}


def _is_model(root: Any) -> bool:
    return isinstance(root, dict) and bool(root) and all(isinstance(value, StoredTensor) for value in root.values())


def _without_place(file: RankFile) -> RankFile:
    root = {key: value for key, value in file.root.items() if key not in _PLACE} if isinstance(file.root, dict) else {}
    return replace(file, root=root)


def _values(root: Any) -> dict[str, Any]:
    if not isinstance(root, dict) or _is_model(root):
        return {}
    found: dict[str, Any] = {}
    schedulers = next((root[key] for key in _SCHEDULERS if root.get(key)), None)
    if schedulers is not None:
        found["scheduler"] = schedulers[0] if isinstance(schedulers, list) and len(schedulers) == 1 else schedulers
    taken = {*_MODELS, *_OPTIMIZERS, *_SCHEDULERS}
    rest = {key: value for key, value in root.items() if key not in taken}
    if rest:
        found["user_content"] = rest
    return found
