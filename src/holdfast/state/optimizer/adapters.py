"""Optimizers of all kinds, seen alike: groups of parameters with settings, and the states of each parameter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch.optim import Optimizer

from holdfast.errors import InvalidArgumentError, StateError
from holdfast.state.components import name_components

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

#: What a group lists: parameters, or in a state dict numbers or names of them.
Key = Any


class OptimizerAdapter(Protocol):
    """An optimizer, live or as a state dict."""

    @property
    def kind(self) -> str | None:
        """The name of its class, where it is known."""

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its parameter groups, live."""

    def owns(self, key: Key) -> bool:
        """Whether this rank keeps states of a parameter."""

    def states(self, key: Key) -> Mapping[str, Any]:
        """The states of a parameter, live; empty where there are none."""

    def put(self, key: Key, states: dict[str, Any] | None) -> None:
        """Replace the states of a parameter; ``None`` takes them away."""

    def settle(self) -> None:
        """Called after groups and states were replaced."""


class TorchOptimizer:
    """An optimizer of torch's kind."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        foreign = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        if foreign:
            raise StateError(
                f"the optimizer's state has the entry {foreign[0]!r}, which is of no parameter; pass it as user_content"
            )

    @property
    def kind(self) -> str | None:
        """See :class:`OptimizerAdapter`."""
        return type(self.optimizer).__qualname__

    @property
    def groups(self) -> list[dict[str, Any]]:
        """See :class:`OptimizerAdapter`."""
        return self.optimizer.param_groups

    def owns(self, key: Key) -> bool:
        """See :class:`OptimizerAdapter`."""
        del key
        return True

    def states(self, key: Key) -> Mapping[str, Any]:
        """See :class:`OptimizerAdapter`."""
        return self.optimizer.state.get(key, {})  # type: ignore[no-any-return]

    def put(self, key: Key, states: dict[str, Any] | None) -> None:
        """See :class:`OptimizerAdapter`."""
        if states is None:
            self.optimizer.state.pop(key, None)
        else:
            self.optimizer.state[key] = states

    def settle(self) -> None:
        """See :class:`OptimizerAdapter`."""


class ZeroOptimizer(TorchOptimizer):
    """A ``ZeroRedundancyOptimizer``: each rank keeps the states of some parameters, in an optimizer inside."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        inner = getattr(optimizer, "optim", None)
        if not isinstance(inner, Optimizer):
            raise StateError(
                "a ZeroRedundancyOptimizer with overlap_with_ddp=True is not supported: it keeps a functional "
                "optimizer, stepped inside the backward pass; make it with overlap_with_ddp=False"
            )
        super().__init__(inner)
        self._outer = optimizer
        self._own = {id(parameter) for group in inner.param_groups for parameter in group["params"]}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """See :class:`OptimizerAdapter`."""
        return self._outer.param_groups

    def owns(self, key: Key) -> bool:
        """See :class:`OptimizerAdapter`."""
        return id(key) in self._own

    def settle(self) -> None:
        """See :class:`OptimizerAdapter`."""
        for outer, inner in zip(self._outer.param_groups, self.optimizer.param_groups, strict=True):
            inner.update((name, value) for name, value in outer.items() if name != "params")


class StateDictOptimizer:
    """What ``Optimizer.state_dict()`` gives, or torch's ``get_optimizer_state_dict``: parameters by number or name."""

    kind = None

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    @property
    def groups(self) -> list[dict[str, Any]]:
        """See :class:`OptimizerAdapter`."""
        return self._given["param_groups"]  # type: ignore[no-any-return]

    def owns(self, key: Key) -> bool:
        """See :class:`OptimizerAdapter`."""
        del key
        return True

    def states(self, key: Key) -> Mapping[str, Any]:
        """See :class:`OptimizerAdapter`."""
        return self._given["state"].get(key, {})  # type: ignore[no-any-return]

    def put(self, key: Key, states: dict[str, Any] | None) -> None:
        """See :class:`OptimizerAdapter`."""
        if states is None:
            self._given["state"].pop(key, None)
        else:
            self._given["state"][key] = states

    def settle(self) -> None:
        """See :class:`OptimizerAdapter`."""


def optimizer_components(optimizer: object) -> dict[str, list[Any]]:
    """The optimizers passed, by slot; each a list of its parts."""
    return name_components("optimizer", optimizer, lambda given: "param_groups" in given)


def _is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Who has one has imported its module, which takes a while; nobody else need."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def adapt_optimizer(optimizer: object) -> OptimizerAdapter:
    """An optimizer, seen so. Raises ``InvalidArgumentError`` for what is none."""
    if _is_zero(optimizer):
        return ZeroOptimizer(optimizer)
    if isinstance(optimizer, Optimizer):
        return TorchOptimizer(optimizer)
    if isinstance(optimizer, dict) and {"state", "param_groups"} <= optimizer.keys():
        return StateDictOptimizer(optimizer)
    raise InvalidArgumentError(
        "optimizer must be a torch.optim.Optimizer or a state dict of one, or a list or dict of them, "
        f"not {type(optimizer).__qualname__}"
    )
