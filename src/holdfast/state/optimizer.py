"""An optimizer's state by parameter name, read and put back at its own dtypes, without a step and without a cast.

``torch.optim.Optimizer.load_state_dict`` casts float32 moments of bfloat16 parameters down, and torch's
``get_optimizer_state_dict`` steps an optimizer that never stepped; neither is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import torch
from torch.optim import Optimizer

from holdfast.errors import InvalidArgumentError, OptimizerMismatchError, StateError
from holdfast.layout.files import TensorInfo
from holdfast.state.tensors import DTYPES


def key(fqn: str, state: str) -> str:
    """A state tensor's name in a checkpoint: the FQN, a slash, the state's name with ``%`` and ``/`` escaped."""
    return f"{fqn}/{state.replace('%', '%25').replace('/', '%2F')}"


def split_key(name: str) -> tuple[str, str]:
    """The FQN and the state's name of a :func:`key`."""
    fqn, _, state = name.rpartition("/")
    return fqn, unquote(state)


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer as a checkpoint sees it: its parameters by name, in their groups."""

    optimizer: Optimizer
    names: list[list[str]]

    def parameters(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Every parameter with its name and its group."""
        for names, group in zip(self.names, self.optimizer.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                yield name, parameter, group

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state tensors, live, by :func:`key`. Nothing is made up for parameters that have no state."""
        return {key(name, state): value for name, state, value in self._states() if isinstance(value, torch.Tensor)}

    def values(self) -> dict[str, Any]:
        """All that is not a tensor of the state: the class, the groups and what they set, plain values of the state."""
        plain: dict[str, dict[str, Any]] = {}
        for name, state, value in self._states():
            if not isinstance(value, torch.Tensor):
                plain.setdefault(name, {})[state] = value
        return {
            "class": type(self.optimizer).__qualname__,
            "groups": [self._group(i) for i in range(len(self.names))],
            "state": plain,
        }

    def _group(self, number: int) -> dict[str, Any]:
        group = self.optimizer.param_groups[number]
        return {
            "params": self.names[number],
            **{name: value for name, value in group.items() if name not in {"params", "param_names"}},
        }

    def _states(self) -> Iterator[tuple[str, str, Any]]:
        foreign = [key for key in self.optimizer.state if not isinstance(key, torch.Tensor)]
        if foreign:
            raise StateError(
                f"the optimizer's state has the entry {foreign[0]!r}, which is of no parameter; pass it as user_content"
            )
        for name, parameter, _ in self.parameters():
            for state, value in self.optimizer.state.get(parameter, {}).items():
                yield name, str(state), value


def view(optimizer: object, name_of: Mapping[int, str] | None) -> OptimizerView:
    """Name an optimizer's parameters: by the model's names, else by those torch keeps in the groups, else by position.

    Raises ``StateError`` for a parameter that the model does not have.
    """
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__qualname__}")
    names: list[list[str]] = []
    counted = 0
    for number, group in enumerate(optimizer.param_groups):
        if name_of is None:
            names.append(list(group.get("param_names") or map(str, range(counted, counted + len(group["params"])))))
        else:
            names.append([_name(parameter, name_of, number, i) for i, parameter in enumerate(group["params"])])
        counted += len(group["params"])
    return OptimizerView(optimizer, names)


def _name(parameter: torch.Tensor, name_of: Mapping[int, str], group: int, number: int) -> str:
    name = name_of.get(id(parameter))
    if name is None:
        raise StateError(
            f"parameter {number} of the optimizer's group {group}, of shape {list(parameter.shape)}, is not one of the "
            "model's; make the optimizer after the model is wrapped, and pass the model that it trains"
        )
    return name


def differences(target: OptimizerView, saved: Mapping[str, Any]) -> list[str]:
    """Why saved :meth:`OptimizerView.values` do not go into an optimizer: another class, or other groups."""
    try:
        _check_groups(target, saved)
    except OptimizerMismatchError as error:
        return [str(error)]
    return []


class Restoration:
    """What loading will put into an optimizer: checked and allocated at once, applied when all bytes are there."""

    def __init__(self, target: OptimizerView, saved: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
        """``saved`` is what :meth:`OptimizerView.values` gave, ``infos`` the state tensors of the checkpoint."""
        self._target = target
        self._groups = _check_groups(target, saved)
        self.tensors: dict[str, torch.Tensor] = {}
        self._state = self._allocate(saved.get("state", {}), infos)

    def _allocate(
        self, plain: Mapping[str, Mapping[str, Any]], infos: Mapping[str, TensorInfo]
    ) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in plain.items()}
        parameters = {name: (parameter, group) for name, parameter, group in self._target.parameters()}
        unknown = sorted({split_key(name)[0] for name in infos} - parameters.keys())
        if unknown:
            raise OptimizerMismatchError(
                f"the checkpoint holds optimizer state of {_listed(unknown)}, which this optimizer does not train"
            )
        for name, info in infos.items():
            fqn, state = split_key(name)
            parameter, group = parameters[fqn]
            existing = self._target.optimizer.state.get(parameter, {}).get(state)
            self.tensors[name] = _home(existing, parameter, group, info, name)
            states.setdefault(fqn, {})[state] = self.tensors[name]
        return states

    def apply(self) -> None:
        """Put groups and state into the optimizer."""
        for group, saved in zip(self._target.optimizer.param_groups, self._groups, strict=True):
            for name, value in saved.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(torch.as_tensor(value))
                else:
                    group[name] = value
        for name, parameter, _ in self._target.parameters():
            if name in self._state:
                self._target.optimizer.state[parameter] = self._state[name]
            else:
                self._target.optimizer.state.pop(parameter, None)


def _home(
    existing: object, parameter: torch.Tensor, group: Mapping[str, Any], info: TensorInfo, name: str
) -> torch.Tensor:
    """The tensor that a state is read into: the one that is there if it fits, else a new one."""
    dtype = DTYPES[info.dtype]
    if isinstance(existing, torch.Tensor) and tuple(existing.shape) == info.shape and existing.dtype == dtype:
        return existing
    if info.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if info.shape == ():
        on_device = bool(group.get("fused") or group.get("capturable"))
        return torch.empty((), dtype=dtype, device=parameter.device if on_device else "cpu")
    raise OptimizerMismatchError(
        f"optimizer state {name!r} has shape {list(info.shape)}, its parameter {list(parameter.shape)}: "
        "how it is laid out cannot be told before the optimizer's first step"
    )


def _check_groups(target: OptimizerView, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = type(target.optimizer).__qualname__
    if saved["class"] != own:
        raise OptimizerMismatchError(f"the checkpoint holds the state of {saved['class']}, the optimizer is {own}")
    groups = saved["groups"]
    if len(groups) != len(target.names):
        raise OptimizerMismatchError(
            f"the checkpoint has {len(groups)} parameter group(s), the optimizer {len(target.names)}"
        )
    for number, (group, names) in enumerate(zip(groups, target.names, strict=True)):
        missing, extra = sorted(set(names) - set(group["params"])), sorted(set(group["params"]) - set(names))
        if missing or extra:
            parts = [f"only the optimizer has {_listed(missing)}"] * bool(missing) + [
                f"only the checkpoint has {_listed(extra)}"
            ] * bool(extra)
            raise OptimizerMismatchError(
                f"parameter group {number} holds other parameters than in the checkpoint: {'; '.join(parts)}"
            )
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")  # noqa: PLR2004
