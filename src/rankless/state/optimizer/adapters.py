"""Adapters that give optimizers of all kinds one interface: parameter groups with settings, and states by parameter.

:mod:`rankless.state.optimizer.optimizer_view` makes the adapters on each rank, for captures and restores. Nothing is
changed before :meth:`OptimizerAdapter.set_states`, which a load calls when it puts values in place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch.optim import Optimizer

from rankless.errors import InvalidArgumentError, StateError
from rankless.state.components import name_components

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

#: The module of torch's ``ZeroRedundancyOptimizer``.
_ZERO_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"

#: The attributes of an optimizer with the hooks of its state dict.
HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

#: An entry of a group: a parameter or, in a state dict, its number or name.
Key = Any


class OptimizerAdapter(Protocol):
    """The interface of an optimizer, live or as a state dict."""

    @property
    def class_name(self) -> str | None:
        """The name of its class; ``None`` if unknown."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its parameter groups, live."""

    def owns_state(self, key: Key) -> bool:
        """Return whether this rank keeps the states of a parameter."""

    def get_states(self, key: Key) -> Mapping[str, Any]:
        """Return the states of a parameter, live; empty if it has none."""

    def set_states(self, key: Key, states: dict[str, Any] | None) -> None:
        """Replace the states of a parameter; ``None`` removes them."""

    def on_replaced(self) -> None:
        """Update the optimizer after groups and states were replaced."""


class TorchOptimizer:
    """An adapter of a ``torch.optim.Optimizer``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def class_name(self) -> str | None:
        """See :class:`OptimizerAdapter`."""
        return type(self.optimizer).__qualname__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """See :class:`OptimizerAdapter`."""
        return self.optimizer.param_groups

    def owns_state(self, key: Key) -> bool:
        """See :class:`OptimizerAdapter`."""
        del key
        return True

    def get_states(self, key: Key) -> Mapping[str, Any]:
        """See :class:`OptimizerAdapter`."""
        return getattr(self.optimizer, "state", {}).get(key, {})  # type: ignore[no-any-return]

    def set_states(self, key: Key, states: dict[str, Any] | None) -> None:
        """See :class:`OptimizerAdapter`."""
        if states is not None:
            self.optimizer.state[key] = states
        elif hasattr(self.optimizer, "state"):
            self.optimizer.state.pop(key, None)

    def on_replaced(self) -> None:
        """See :class:`OptimizerAdapter`."""


class ZeroOptimizer(TorchOptimizer):
    """An adapter of a ``ZeroRedundancyOptimizer``: each rank keeps some parameters' states, in an inner optimizer."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        inner = getattr(optimizer, "optim", None)
        if not isinstance(inner, Optimizer):
            raise StateError(
                "a ZeroRedundancyOptimizer with overlap_with_ddp=True is not supported: it keeps a functional "
                "optimizer, stepped inside the backward pass; create it with overlap_with_ddp=False"
            )
        super().__init__(inner)
        self.outer = optimizer
        self._owned_ids = {id(parameter) for group in inner.param_groups for parameter in group["params"]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """See :class:`OptimizerAdapter`."""
        return self.outer.param_groups

    def owns_state(self, key: Key) -> bool:
        """See :class:`OptimizerAdapter`."""
        return id(key) in self._owned_ids

    def explain_unread(self) -> str:
        """Return a clause about the values that the optimizer keeps besides the inner one; empty if there are none.

        Its ``state_dict()`` cannot give it in a save: it is of one rank, after a collective operation.
        """
        kind, base = type(self.outer), sys.modules[_ZERO_MODULE].ZeroRedundancyOptimizer
        if kind.state_dict is not base.state_dict or kind.load_state_dict is not base.load_state_dict:
            return "code of its own for its state dict"
        if any(getattr(self.outer, hooks, None) for hooks in HOOKS):
            return "hooks for its state dict"
        further = [key for key in self.outer.state if not isinstance(key, torch.Tensor)]
        return f"a state under {further[0]!r}, outside of the inner optimizer" if further else ""

    def on_replaced(self) -> None:
        """See :class:`OptimizerAdapter`."""
        for outer, inner in zip(self.outer.param_groups, self.optimizer.param_groups, strict=True):
            inner.update((name, value) for name, value in outer.items() if name != "params")


class StateDictOptimizer:
    """An adapter of a state dict, of an optimizer or of ``get_optimizer_state_dict``: parameters by number or name."""

    class_name = None

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """See :class:`OptimizerAdapter`."""
        return self.state_dict["param_groups"]  # type: ignore[no-any-return]

    def owns_state(self, key: Key) -> bool:
        """See :class:`OptimizerAdapter`."""
        del key
        return True

    def get_states(self, key: Key) -> Mapping[str, Any]:
        """See :class:`OptimizerAdapter`."""
        return self.state_dict["state"].get(key, {})  # type: ignore[no-any-return]

    def set_states(self, key: Key, states: dict[str, Any] | None) -> None:
        """See :class:`OptimizerAdapter`."""
        if states is None:
            self.state_dict["state"].pop(key, None)
        else:
            self.state_dict["state"][key] = states

    def on_replaced(self) -> None:
        """See :class:`OptimizerAdapter`."""


def optimizer_components(optimizer: object) -> dict[str, list[Any]]:
    """Return the optimizers passed, by slot. Each is a list of its parts."""
    return name_components("optimizer", optimizer, lambda given: "param_groups" in given)


def _is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Return whether an optimizer is a ``ZeroRedundancyOptimizer``, without the slow import of its module."""
    module = sys.modules.get(_ZERO_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _wraps_optimizer(candidate: object) -> TypeGuard[Optimizer]:
    """Return whether an object is used as an optimizer without being one, such as schedulefree's wrapper."""
    names = "param_groups", "state", "state_dict", "load_state_dict", "step"
    return not isinstance(candidate, type | dict) and all(hasattr(candidate, name) for name in names)


def adapt_optimizer(optimizer: object) -> OptimizerAdapter:
    """Return an adapter of an optimizer. Raises ``InvalidArgumentError`` for other objects."""
    if _is_zero(optimizer):
        return ZeroOptimizer(optimizer)
    if isinstance(optimizer, Optimizer) or _wraps_optimizer(optimizer):
        return TorchOptimizer(optimizer)
    if isinstance(optimizer, dict) and {"state", "param_groups"} <= optimizer.keys():
        return StateDictOptimizer(optimizer)
    raise InvalidArgumentError(
        "optimizer must be a torch.optim.Optimizer or a state dict of one, or a list or dict of them; "
        f"got {type(optimizer).__qualname__}"
    )
