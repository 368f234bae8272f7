"""Reading an iteration of ``fsdp_dtensor``, which Megatron-FSDP writes: a folder of ``torch.distributed.checkpoint``.

Its tensors have the names of the wrapped modules, the gate and the projection are two tensors, and each parameter has
the settings of its group.
Source: ``megatron/core/transformer/fsdp_dtensor_checkpoint.py`` and ``megatron/core/optimizer/distrib_optimizer.py`` of
megatron-core 0.15 to 0.19.

:class:`~rankless.megatron.reader.megatron_reader.MegatronReader` calls it on each rank that opens such an iteration.
The keys are Megatron's; an unknown form must be refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankless.dcp.reader import dcp_directory
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.chunked_tensor_slices import JoinedTensor, offset_along, offset_slices
from rankless.formats.stored_tensor import UnreadableTensor
from rankless.megatron.reader.bucket_search import SKIP
from rankless.megatron.reader.config_files import choose_args
from rankless.megatron.reader.group_settings import STEP
from rankless.megatron.reader.inert_objects import MEGATRON_NAMES, make_plain
from rankless.megatron.reader.layer_names import strip_wrappers
from rankless.megatron.reader.saved_state import SavedState
from rankless.megatron.reader.stage_names import StageNames
from rankless.ondisk.data_files import TensorInfo

#: The keys of the optimizer, and of its parts.
_OPTIMIZER, _STATE, _META = "optimizer", "state", "param_to_group_meta"

#: The states of a parameter that are tensors of its shape.
_STATES = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer"})

#: The halves of ``linear_fc1``: the gate and the projection.
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d{0,6})_([wv])")

#: A parameter of one of the experts that Transformer Engine computes together.
_GROUPED_EXPERT = re.compile(r"(.+\.experts)\.(linear_fc[12])\.(weight|bias)(\d{1,6})")

_UNKNOWN = "which is not what megatron-core 0.15 to 0.19 write"


def read_fsdp_dtensor(path: Path, *, with_optimizer: bool) -> SavedState:
    """Return the state in the folder of an iteration. Raises ``FormatError`` for contents that cannot be read."""
    saved = dcp_directory.read_tree(path, MEGATRON_NAMES)
    root = dict(saved.root)
    model, optimizer = root.pop("model", None), root.pop(_OPTIMIZER, None)
    chunks = sorted(key for key in root if re.fullmatch(r"model\d+", str(key)))
    if chunks or not isinstance(model, dict):
        raise FormatError(
            f"{path} has {', '.join(chunks) or 'no tensors'} in place of a model, as a virtual pipeline has it, "
            "which rankless does not read: save it without --num-layers-per-virtual-pipeline-stage"
        )
    values = make_plain(root, saved.budget)
    args = choose_args(values.get("args"), path)
    state = SavedState(path, saved.files, saved.fingerprint, saved.budget, args)
    state.values |= values
    weights = {name: tensor for name, tensor in model.items() if not name.endswith("_extra_state")}
    state.weights |= _join_halves(_select_tensors(weights, f"{path}: model"), str(path))
    if with_optimizer and optimizer is not None:
        _add_optimizer(state, make_plain(optimizer, saved.budget))
    return state


def _select_tensors(tree: Mapping[str, Any], label: str) -> dict[str, ChunkedTensor]:
    """Return the tensors of a tree. Raises ``FormatError`` for anything else."""
    for name, value in tree.items():
        if isinstance(value, UnreadableTensor):
            raise FormatError(f"{label}: tensor {name!r:.200} {value.why}")
        if not isinstance(value, ChunkedTensor):
            raise FormatError(f"{label} has {name!r:.200}, {type(value).__name__}, {_UNKNOWN}")
    return dict(tree)


def _join_halves(tensors: Mapping[str, ChunkedTensor], label: str) -> dict[str, JoinedTensor]:
    """Return the tensors by their names in ``torch_dist``, with the gate and the projection as one tensor."""
    whole: dict[str, JoinedTensor] = {}
    halves: dict[str, dict[str, ChunkedTensor]] = {}
    for name, tensor in tensors.items():
        if match := _HALF.fullmatch(name):
            halves.setdefault(match[1], {})[match[2]] = tensor
        else:
            whole[name] = JoinedTensor(tensor.info, tensor.chunks)
    for name, parts in halves.items():
        if name in whole:
            raise CorruptCheckpointError(f"{label}: {name!r:.200} is there as a whole and in halves")
        whole[name] = _join(name, parts, label)
    names = _NameTable(whole)
    renamed = {names.rename(name): tensor for name, tensor in whole.items()}
    if len(renamed) < len(whole):
        raise FormatError(f"{label}: two tensors have the same name without the prefixes of wrappers, {_UNKNOWN}")
    return renamed


def _join(name: str, parts: Mapping[str, ChunkedTensor], label: str) -> JoinedTensor:
    if len(parts) < 2 or not parts["w"].info.shape or parts["w"].info != parts["v"].info:  # noqa: PLR2004 - two halves
        raise CorruptCheckpointError(f"{label}: {name!r:.200} must have two halves of the same shape, _w and _v")
    gate, projection = parts["w"], parts["v"]
    rows, *inner = gate.info.shape
    shape = (2 * rows, *inner)
    moved = offset_slices(projection.chunks, offset_along(shape, 0, rows))
    return JoinedTensor(TensorInfo(gate.info.dtype, shape), (*gate.chunks, *moved))


class _NameTable:
    """The names in ``torch_dist`` of parameters with the names of modules."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._layers = StageNames({_strip_name(name) for name in names}, 0)

    def rename(self, name: str) -> str:
        return self._layers.rename(_strip_name(name))


