"""Strategies of ``Fabric``: Lightning's own, but for what they do with checkpoints.

A state has models, optimizers and other things under the user's own keys, and is given back under them. Fabric has no
last word: with ``async_save``, :func:`holdfast.finalize` waits for the last save and tells what went wrong with it.
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

from holdfast.errors import InvalidArgumentError, MismatchError
from holdfast.formats.native import is_native
from holdfast.lightning.atomic_output import atomic_output
from holdfast.lightning.checkpoints import LightningCheckpoints
from holdfast.state.model.fsdp1 import wrapped_modules
from holdfast.storage.posix import local_path
from holdfast.view import open as open_checkpoint

#: By the key that the user gave it: tells of a name and a tensor whether it is saved.
Filter = dict[str, Callable[[str, Any], bool]]


@dataclass(frozen=True)
class _SplitState:
    """A state, by kind."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    rest: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _SplitState:
        models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        rest = {key: value for key, value in state.items() if key not in models.keys() | optimizers.keys()}
        return cls(models, optimizers, rest)


class _Strategy(Strategy):
    """What all strategies of ours have in common. Every rank is called for every save and load."""

    def __init__(self, *args: Any, checkpoint_format: str = "native", async_save: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves = LightningCheckpoints(checkpoint_format, async_save)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filter | None = None,  # noqa: A002
    ) -> None:
        """Save under a path, in one atomic step, over what is there."""
        if storage_options is not None:
            raise InvalidArgumentError("holdfast's strategies take no storage_options")
        path = local_path(self.broadcast(path))
        if not self._saves.native:
            with atomic_output(path) as draft:
                super().save_checkpoint(draft, state, filter=filter)
            return
        found = _SplitState.of(state)
        chosen = filter or {}
        if found.optimizers and chosen.keys() & found.models.keys():
            raise InvalidArgumentError("a filtered model is saved without optimizers, which need all of it")
        models = {key: _filtered(model, chosen[key]) if key in chosen else model for key, model in found.models.items()}
        rest = {key: _plain(value, chosen.get(key)) for key, value in found.rest.items()}
        keys = {"models": list(models), "optimizers": list(found.optimizers)}
        content = {"keys": keys, "state": rest}
        self._saves.save(path, _single_state(models), _single_state(found.optimizers), content, None)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Fill a state in place; returns what else is in the checkpoint."""
        path = local_path(self.broadcast(path)).resolve()
        del weights_only  # no code in it is run, ever
        self._saves.finish()
        if isinstance(state, nn.Module | Optimizer):
            model, optimizer = (state, None) if isinstance(state, nn.Module) else (None, state)
            self._saves.restore(path, model, optimizer, strict=strict)
            return {}
        given = _SplitState.of(state or {})
        keys, rest = _contents(path, given)
        _check(given, keys, rest, path, strict=strict)
        self._saves.restore(
            path,
            _restore_structure(given.models, keys["models"]),
            _restore_structure(given.optimizers, keys["optimizers"]),
            strict=strict,
        )
        for key in given.rest.keys() & rest.keys():
            value = given.rest[key]
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(key))
            elif state is not None and not isinstance(state, nn.Module | Optimizer):
                state[key] = rest.pop(key)
        return rest


def _single_state(found: Mapping[str, Any]) -> Any:
    """One object as itself, several by their keys."""
    return next(iter(found.values())) if len(found) == 1 else dict(found) or None


def _restore_structure(given: Mapping[str, Any], saved: list[str]) -> Any:
    """What is given of what was saved, passed as it was then."""
    found = {key: value for key, value in given.items() if key in saved}
    return _single_state(found) if len(saved) == 1 else found or None


def _contents(path: Path, given: _SplitState) -> tuple[Mapping[str, list[str]], dict[str, Any]]:
    """The keys of models and optimizers, and all else. What Lightning wrote is taken by the keys that are asked for."""
    content = open_checkpoint(path).values.get("user_content") or {}
    if is_native(path):
        return content["keys"], dict(content["state"])
    return {"models": list(given.models), "optimizers": list(given.optimizers)}, dict(content)


def _check(
    given: _SplitState, keys: Mapping[str, list[str]], rest: Mapping[str, Any], path: Path, *, strict: bool
) -> None:
    asked = {*given.models, *given.optimizers, *given.rest}
    there = {*keys["models"], *keys["optimizers"], *rest}
    missing = sorted(asked - there)
    if strict and missing:
        raise MismatchError(f"{path} has no {missing[0]!r}; it has {', '.join(sorted(there))}")


def _filtered(model: nn.Module, chosen: Callable[[str, Any], bool]) -> dict[str, Any]:
    if wrapped_modules(model):
        raise InvalidArgumentError("a filter needs the state dict, which FSDP1 would gather; save all of the model")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value for name, value in inner.state_dict().items() if chosen(name, value)}


def _plain(value: Any, chosen: Callable[[str, Any], bool] | None) -> Any:
    found = value.state_dict() if hasattr(value, "state_dict") else value
    if chosen is None or not isinstance(found, Mapping):
        return found
    return {name: one for name, one in found.items() if chosen(name, one)}


class SingleDeviceStrategy(_Strategy, LightningSingleDevice):
    """Lightning's, with holdfast's checkpoints."""


class DDPStrategy(_Strategy, LightningDDP):
    """Lightning's, with holdfast's checkpoints: all ranks write."""


class FSDPStrategy(_Strategy, LightningFSDP):
    """Lightning's (FSDP1), with holdfast's checkpoints. On a machine without accelerators it runs on the CPU."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """See Lightning's; FSDP1 must be told of the CPU."""
        if self.root_device.type == "cpu" and not wrapped_modules(module):
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


class ModelParallelStrategy(_Strategy, LightningModelParallel):
    """Lightning's (FSDP2, tensor parallelism, both), with holdfast's checkpoints."""
