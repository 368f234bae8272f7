"""States of optimizers saved by other systems, without their class: compared with those this optimizer creates.

:mod:`rankless.state.optimizer.optimizer_restore` calls it on each rank in loads from other formats: the checks while it
matches, the casts when it puts values in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from rankless.errors import OptimizerMismatchError
from rankless.ondisk.data_files import TensorInfo
from rankless.state.model.model_view import ParamRef
from rankless.state.optimizer.adapters import TorchOptimizer
from rankless.state.optimizer.optimizer_view import GroupMember, ParamGroup
from rankless.state.optimizer.probe import ProbedState, probe_states


def check_state_names(
    group: ParamGroup, saved: Mapping[str, Any] | None, infos: Mapping[str, Mapping[str, TensorInfo]]
) -> bool:
    """Return whether the checkpoint has other states than this optimizer creates.

    Raises ``OptimizerMismatchError`` if the saved states are of another class. A file of another system does not tell
    the class, and two packages may have classes of one name: then their settings differ.
    """
    names_of_settings = group.settings.keys() - {"params", "param_names"} - _OF_SCHEDULERS
    if saved is None or (saved["class"] and names_of_settings == saved["settings"].keys() - _OF_SCHEDULERS):
        return False
    for member in group.members:
        tensors = {state for ref in member.refs for state in infos.get(ref.name, {})}
        own_names = set(probe_member(group, member)) if tensors else set()
        if own_names:
            plain = {state for ref in member.refs for state in saved["state"].get(ref.name, {})}
            whole = {state for state in tensors if state.rpartition(".")[0] not in plain}
            lacking, unknown = own_names - plain - whole - _COUNTERS, whole - own_names - _COUNTERS
            if not (plain | whole) & own_names or (lacking and unknown):
                raise OptimizerMismatchError(
                    f"the checkpoint holds the optimizer states {', '.join(sorted(plain | whole))}; "
                    f"{group.adapter.class_name} keeps {', '.join(sorted(own_names))}: its class differs "
                    "from the saved one"
                )
            return bool(lacking or unknown)
    return False


#: States that optimizers of many classes keep: they tell no class.
_COUNTERS = frozenset({"step"})

#: Settings that schedulers add to the groups of an optimizer.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


def check_collections(ref: ParamRef, plain: Mapping[str, Any]) -> None:
    """Raise ``OptimizerMismatchError`` if a collection has a whole tensor like a parameter that is sharded here.

    Files of other systems have such tensors; a checkpoint has them as states of their own.
    """
    if not ref.tensor.is_divided():
        return
    for state, value in plain.items():
        shapes = {tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        if shapes & {tuple(ref.tensor.shape)} - {()}:
            raise OptimizerMismatchError(
                f"the optimizer state {state!r} of {ref.name!r} has tensors like its parameter in a collection, which "
                "rankless cannot divide as it reads this format: load it without sharding, save it by "
                "save_checkpoint, and load that"
            )


def as_native_states(
    group: ParamGroup, member: GroupMember, plain: Mapping[str, Any], tensors: Collection[str]
) -> dict[str, Any]:
    """Return states with numbers as tensors, if this optimizer keeps them so: other systems count steps in Python.

    ``tensors`` are the names of states that are tensors of some parameter in the checkpoint: numbers under these names
    were numbers in the optimizer, too.
    """
    numbers = {name for name, value in plain.items() if type(value) in {int, float} and name not in tensors}
    if not numbers:
        return dict(plain)
    probed_states = probe_member(group, member)
    return {
        name: _as_tensor(value, probed_states.get(name) if name in numbers else None) for name, value in plain.items()
    }


def _as_tensor(value: Any, probed: ProbedState | None) -> Any:
    return value if probed is None or probed.shape else torch.tensor(value, dtype=probed.dtype, device=probed.device)


def probe_member(group: ParamGroup, member: GroupMember) -> Mapping[str, ProbedState | None]:
    """Return the states of a parameter that the optimizer creates at its first step; none if that is unknown."""
    if not isinstance(group.adapter, TorchOptimizer) or not isinstance(member.key, torch.Tensor):
        return {}
    try:
        return probe_states(group.adapter.optimizer, member.key)
    except OptimizerMismatchError:
        return {}
