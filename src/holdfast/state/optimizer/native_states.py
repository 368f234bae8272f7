"""States of optimizers saved by others without their class: told by what this optimizer would make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.errors import OptimizerMismatchError
from holdfast.ondisk.files import TensorInfo
from holdfast.state.optimizer.adapters import TorchOptimizer
from holdfast.state.optimizer.probe import ProbedStates, probe_states
from holdfast.state.optimizer.view import GroupMember, ParamGroup


def check_state_shapes(
    group: ParamGroup, saved: Mapping[str, Any] | None, infos: Mapping[str, Mapping[str, TensorInfo]]
) -> None:
    """Raise ``OptimizerMismatchError`` where not one of the states in a checkpoint is one that this optimizer makes."""
    if saved is None or saved["class"] is not None:
        return
    for member in group.members:
        theirs = {state for handle in member.handles for state in infos.get(handle.name, {})}
        if theirs:
            mine = _made(group, member)
            if mine and not theirs & mine.keys():
                raise OptimizerMismatchError(
                    f"the checkpoint holds the optimizer states {', '.join(sorted(theirs))}; "
                    f"{group.source.kind} keeps {', '.join(sorted(mine))}: it is of another class"
                )
            return


def as_native_states(group: ParamGroup, member: GroupMember, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as tensors, where this optimizer keeps them so: others count their steps in Python."""
    if not any(type(value) in {int, float} for value in plain.values()):
        return dict(plain)
    made = _made(group, member)
    return {name: _like(value, made.get(name)) for name, value in plain.items()}


def _like(value: Any, probed: ProbedStates | None) -> Any:
    if type(value) not in {int, float} or probed is None or probed.shape:
        return value
    return torch.tensor(value, dtype=probed.dtype, device=probed.device)


def _made(group: ParamGroup, member: GroupMember) -> Mapping[str, ProbedStates | None]:
    """What the optimizer makes at its first step; nothing where that cannot be told."""
    if not isinstance(group.source, TorchOptimizer) or not isinstance(member.key, torch.Tensor):
        return {}
    try:
        return probe_states(group.source.optimizer, member.key)
    except OptimizerMismatchError:
        return {}
