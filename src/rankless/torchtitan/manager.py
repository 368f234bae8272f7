"""The checkpoint manager: when it saves, where a run starts, and the options of torchtitan that decide both.

torchtitan calls it on every rank, in the thread of the training. All ranks must load the same checkpoint: rank 0 looks
for it. The names and arguments of methods are those that torchtitan calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, OPTIMIZER, ModelWrapper
from torchtitan.config import TORCH_DTYPE_MAP

from rankless.api import finalize, restore, save_checkpoint
from rankless.components.component_calls import load_component, replace_with_model
from rankless.components.component_view import ComponentView
from rankless.dcp.reader.dcp_directory import is_dcp
from rankless.dcp.storage_reader import FileSystemReader
from rankless.engine.comm.call_check import CallDescription, vote_same_call
from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import InvalidArgumentError, TagExistsError
from rankless.observe.warning import warn_caller
from rankless.ondisk.validation import check_choice, check_timeout
from rankless.options import STAGING
from rankless.run.records_folder import keep_records_beside
from rankless.save.deferred_errors import DeferredErrors
from rankless.save.handle import SaveHandle
from rankless.state.training import TrainingObjects
from rankless.storage.location import parse_location
from rankless.storage.store import store_of
from rankless.torchtitan.data_loader import DataLoaderStates
from rankless.torchtitan.step_folders import RunFolder, StartPoint, check_replaceable, remove_replaceable, tag_of

#: The states of a checkpoint of torchtitan that rankless reads as its own components.
_TENSOR_STATES = (OPTIMIZER, LR_SCHEDULER)

#: The step of a checkpoint that has only the initial parameters.
_SEED_STEP = 0

#: The most names in a message.
_SHOWN = 20

#: rankless's names of torchtitan's states. All others are ``stateful`` objects under their own names.
_COMPONENTS = {OPTIMIZER: "optimizer", LR_SCHEDULER: "scheduler", DATALOADER: "dataloader"}


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # the package has no types
    """A checkpoint manager of torchtitan that saves and loads with rankless.

    torchtitan creates it from its configuration. The arguments of the constructor are those that it passes.

    Raises:
        InvalidArgumentError: ``staging`` or ``export_dtype`` is unknown; ``timeout`` is not above 0;
            ``exclude_from_loading`` names a state that does not exist; a Hugging Face option is set and there is no
            ``sd_adapter``; or the folder is the URL of an unknown store.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's managers, and some of rankless."""

        async_save: bool = True
        """Whether to write in the background. torchtitan's last save always waits."""

        staging: str = "eager"
        """How asynchronous saves copy tensors: see rankless.save_checkpoint."""

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
        check_choice("export_dtype", config.export_dtype, [*TORCH_DTYPE_MAP])
        check_timeout(config.timeout)
        folder = parse_location(config.folder)
        self.folder = folder if store_of(folder).is_remote else parse_location(base_folder or ".") / config.folder
        self.model_parts = model_parts
        self._ranks = RankGroup()
        loader = None if dataloader is None else DataLoaderStates(dataloader, self._ranks.rank, self._ranks.size)
        given = {**states, OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, DATALOADER: loader}
        self.states = {name: state for name, state in given.items() if state is not None}
        if unknown := set(config.exclude_from_loading) - set(given):
            raise InvalidArgumentError(f"exclude_from_loading names {sorted(unknown)}; the states are {sorted(given)}")
        if sd_adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise InvalidArgumentError(
                "last_save_in_hf and initial_load_in_hf need a model with a sd_adapter; this model has none"
            )

    def _load(self, step: int = -1) -> bool:
        """Load a checkpoint of the run, otherwise the initial one. Return whether there was one."""
        start = self._find_start(step)
        if start is None:
            return self._load_initial()
        model_only = start.step == _SEED_STEP
        path, tag = (self.folder / tag_of(start.step), None) if start.is_dcp else (self.folder, start.tag)
        self._restore(path, tag, model_only=model_only, cast_dtype=model_only)  # a seed has the dtype of the export
        return True

    def _find_start(self, step: int) -> StartPoint | None:
        """Return the checkpoint of the run to load: rank 0 looks, so that all ranks load the same one."""

        def find() -> bytes:
            folder = RunFolder.scan(self.folder)
            start = folder.find_start(step)
            if not self.config.load_only:
                folder.check_free(-1 if start is None else start.step)
            return msgspec.msgpack.encode(start)

        raw = self._on_rank_0("finding the checkpoint", {"the path": str(self.folder), "the step": str(step)}, find)
        return msgspec.msgpack.decode(raw, type=StartPoint | None)

    def _on_rank_0(self, phase: str, arguments: dict[str, str], decide: Callable[[], bytes]) -> bytes:
        """Call a function on rank 0. Return its result, or raise its error, on all ranks."""
        session = self._ranks.open_session(self.config.timeout)
        call = CallDescription("CheckpointManager", arguments)
        return vote_same_call(session, phase, lambda: call, lambda: b"", lambda _: decide())

    def _load_initial(self) -> bool:
        """Load the initial state of a new run. Dtypes are cast. Return whether there is such a checkpoint."""
        config, path = self.config, self.config.initial_load_path
        if config.initial_load_in_hf:
            self._load_hugging_face(path or self.sd_adapter.hf_assets_path)
        elif not path:
            return False
        elif config.initial_load_model_only:
            self._load_weights(self.model_parts, parse_location(path))
        else:
            self._restore(parse_location(path), None, model_only=False, cast_dtype=True)
        return True

    def _load_weights(self, target: Any, path: str | Path) -> None:
        """Load weights of any format. Those that the model does not have are ignored, with a warning."""
        training, view = TrainingObjects(target), ComponentView("model")
        ranks_and_timeout = None, self.config.timeout
        loaded = load_component(training, path, view, ranks_and_timeout, strict=True, ignores_unexpected=True)
        if loaded.unexpected and self._ranks.rank == 0:
            names = ", ".join(loaded.unexpected[:_SHOWN])
            more = f" and {len(loaded.unexpected) - _SHOWN} more" if len(loaded.unexpected) > _SHOWN else ""
            warn_caller(f"{path} has tensors that the model does not have, and that were not loaded: {names}{more}")

    def _restore(self, path: Path, tag: str | None, *, model_only: bool, cast_dtype: bool) -> None:
        """Load a checkpoint. One of torchtitan has the values of stateful objects as DCP stores them."""
        states = {} if model_only else self._states_to_load()
        in_dcp = {}
        if self._is_dcp(path):
            in_dcp = {name: states.pop(name) for name in [*states] if name not in _TENSOR_STATES}
        components = {"model": self.model_parts} | _name_components(states)
        restore(path, tag, **components, cast_dtype=cast_dtype, timeout=self.config.timeout)
        if in_dcp:
            dcp_load(in_dcp, storage_reader=FileSystemReader(path))

    def _is_dcp(self, path: Path) -> bool:
        """Return whether a checkpoint is one of torchtitan, as rank 0 sees it: all ranks must take the same way."""
        session = self._ranks.open_session(self.config.timeout)
        _, raw = session.vote(
            "finding the format", lambda: None, lambda _: b"", lambda _: b"dcp" if is_dcp(path) else b""
        )
        session.leave()
        return bool(raw)

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
            self._load_weights(weights, path)
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
        try:
            self.save_future = self._save_checkpoint(step, components, async_save)
        except TagExistsError:  # all ranks raise it
            if not self._remove_replaceable(step):
                raise
            self.save_future = self._save_checkpoint(step, components, async_save)

    def _save_checkpoint(self, step: int, components: dict[str, Any], async_save: bool) -> SaveHandle[Any]:
        if self._ranks.rank == COORDINATOR_RANK:
            keep_records_beside(self.folder)
        return save_checkpoint(
            self.folder,
            tag_of(step),
            **components,
            step=step,
            overwrite=True,  # after load_step, a run reaches steps again that it has saved
            keep=self.config.keep_latest_k or None,
            async_save=async_save,
            staging=self.config.staging,
            timeout=self.config.timeout,
        )

    def _remove_replaceable(self, step: int) -> bool:
        """Remove an empty folder or an export that has the name of a checkpoint. Return whether there was one."""
        folder = self.folder / tag_of(step)

        def remove() -> bytes:
            return b"removed" if remove_replaceable(folder) else b""

        return bool(self._on_rank_0("removing what the save replaces", {"the path": str(folder)}, remove))

    @torch.no_grad()
    def _save_model_only(self, step: int) -> None:
        """Save the model in the dtype of the export, as a checkpoint or as a folder of Hugging Face.

        Raises the error of an earlier save afterwards, so that the last state is not lost.
        """
        failures = DeferredErrors()
        failures.run(finalize)
        with failures.raised_after(f"step {step} is saved all the same"):
            self._save_weights(step)

    def _save_weights(self, step: int) -> None:
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        weights = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in ModelWrapper(self.model_parts).state_dict().items()
        }
        if self.config.last_save_in_hf and step != _SEED_STEP:  # a run starts from its seed only if that is no export
            self._export(step, self.sd_adapter.to_hf(weights))
        else:
            self._save_components(step, {"model": weights}, async_save=False)

    def _export(self, step: int, weights: dict[str, Any]) -> None:
        """Write a folder of Hugging Face in place of a checkpoint, or an earlier export, of the same step."""
        folder = self.folder / tag_of(step)

        def check() -> bytes:
            check_replaceable(folder)
            return b""

        self._on_rank_0("looking at what the export replaces", {"the path": str(folder)}, check)
        replace_with_model(weights, folder, timeout=self.config.timeout)

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
