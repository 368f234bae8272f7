"""Strategies of the ``Trainer``: Lightning's own, but for what they do with checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import strategies
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from holdfast.errors import InvalidArgumentError
from holdfast.lightning.published import published
from holdfast.lightning.removal import remove
from holdfast.lightning.saves import Saves
from holdfast.state.fsdp1 import wrapped
from holdfast.view import open as open_checkpoint

#: What Lightning puts into a checkpoint's dict, and a native checkpoint has elsewhere.
_OF_ITS_OWN = ("state_dict", "optimizer_states")


class _Strategy(Strategy):
    """What all strategies of ours have in common. Every rank is called for every save and load."""

    def __init__(self, *args: Any, checkpoint_format: str = "native", async_save: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves = Saves(checkpoint_format, async_save)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The model is laid out, and its optimizers are there, before they are filled."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Not Lightning puts optimizer states back: :meth:`load_checkpoint` has."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing for a native checkpoint, which takes the model as it is."""
        return {} if self._saves.native else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing for a native checkpoint, which takes the optimizer as it is."""
        return {} if self._saves.native else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save under a path, in one atomic step, over what is there."""
        if storage_options is not None:
            raise InvalidArgumentError("holdfast's strategies take no storage_options")
        path = Path(self.broadcast(filepath)).absolute()
        if not self._saves.native:
            with published(path) as draft:
                super().save_checkpoint(checkpoint, draft)
            return
        content = {name: value for name, value in checkpoint.items() if name not in _OF_ITS_OWN}
        optimizers = list(self.optimizers) if "optimizer_states" in checkpoint else None
        self._saves.save(path, self.model, optimizers or None, content, checkpoint.get("global_step"))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the model, and for training the optimizers; returns what else is in the checkpoint.

        It may be ours or Lightning's own, a folder or a file, whatever strategy wrote it. No code in it is run.
        """
        del weights_only
        path = Path(self.broadcast(checkpoint_path)).absolute().resolve()
        module = self.lightning_module
        if module is None:
            raise InvalidArgumentError("the strategy has no model yet; load through the Trainer")
        trains = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = list(self.optimizers) if trains else []
        self._saves.restore(path, self.model, optimizers or None, strict=module.strict_loading)
        return _content(path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: :meth:`load_checkpoint` has filled the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do: :meth:`load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, once all that was saved is durable."""
        if self.is_global_zero:
            self._saves.remove(lambda: remove(Path(filepath).absolute()))

    def teardown(self) -> None:
        """Wait for what is being saved."""
        try:
            self._saves.finish()
        finally:
            super().teardown()


def _content(path: Path) -> dict[str, Any]:
    """What Lightning asks of a checkpoint beside model and optimizers: its own, and that of schedulers."""
    values = open_checkpoint(path).values
    content = dict(values.get("user_content") or {})
    if "scheduler" in values:
        found = values["scheduler"]
        content["lr_schedulers"] = [one["state"] for one in (found if isinstance(found, list) else [found])]
    return content


class SingleDeviceStrategy(_Strategy, strategies.SingleDeviceStrategy):
    """Lightning's, with holdfast's checkpoints."""


class DDPStrategy(_Strategy, strategies.DDPStrategy):
    """Lightning's, with holdfast's checkpoints: all ranks write."""


class FSDPStrategy(_Strategy, strategies.FSDPStrategy):
    """Lightning's (FSDP1), with holdfast's checkpoints. On a machine without accelerators it runs on the CPU."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """See Lightning's; FSDP1 must be told of the CPU."""
        if self.root_device.type == "cpu" and not wrapped(model):
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
