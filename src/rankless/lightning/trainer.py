"""Strategies of the ``Trainer``: Lightning's own, with rankless's checkpoints.

Lightning calls them on every rank, in the thread of the caller; it calls ``remove_checkpoint`` on every rank, and rank
0 removes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import strategies
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from rankless.errors import InvalidArgumentError
from rankless.lightning.atomic_output import atomic_output
from rankless.lightning.checkpoint_dict import ResumedCheckpoint
from rankless.lightning.checkpoints import LightningCheckpoints
from rankless.lightning.dumped_state import DumpedState
from rankless.lightning.hook_overrides import ON_LOAD, ON_SAVE, NotRead, is_hook_overridden
from rankless.lightning.load_state import load_model, load_optimizers
from rankless.lightning.removal import remove_checkpoint as remove
from rankless.state.model.fsdp1 import uses_fsdp1
from rankless.storage.location import RUN_PREFIX

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class _TrainerStrategy(Strategy):
    """Common base of rankless's Trainer strategies. Every rank is called for every save and load."""

    def __init__(
        self,
        *args: Any,
        checkpoint_format: str = "native",
        async_save: bool = False,
        frozen: str = "together",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoints = LightningCheckpoints(checkpoint_format, async_save, frozen)
        self._dumped = DumpedState()
        self._checkpoint: ResumedCheckpoint | None = None

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Always true: Lightning calls :meth:`load_optimizer_state_dict`, as for the model."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does. Raises ``InvalidArgumentError`` if a callback has an unsuitable folder."""
        if trainer.state.fn == TrainerFn.FITTING:
            for callback in trainer.checkpoint_callbacks:
                self._check_folder(str(getattr(callback, "dirpath", None) or "."))
        super().setup(trainer)

    def _check_folder(self, folder: str) -> None:
        self._checkpoints.locate(folder)
        if "://" in folder and not folder.startswith(RUN_PREFIX):
            raise InvalidArgumentError(
                f"Lightning's callback does not find checkpoints of rankless in {folder}: use "
                "rankless.lightning.ModelCheckpoint"
            )

    def lightning_module_state_dict(self) -> Any:
        """Return the model's state dict. For a native checkpoint tensors are not copied or gathered, sharded or not.

        FSDP1 has no such state dict; Lightning's is created if a hook gets it.
        """
        if not self._checkpoints.writes_native:
            return super().lightning_module_state_dict()
        self._dumped = DumpedState()  # a dump begins with this call
        if self.model is not None and uses_fsdp1(self.model):
            return self._dumped.record_model(
                super().lightning_module_state_dict() if self._calls_hook(ON_SAVE) else NotRead()
            )
        return self._dumped.record_model(Strategy.lightning_module_state_dict(self))

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """Return the optimizer's state dict.

        A native checkpoint stores the optimizer itself, so its state dict is only created if a hook gets it.
        """
        if not self._checkpoints.writes_native:
            return super().optimizer_state(optimizer)
        return self._dumped.record_optimizer(
            super().optimizer_state(optimizer) if self._calls_hook(ON_SAVE) else NotRead()
        )

    def _calls_hook(self, hook: str) -> bool:
        return is_hook_overridden(hook, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save under a path atomically, in place of an old file: the model's state dict as hooks have left it."""
        if storage_options is not None:
            raise InvalidArgumentError("rankless's strategies take no storage_options")
        path = self._checkpoints.locate(self.broadcast(filepath))
        if not self._checkpoints.writes_native:
            with atomic_output(path, self._checkpoints.replaceable_at(path)) as output:
                super().save_checkpoint(checkpoint, output)
            return
        dumped, self._dumped = self._dumped, DumpedState()
        components = dumped.collect_components(checkpoint, self.model, self.optimizers)
        self._checkpoints.save(
            path,
            components.model,
            components.optimizer,
            components.content,
            step=checkpoint.get("global_step"),
            metrics=self._logged_metrics(),
        )

    def _logged_metrics(self) -> dict[str, torch.Tensor]:
        """Return the values that the module has logged for callbacks, such as the one for ``ModelCheckpoint``."""
        module = self.lightning_module
        logged = {} if module is None or module._trainer is None else module.trainer.callback_metrics  # noqa: SLF001
        return {name: value for name, value in logged.items() if value.numel() == 1 and not value.is_complex()}

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint for Lightning and its hooks. Read the model and the optimizers only if a hook gets them.

        It may be rankless's or Lightning's own, a folder or a file, from any strategy. Code in it is never run.
        """
        del weights_only
        path = self._checkpoints.locate(self.broadcast(checkpoint_path)).resolve()
        self._checkpoint = self._checkpoints.open_checkpoint(path, checkpoint_path)
        read = self._calls_hook(ON_LOAD) or self._loads_by_module
        return self._checkpoint.to_dict(self.lightning_module, read=read)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the model with the state dict of :meth:`load_checkpoint`, as hooks have left it.

        If Lightning would call ``load_state_dict`` of the module, and the module overrides it, that method is called.
        """
        opened_checkpoint, model = self._require_opened()
        if self._loads_by_module:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            load_model(opened_checkpoint, checkpoint["state_dict"], model, strict=strict)

    @property
    def _loads_by_module(self) -> bool:
        """True if Lightning calls ``load_state_dict`` of the module, and the module overrides it."""
        return not self.restore_checkpoint_after_setup and _overrides_loading(self.lightning_module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers with the states of :meth:`load_checkpoint`, as hooks have left them."""
        opened_checkpoint, model = self._require_opened()
        load_optimizers(opened_checkpoint, checkpoint["optimizer_states"], self.optimizers, model)
        self._checkpoint = None

    def _require_opened(self) -> tuple[ResumedCheckpoint, nn.Module]:
        """Return the open checkpoint and the model. Raises ``InvalidArgumentError`` if there is none."""
        if self._checkpoint is None or self.model is None:
            raise InvalidArgumentError("there is no checkpoint to load from: call load_checkpoint first")
        return self._checkpoint, self.model

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, once everything that was saved is durable.

        Lightning calls it on every rank; rank 0 removes, outside of votes.
        """
        path = self._checkpoints.locate(filepath)
        if self.is_global_zero:
            self._checkpoints.remove_when_durable(lambda: remove(path, self._checkpoints.replaceable_at(path)))

    def teardown(self) -> None:
        """Wait for the save in progress."""
        self._checkpoint = None
        try:
            self._checkpoints.finish_pending()
        finally:
            super().teardown()


def _overrides_loading(module: nn.Module | None) -> bool:
    """Return whether a module overrides ``load_state_dict``."""
    return getattr(getattr(module, "load_state_dict", None), "__func__", None) is not nn.Module.load_state_dict


class SingleDeviceStrategy(_TrainerStrategy, strategies.SingleDeviceStrategy):
    """Lightning's strategy, with rankless's checkpoints."""


class DDPStrategy(_TrainerStrategy, strategies.DDPStrategy):
    """Lightning's strategy, with rankless's checkpoints: all ranks write."""


class FSDPStrategy(_TrainerStrategy, strategies.FSDPStrategy):
    """Lightning's strategy (FSDP1), with rankless's checkpoints. Without accelerators it runs on the CPU."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Wrap the model as Lightning does, but pass the CPU to FSDP1, which needs an explicit device."""
        if self.root_device.type == "cpu" and not uses_fsdp1(model):
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


class ModelParallelStrategy(_TrainerStrategy, strategies.ModelParallelStrategy):
    """Lightning's strategy (FSDP2, tensor parallelism, or both), with rankless's checkpoints."""