def _strip_name(name: str) -> str:
    """Return a name without the prefixes of wrappers, and with an expert's number where other formats have it.

    For example, ``…experts.linear_fc1.weight2`` becomes ``…experts.local_experts.2.linear_fc1.weight``.
    """
    bare = strip_wrappers(name)
    if expert := _GROUPED_EXPERT.fullmatch(bare):
        return f"{expert[1]}.local_experts.{expert[4]}.{expert[2]}.{expert[3]}"
    return bare


def _add_optimizer(state: SavedState, optimizer: Any) -> None:
    """Add the states of the parameters, and the settings of their groups."""
    label = f"{state.path}: optimizer"
    unknown = sorted(map(str, set(optimizer) - {_STATE, _META})) if isinstance(optimizer, dict) else ["no dict"]
    if unknown or not isinstance(optimizer.get(_META), dict) or not isinstance(optimizer.get(_STATE, {}), dict):
        raise FormatError(f"{label} has {', '.join(unknown)[:200] or 'no param_to_group_meta'}, {_UNKNOWN}; {SKIP}")
    by_state: dict[str, dict[str, Any]] = {}
    for name, states in optimizer.get(_STATE, {}).items():  # it has none before the first step
        if not isinstance(states, dict):
            raise FormatError(f"{label} has no states of {name!r:.200}, {_UNKNOWN}; {SKIP}")
        for key, value in states.items():
            by_state.setdefault(str(key), {})[name] = value
    for key, tensors in by_state.items():
        if key == STEP:
            names = _NameTable({_whole_name(name): None for name in tensors})
            state.steps |= {names.rename(_whole_name(name)): value for name, value in tensors.items()}
        elif key in _STATES:
            joined = _join_halves(_select_tensors(tensors, f"{label}, {key}"), label)
            state.add_states({name: {key: tensor} for name, tensor in joined.items()})
        else:
            raise FormatError(f"{label} has the state {key!r:.40}, whose meaning is unknown; {SKIP}")
    _check_states(state, label)
    _add_groups(state, optimizer[_META], label)


def _whole_name(name: str) -> str:
    match = _HALF.fullmatch(name)
    return name if match is None else match[1]


def _check_states(state: SavedState, label: str) -> None:
    kinds = {frozenset(states) for states in state.states.values()}
    if len(kinds) > 1 or (state.steps and set(state.steps) != set(state.states)):
        raise CorruptCheckpointError(f"{label} has states of some parameters that others lack: parts of it are missing")
    for name, states in state.states.items():
        weight = state.weights.get(name)
        if weight is None or any(tensor.info.shape != weight.info.shape for tensor in states.values()):
            raise CorruptCheckpointError(f"{label} has states of {name!r:.200}, which the model lacks in that shape")


def _add_groups(state: SavedState, meta: Mapping[str, Any], label: str) -> None:
    """Add the groups: the parameters with equal settings. Raises ``FormatError`` if a parameter has none."""
    names = _NameTable({_whole_name(name): None for name in meta})
    groups: list[dict[str, Any]] = []
    for name, settings in meta.items():
        if not isinstance(settings, dict):
            raise FormatError(f"{label} has no settings of {name!r:.200}, {_UNKNOWN}; {SKIP}")
        if settings not in groups:
            groups.append(settings)
        renamed, number = names.rename(_whole_name(name)), groups.index(settings)
        if state.group_numbers.setdefault(renamed, number) != number:
            raise CorruptCheckpointError(f"{label} has different settings for the halves of {name!r:.200}")
    missing = sorted(set(state.states) - set(state.group_numbers))
    if missing:
        raise FormatError(
            f"{label} has states of {missing[0]!r:.200}, and no settings of its group, {_UNKNOWN}; {SKIP}"
        )
    state.groups = [groups]
