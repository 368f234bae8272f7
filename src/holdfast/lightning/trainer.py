"""Strategies of the ``Trainer``: Lightning's own, but for what they do with checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import strategies
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from holdfast.errors import InvalidArgumentError
from holdfast.lightning.atomic_output import atomic_output
from holdfast.lightning.checkpoint_dict import ResumedCheckpoint
from holdfast.lightning.checkpoints import LightningCheckpoints
from holdfast.lightning.dumped_state import DumpedState
from holdfast.lightning.lazy_state import LazyStateDict
from holdfast.lightning.load_state import load_model, load_optimizers
from holdfast.lightning.removal import remove_checkpoint as remove
from holdfast.state.model.fsdp1 import wrapped_modules
from holdfast.storage.posix import local_path

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class _Strategy(Strategy):
    """What all strategies of ours have in common. Every rank is called for every save and load."""

    def __init__(self, *args: Any, checkpoint_format: str = "native", async_save: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves = LightningCheckpoints(checkpoint_format, async_save)
        self._dumped = DumpedState()
        self._opened: ResumedCheckpoint | None = None

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning asks for the optimizers to be filled, as it asks for the model."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """See Lightning's. Raises ``InvalidArgumentError`` for an address of an object store before any training."""
        if trainer.state.fn == TrainerFn.FITTING:
            for callback in trainer.checkpoint_callbacks:
                local_path(getattr(callback, "dirpath", None) or "")
        super().setup(trainer)

    def lightning_module_state_dict(self) -> Any:
        """For a native checkpoint the model's tensors as they are, sharded or not: nothing is copied or gathered.

        FSDP1 has no such state dict; what Lightning makes of it is made where a hook looks into it.
        """
        if not self._saves.native:
            return super().lightning_module_state_dict()
        self._dumped = DumpedState()  # a dump begins with it
        if self.model is not None and wrapped_modules(self.model):
            return self._dumped.model(LazyStateDict(super().lightning_module_state_dict))
        return self._dumped.model(Strategy.lightning_module_state_dict(self))

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """For a native checkpoint, which takes the optimizer as it is, made where a hook looks into it."""
        if not self._saves.native:
            return super().optimizer_state(optimizer)
        return self._dumped.optimizer(LazyStateDict(partial(super().optimizer_state, optimizer)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save under a path, in one atomic step, over what is there: the model's state dict as hooks have left it."""
        if storage_options is not None:
            raise InvalidArgumentError("holdfast's strategies take no storage_options")
        path = local_path(self.broadcast(filepath))
        if not self._saves.native:
            with atomic_output(path) as draft:
                super().save_checkpoint(checkpoint, draft)
            return
        dumped, self._dumped = self._dumped, DumpedState()
        parts = dumped.parts(checkpoint, self.model, self.optimizers)
        self._saves.save(path, parts.model, parts.optimizer, parts.content, checkpoint.get("global_step"))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint for Lightning and its hooks. The model and the optimizers in it are not read yet.

        It may be ours or Lightning's own, a folder or a file, whatever strategy wrote it. No code in it is run.
        """
        del weights_only
        path = local_path(self.broadcast(checkpoint_path)).resolve()
        self._opened = self._saves.open(path)
        return self._opened.contents()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the model with the state dict of :meth:`load_checkpoint`, as hooks have left it.

        Where Lightning calls ``load_state_dict`` of the module, and the module has one of its own, that does it.
        """
        opened, model = self._loading()
        if not self.restore_checkpoint_after_setup and _has_own_loading(self.lightning_module):
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            load_model(opened, checkpoint["state_dict"], model, strict=strict)
        self._opened = opened.afresh()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers, likewise."""
        opened, model = self._loading()
        load_optimizers(opened, checkpoint["optimizer_states"], self.optimizers, model)
        self._opened = None

    def _loading(self) -> tuple[ResumedCheckpoint, nn.Module]:
        if self._opened is None or self.model is None:
            raise InvalidArgumentError("there is no checkpoint to load from: call load_checkpoint first")
        return self._opened, self.model

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, once all that was saved is durable."""
        path = local_path(filepath)
        if self.is_global_zero:
            self._saves.remove(lambda: remove(path))

    def teardown(self) -> None:
        """Wait for what is being saved."""
        self._opened = None
        try:
            self._saves.finish()
        finally:
            super().teardown()


def _has_own_loading(module: nn.Module | None) -> bool:
    return getattr(getattr(module, "load_state_dict", None), "__func__", None) is not nn.Module.load_state_dict


class SingleDeviceStrategy(_Strategy, strategies.SingleDeviceStrategy):
    """Lightning's, with holdfast's checkpoints."""


class DDPStrategy(_Strategy, strategies.DDPStrategy):
    """Lightning's, with holdfast's checkpoints: all ranks write."""


class FSDPStrategy(_Strategy, strategies.FSDPStrategy):
    """Lightning's (FSDP1), with holdfast's checkpoints. On a machine without accelerators it runs on the CPU."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """See Lightning's; FSDP1 must be told of the CPU."""
        if self.root_device.type == "cpu" and not wrapped_modules(model):
            model = FullyShardedDataParallel(
                model,
                cpu_offload=self.cpu_offload,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=torch.device("cpu"),
                **self.kwargs,
            )
            self.kwargs.pop("auto_wrap_policy", None)
        return super()._setup_model(model)


class ModelParallelStrategy(_Strategy, strategies.ModelParallelStrategy):
    """Lightning's (FSDP2, tensor parallelism, both), with holdfast's checkpoints."""
