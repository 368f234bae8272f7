"""torchtitan's checkpoint manager with holdfast's checkpoints: ``config.checkpoint = CheckpointManager.Config(...)``.

All options of torchtitan's own manager keep their meaning. A run resumes on any number of ranks, and from checkpoints
of torchtitan and of Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, OPTIMIZER, ModelWrapper

from holdfast.api import finalize, has_checkpoint, restore, save_checkpoint
from holdfast.components.api import load_model, save_model
from holdfast.dcp.reader import FileSystemReader
from holdfast.errors import InvalidArgumentError
from holdfast.formats.dcp.folder import is_dcp
from holdfast.ondisk.validation import check_choice
from holdfast.run.catalog import list_checkpoints
from holdfast.save.handle import SaveHandle
from holdfast.save.request import STAGING
from holdfast.storage.posix import local_path

#: torchtitan's name of a checkpoint.
_TAG = "step-{}"

#: The states of a checkpoint of torchtitan that holdfast reads as its own components.
_TENSOR_STATES = (OPTIMIZER, LR_SCHEDULER)

#: The step of a checkpoint that has only the initial parameters.
_SEED_STEP = 0

#: holdfast's names of torchtitan's states. All others are ``stateful`` objects under their own names.
_COMPONENTS = {OPTIMIZER: "optimizer", LR_SCHEDULER: "scheduler", DATALOADER: "dataloader"}


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # the package has no types
    """A checkpoint manager of torchtitan that saves and loads with holdfast.

    torchtitan creates it from its configuration. The arguments of the constructor are those that it passes.

    Raises:
        InvalidArgumentError: ``staging`` is unknown; ``exclude_from_loading`` names a state that does not exist; a
            Hugging Face option is set and there is no ``sd_adapter``; or the folder is on an object store.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's managers, and some of holdfast."""

        async_save: bool = True
        """Whether to write in the background. torchtitan's last save always waits."""

        staging: str = "eager"
        """How asynchronous saves copy tensors: see holdfast.save_checkpoint."""

        timeout: float = 600.0
        """How many seconds ranks wait for each other before all of them fail."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable, self.config, self.sd_adapter = config.enable, config, sd_adapter
        self.save_future: SaveHandle[Any] | None = None
        if not self.enable:
            return
        check_choice("staging", config.staging, STAGING)
        local_path(config.folder)  # refuses the address of an object store, which looks like a relative path below
        self.folder = local_path(base_folder or ".") / config.folder
        self.model_parts = model_parts
        given = {**states, OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader}
        self.states = {name: state for name, state in given.items() if state is not None}
        if unknown := set(config.exclude_from_loading) - set(given):
            raise InvalidArgumentError(f"exclude_from_loading names {sorted(unknown)}; the states are {sorted(given)}")
        if sd_adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise InvalidArgumentError(
                "last_save_in_hf and initial_load_in_hf need a model with a sd_adapter; this model has none"
            )

    def _load(self, step: int = -1) -> bool:
        """Load a checkpoint of the run, otherwise the initial one. Return whether there was one."""
        if step != -1 or has_checkpoint(self.folder):
            self._resume(step)
        elif self.config.initial_load_in_hf:
            self._load_hugging_face(self.config.initial_load_path or self.sd_adapter.hf_assets_path)
        elif self.config.initial_load_path is not None:
            self._start_from(local_path(self.config.initial_load_path))
        else:
            return False
        return True

    def _resume(self, step: int) -> None:
        tag = None if step == -1 else _TAG.format(step)
        latest = tag or list_checkpoints(self.folder)[-1].tag
        self._restore(self.folder, tag, model_only=latest == _TAG.format(_SEED_STEP))

    def _start_from(self, path: Path) -> None:
        """Load the initial checkpoint. One of torchtitan has the values of stateful objects as DCP stores them."""
        if self.config.initial_load_model_only or not is_dcp(path):
            self._restore(path, None, self.config.initial_load_model_only)
            return
        states = self._states_to_load()
        in_dcp = {name: states.pop(name) for name in [*states] if name not in _TENSOR_STATES}
        restore(path, model=self.model_parts, **_name_components(states), timeout=self.config.timeout)
        dcp_load(in_dcp, storage_reader=FileSystemReader(path))

    def _restore(self, path: Path, tag: str | None, model_only: bool) -> None:
        states = {} if model_only else _name_components(self._states_to_load())
        restore(path, tag, model=self.model_parts, **states, timeout=self.config.timeout)

    def _states_to_load(self) -> dict[str, Any]:
        excluded = self.config.exclude_from_loading
        return {name: state for name, state in self.states.items() if name not in excluded}

    @torch.no_grad()
    def _load_hugging_face(self, path: str | None) -> None:
        """Load weights with the names and the order of rows of Hugging Face, which the adapter translates."""
        if path is None:
            raise InvalidArgumentError("initial_load_in_hf needs initial_load_path or the model's hf_assets_path")
        wrapper = ModelWrapper(self.model_parts)
        weights = self.sd_adapter.to_hf(wrapper.state_dict())
        if self.config.initial_load_in_hf_quantized:  # torchtitan's reader knows how to dequantize each model's weights
            dcp_load(weights, storage_reader=self.sd_adapter.get_hf_storage_reader(path, from_quantized=True))
        else:
            load_model(weights, path, timeout=self.config.timeout)
        wrapper.load_state_dict(self.sd_adapter.from_hf(weights))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if a checkpoint is due. Return whether it was."""
        is_first = self.config.enable_first_step_checkpoint and curr_step == 1
        if self.config.load_only or not (is_first or last_step or curr_step % self.config.interval == 0):
            return False
        if last_step and self.config.last_save_model_only:
            self._save_model_only(curr_step)
        else:
            everything = {"model": self.model_parts} | _name_components(self.states)
            self._save_components(curr_step, everything, self.config.async_save and not last_step)
        return True

    def _save_components(self, step: int, components: dict[str, Any], async_save: bool) -> None:
        self.save_future = save_checkpoint(
            self.folder,
            _TAG.format(step),
            **components,
            step=step,
            overwrite=True,  # after load_step, a run reaches steps again that it has saved
            keep=self.config.keep_latest_k or None,
            async_save=async_save,
            staging=self.config.staging,
            timeout=self.config.timeout,
        )

    @torch.no_grad()
    def _save_model_only(self, step: int) -> None:
        """Save the model in the dtype of the export, as a checkpoint or as a folder of Hugging Face."""
        finalize()
        dtype = getattr(torch, self.config.export_dtype)
        weights = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in ModelWrapper(self.model_parts).state_dict().items()
        }
        if self.config.last_save_in_hf:
            path = self.folder / _TAG.format(step)
            save_model(self.sd_adapter.to_hf(weights), path, shard=True, timeout=self.config.timeout)
        else:
            self._save_components(step, {"model": weights}, async_save=False)

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save has its copy when it returns, or makes the optimizer's step wait for it."""

    def _wait_for_saving(self) -> None:
        handle, self.save_future = self.save_future, None
        if handle is not None:
            handle.wait()

    def _close(self) -> None:
        finalize()


def _name_components(states: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a save or load for states of torchtitan."""
    components = {_COMPONENTS[name]: state for name, state in states.items() if name in _COMPONENTS}
    stateful = {name: state for name, state in states.items() if name not in _COMPONENTS}
    return components | {"stateful": stateful or None}
