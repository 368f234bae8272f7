"""Strategies of ``Fabric``: Lightning's own, with rankless's checkpoints.

A state has models, optimizers and other objects under the user's own keys, and is restored under them. Fabric has no
teardown hook: with ``async_save``, call :func:`rankless.finalize`, which waits for the last save and raises its error.

Fabric calls them on every rank, in the thread of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy as LightningDDP
from lightning.fabric.strategies.fsdp import FSDPStrategy as LightningFSDP
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as LightningModelParallel
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as LightningSingleDevice
from lightning.fabric.strategies.strategy import Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rankless.engine.comm.collective_call import collective_call
from rankless.errors import InvalidArgumentError, MismatchError
from rankless.formats.native import is_native
from rankless.lightning.atomic_output import atomic_output
from rankless.lightning.checkpoints import LightningCheckpoints
from rankless.state.model.fsdp1 import uses_fsdp1
from rankless.view import Checkpoint
from rankless.view import open as open_checkpoint

#: Functions by the user's keys: each gets a name and a tensor, and returns whether the tensor is saved.
Filter = dict[str, Callable[[str, Any], bool]]


@dataclass(frozen=True)
class _SplitState:
    """A state, split by kind of object."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    others: dict[str, Any]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _SplitState:
        models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        others = {key: value for key, value in state.items() if key not in models.keys() | optimizers.keys()}
        return cls(models, optimizers, others)


class _FabricStrategy(Strategy):
    """Common base of rankless's Fabric strategies. Every rank is called for every save and load."""

    def __init__(
        self,
        *args: Any,
        checkpoint_format: str = "native",
        async_save: bool = False,
        frozen: str = "together",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoints = LightningCheckpoints(checkpoint_format, async_save, frozen, own_kind="fabric")

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filter | None = None,  # noqa: A002
    ) -> None:
        """Save under a path atomically. Replace the checkpoint there."""
        if storage_options is not None:
            raise InvalidArgumentError("rankless's strategies take no storage_options")
        path = self._checkpoints.locate(self.broadcast(path))
        if not self._checkpoints.writes_native:
            with atomic_output(path, self._checkpoints.replaceable_at(path)) as output:
                super().save_checkpoint(output, state, filter=filter)
            return
        split = _SplitState.from_state(state)
        filters = filter or {}
        if split.optimizers and filters.keys() & split.models.keys():
            raise InvalidArgumentError("a filtered model must be saved without optimizers, which need the whole model")
        models = {
            key: _filter_model(model, filters[key]) if key in filters else model for key, model in split.models.items()
        }
        others = {key: _filter_value(value, filters.get(key)) for key, value in split.others.items()}
        keys = {"models": list(models), "optimizers": list(split.optimizers)}
        content = {"keys": keys, "state": others}
        self._checkpoints.save(path, _single_state(models), _single_state(split.optimizers), content, step=None)

    @collective_call(None)
    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Fill a state in place; return all other entries of the checkpoint."""
        path = self._checkpoints.locate(self.broadcast(path)).resolve()
        del weights_only  # code in it is never run
        self._checkpoints.finish_pending()
        if isinstance(state, nn.Module | Optimizer):
            model, optimizer = (state, None) if isinstance(state, nn.Module) else (None, state)
            self._checkpoints.restore(path, model, optimizer, strict=strict)
            return {}
        split = _SplitState.from_state(state or {})
        opened = open_checkpoint(path)
        path = opened.path  # of a run directory the latest checkpoint
        keys, others = _read_contents(opened, split)
        _check_keys(split, keys, others, path, strict=strict)
        self._checkpoints.restore(
            path,
            _restore_structure(split.models, keys["models"]),
            _restore_structure(split.optimizers, keys["optimizers"]),
            strict=strict,
        )
        for key in split.others.keys() & others.keys():
            value = split.others[key]
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(others.pop(key))
            elif state is not None and not isinstance(state, nn.Module | Optimizer):
                state[key] = others.pop(key)
        return others


def _single_state(objects: Mapping[str, Any]) -> Any:
    """Return a single object as itself, several objects by their keys, and ``None`` for none."""
    return next(iter(objects.values())) if len(objects) == 1 else dict(objects) or None


def _restore_structure(given: Mapping[str, Any], saved: list[str]) -> Any:
    """Return the given objects that were saved, in the structure that they were saved in."""
    objects = {key: value for key, value in given.items() if key in saved}
    return _single_state(objects) if len(saved) == 1 else objects or None


def _read_contents(opened: Checkpoint, requested: _SplitState) -> tuple[Mapping[str, list[str]], dict[str, Any]]:
    """Return the keys of models and optimizers, and all other values.

    A checkpoint that Lightning wrote does not record these keys, so the requested ones are returned.
    """
    content = opened.values.get("user_content") or {}
    if is_native(opened.path):
        return content["keys"], dict(content["state"])
    return {"models": list(requested.models), "optimizers": list(requested.optimizers)}, dict(content)


def _check_keys(
    requested: _SplitState, keys: Mapping[str, list[str]], others: Mapping[str, Any], path: Path, *, strict: bool
) -> None:
    """Raise ``MismatchError`` if the checkpoint lacks a requested key."""
    requested_keys = {*requested.models, *requested.optimizers, *requested.others}
    saved_keys = {*keys["models"], *keys["optimizers"], *others}
    missing = sorted(requested_keys - saved_keys)
    if strict and missing:
        raise MismatchError(f"{path} has no {missing[0]!r}; it has {', '.join(sorted(saved_keys))}")


def _filter_model(model: nn.Module, is_saved: Callable[[str, Any], bool]) -> dict[str, Any]:
    if uses_fsdp1(model):
        raise InvalidArgumentError("a filter needs the state dict, which FSDP1 would gather: save the whole model")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value for name, value in inner.state_dict().items() if is_saved(name, value)}


def _filter_value(value: Any, is_saved: Callable[[str, Any], bool] | None) -> Any:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    if is_saved is None or not isinstance(state, Mapping):
        return state
    return {name: entry for name, entry in state.items() if is_saved(name, entry)}


class SingleDeviceStrategy(_FabricStrategy, LightningSingleDevice):
    """Lightning's strategy, with rankless's checkpoints."""


class DDPStrategy(_FabricStrategy, LightningDDP):
    """Lightning's strategy, with rankless's checkpoints: all ranks write."""


class FSDPStrategy(_FabricStrategy, LightningFSDP):
    """Lightning's strategy (FSDP1), with rankless's checkpoints. Without accelerators it runs on the CPU."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap the module as Lightning does, but pass the CPU to FSDP1, which needs an explicit device."""
        if self.root_device.type == "cpu" and not uses_fsdp1(module):
            module = FullyShardedDataParallel(
                module,
                cpu_offload=self.cpu_offload,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=torch.device("cpu"),
                **self._fsdp_kwargs,
            )
            self._fsdp_kwargs.pop("auto_wrap_policy", None)
        return super().setup_module(module)


class ModelParallelStrategy(_FabricStrategy, LightningModelParallel):
    """Lightning's strategy (FSDP2, tensor parallelism, or both), with rankless's checkpoints."""
