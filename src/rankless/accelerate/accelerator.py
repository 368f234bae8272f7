"""Accelerate's ``Accelerator`` with rankless's checkpoints: a drop-in replacement for ``accelerate.Accelerator``.

``save_state`` and ``load_state`` save and load all prepared and registered objects, on any number of ranks. Automatic
names and ``total_limit`` of ``ProjectConfiguration`` keep their meaning.

Accelerate's training script calls it on every rank, in the thread of the caller. The names of stateful objects are
stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType

from rankless.api import finalize, restore, save_checkpoint
from rankless.engine.comm.collective_call import collective_call
from rankless.errors import InvalidArgumentError, NoCheckpointError
from rankless.ondisk.validation import check_choice
from rankless.options import FROZEN
from rankless.run.catalog import list_checkpoints
from rankless.run.records_folder import keep_records_beside
from rankless.run.retention import KeepLast
from rankless.storage.location import parse_location
from rankless.storage.store import store_of

#: Accelerate's name of a checkpoint, and of the folder of checkpoints in the project.
_TAG, _FOLDER = "checkpoint_{}", "checkpoints"

#: Plugins with checkpoints of their own.
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # the package has no types
    """Accelerate's ``Accelerator`` with checkpoints of rankless in ``save_state`` and ``load_state``.

    Args:
        args: The positional arguments of ``accelerate.Accelerator``.
        async_save: Write checkpoints in the background. :meth:`end_training` waits for them.
        frozen: See :func:`rankless.save_checkpoint`.
        options: The keyword arguments of ``accelerate.Accelerator``.

    Raises:
        InvalidArgumentError: DeepSpeed or Megatron-LM is enabled, which have their own checkpoints.
    """

    def __init__(self, *args: Any, async_save: bool = False, frozen: str = "together", **options: Any) -> None:
        check_choice("frozen", frozen, FROZEN)
        super().__init__(*args, **options)
        if self.distributed_type in _REFUSED:
            raise InvalidArgumentError(
                f"{self.distributed_type.value} has its own checkpoints: use accelerate.Accelerator with it"
            )
        self._async_save, self._frozen = async_save, frozen

    @collective_call(None)
    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save the state of everything that was prepared or registered. Every rank must call it.

        Args:
            output_dir: The directory of the checkpoint, or its URL in an object store; one that exists is replaced.
                With automatic names it is left out, or ignored, as by Accelerate.
            safe_serialization: Ignored: tensors are always in safetensors files.
            options: None is accepted.

        Returns:
            The directory of the checkpoint. With ``async_save`` it exists when the save is committed.

        Raises:
            InvalidArgumentError: There are hooks for saving, which would expect whole state dicts, or ``output_dir`` is
                missing; and all other errors of :func:`rankless.save_checkpoint`.
        """
        del safe_serialization
        if options or self._save_model_state_pre_hook:
            what = f"the arguments {', '.join(options)}" if options else "register_save_state_pre_hook"
            raise InvalidArgumentError(f"save_state does not support {what}: use accelerate.Accelerator")
        configuration = self.project_configuration
        is_named = configuration.automatic_checkpoint_naming
        path = self._new_path(output_dir)
        if is_named and self.is_main_process:
            keep_records_beside(path.parent)  # Accelerate takes each name there for a checkpoint
        handle = save_checkpoint(
            path.parent,
            path.name,
            **self._components(),
            stateful=self._stateful_objects(),
            user_content={"accelerate": {"step": self.step, "iteration": configuration.iteration}},
            step=configuration.iteration if is_named else None,
            keep=KeepLast(configuration.total_limit) if is_named and configuration.total_limit else None,
            overwrite=not is_named,
            async_save=self._async_save,
            frozen=self._frozen,
        )
        configuration.iteration += 1
        return str(handle.path)

    @collective_call(None)
    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Load a checkpoint into everything that was prepared or registered. Every rank must call it.

        Args:
            input_dir: The directory or the URL of a checkpoint of any format. With automatic names the latest one by
                default; the next save then gets the name after it.
            load_kwargs: Ignored: it is for pickled files.
            options: Other arguments of :func:`rankless.restore`, such as ``strict`` and ``allow_missing``.

        Raises:
            InvalidArgumentError: There are hooks for loading, or ``input_dir`` is missing.
            NoCheckpointError: There is no checkpoint; and all other errors of :func:`rankless.restore`.
        """
        del load_kwargs
        if self._load_model_state_pre_hook:
            raise InvalidArgumentError(
                "load_state does not support register_load_state_pre_hook: use accelerate.Accelerator"
            )
        finalize()
        result = restore(
            self._existing_path(input_dir), **self._components(), stateful=self._stateful_objects(), **options
        )
        content = result.user_content if isinstance(result.user_content, Mapping) else {}
        if saved := content.get("accelerate"):
            self.step = saved["step"]
            if self.project_configuration.automatic_checkpoint_naming and "iteration" in saved:
                self.project_configuration.iteration = saved["iteration"] + 1

    def end_training(self) -> None:
        """Wait for background saves, then end the training as Accelerate does, also if one of them has failed."""
        try:
            finalize()
        finally:
            super().end_training()

    def _new_path(self, output_dir: str | None) -> Path:
        if self.project_configuration.automatic_checkpoint_naming:
            return self._project_folder() / _TAG.format(self.save_iteration)
        if output_dir is None:
            raise InvalidArgumentError("pass output_dir, or enable automatic_checkpoint_naming")
        return parse_location(output_dir)

    def _existing_path(self, input_dir: str | None) -> Path:
        if input_dir is not None:
            path = parse_location(input_dir)
            return path if store_of(path).is_remote else parse_location(Path(input_dir).expanduser())
        if not self.project_configuration.automatic_checkpoint_naming:
            raise InvalidArgumentError("pass input_dir, or enable automatic_checkpoint_naming")
        folder = self._project_folder()
        if not list_checkpoints(folder):
            raise NoCheckpointError(f"there is no checkpoint in {folder}")
        return folder

    def _project_folder(self) -> Path:
        if self.project_dir is None:
            raise InvalidArgumentError("automatic_checkpoint_naming needs project_dir=")
        return parse_location(self.project_dir) / _FOLDER

    def _components(self) -> dict[str, Any]:
        """Return the prepared objects. Data loaders with a state of their own are one component."""
        loaders = {
            f"{number}": loader
            for number, loader in enumerate(self._dataloaders)
            if getattr(loader, "use_stateful_dataloader", False)
        }
        return {
            "model": _one_or_named(self._models),
            "optimizer": _one_or_named(self._optimizers),
            "scheduler": _one_or_named(self._schedulers),
            "dataloader": _DataLoaders(loaders) if loaders else None,
        }

    def _stateful_objects(self) -> dict[str, Any] | None:
        """Return the objects that are equal on all ranks: registered objects, the scaler, samplers with a seed."""
        objects = {f"custom_{number}": custom for number, custom in enumerate(self._custom_objects)}
        if self.scaler is not None:
            objects["scaler"] = self.scaler
        for number, loader in enumerate(self._dataloaders):
            sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
            if isinstance(sampler, SeedableRandomSampler):
                objects[f"sampler_{number}"] = _SeededSampler(loader, sampler)
        return objects or None


def _one_or_named(objects: Sequence[Any]) -> Any:
    """Return the only object, several ones by their numbers, or ``None`` if there is none."""
    if not objects:
        return None
    return objects[0] if len(objects) == 1 else {f"{number}": given for number, given in enumerate(objects)}


class _SeededSampler:
    """The position of a sampler that all ranks share: its seed and its epoch.

    A data loader of Accelerate counts epochs, too, and sets the count of its sampler when an epoch begins. Accelerate
    itself does not save this count, so its resumed runs draw the samples of the first epochs again.
    """

    def __init__(self, loader: Any, sampler: SeedableRandomSampler) -> None:
        self._loader, self._sampler = loader, sampler

    def state_dict(self) -> dict[str, int]:
        epoch, seed = self._sampler.epoch, self._sampler.initial_seed
        return {"epoch": epoch, "initial_seed": seed, "iteration": self._loader.iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._sampler.epoch, self._sampler.initial_seed = state["epoch"], state["initial_seed"]
        self._loader.iteration = state["iteration"]


class _DataLoaders:
    """Several data loaders as one. Each rank has its own position in them."""

    def __init__(self, loaders: Mapping[str, Any]) -> None:
        self._loaders = loaders

    def state_dict(self) -> dict[str, Any]:
        return {name: loader.state_dict() for name, loader in self._loaders.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, loader in self._loaders.items():
            loader.load_state_dict(states[name])
