"""``Booster`` with the signatures of ColossalAI 0.5.0, for plain torch, DDP, FSDP and DTensor models.

Names from ColossalAI's guide that this version does not have are accepted as keywords. Loading reads everything that
the original writes. Saving writes files that the original loads; each file or folder appears atomically, and nothing is
gathered on one rank.

A training script calls it on every rank, in the thread of the caller; saves and loads go through
:mod:`rankless.components`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankless.colossalai.booster_layouts import file_variant, model_folder, optimizer_file, optimizer_folder
from rankless.components import component_calls
from rankless.components.component_files import FileSet
from rankless.components.component_request import ComponentRequest
from rankless.components.component_view import ComponentView
from rankless.components.destination import Destination
from rankless.components.file_or_folder import Layout, safetensors_file, torch_file
from rankless.components.stored_component import StoredComponent
from rankless.engine.comm.collective_call import collective_call
from rankless.errors import InvalidArgumentError, NoCheckpointError
from rankless.load.restore_result import RestoreResult
from rankless.observe.warning import warn_caller
from rankless.save.background import background_saves
from rankless.save.handle import SaveHandle
from rankless.state.model.fused_layout import stored_layout
from rankless.state.training import TrainingObjects
from rankless.storage.posix import is_directory, is_file, local_path

_Path = str | PathLike[str]

#: Seconds that ranks wait for each other.
_TIMEOUT = 600.0

_MIB = 2**20


class CheckpointIO:
    """The object that scripts wait on for asynchronous saves."""

    def synchronize(self) -> None:
        """Do nothing: an asynchronous save has copied its data when the call returns."""

    _sync_d2h = synchronize

    def _sync_io(self) -> None:
        background_saves.finalize()


class Booster:
    """Saves and loads models, optimizers and schedulers. Every rank makes the same calls.

    ``plugin`` may be any object with a ``configure`` method as ColossalAI's plugins have it; without one, :meth:`boost`
    returns its arguments.
    """

    def __init__(self, device: str | None = None, mixed_precision: Any = None, plugin: Any = None) -> None:
        if mixed_precision is not None:
            raise InvalidArgumentError(
                "mixed_precision is not supported here: use torch.autocast, or FSDP's own policy"
            )
        self.device, self.plugin = device, plugin
        self.checkpoint_io = CheckpointIO()
        self._model_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def boost(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return the five objects as the plugin configures them.

        An optimizer that is passed with its model is saved by the names of the model's parameters.
        """
        boosted = model, optimizer, criterion, dataloader, lr_scheduler
        if self.plugin is not None:
            boosted = self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        elif self.device is not None:
            model.to(self.device)
        if boosted[1] is not None:
            self._model_of[_plain_optimizer(boosted[1])] = weakref.ref(boosted[0])
        return boosted

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        """Compute the gradients of a loss."""
        backward = getattr(optimizer, "backward", None)
        if callable(backward):
            backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> Iterator[None]:
        """Skip the synchronization of gradients inside, for models that have such a context."""
        if self.plugin is not None:
            with self.plugin.no_sync(model, optimizer):
                yield
            return
        context = getattr(model, "no_sync", None)
        if context is None:
            raise InvalidArgumentError("no_sync needs a model that has this method, such as a DDP or FSDP1 model")
        with context():
            yield

    def save_model(  # noqa: PLR0917 - the real order
        self,
        model: Any,
        checkpoint: _Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> SaveHandle[Path]:
        """Save a model: see :func:`rankless.save_model`. ``prefix`` names a variant of a folder's files."""
        with collective_call(None, _TIMEOUT):
            del gather_dtensor
            if use_async and not use_safetensors:
                warn_caller("use_async=True saves safetensors files, as ColossalAI does")
                use_safetensors = True
            path = local_path(checkpoint)
            if not shard and use_safetensors and path.suffix != ".safetensors":
                raise InvalidArgumentError(
                    f"with use_safetensors the path of a file must end in .safetensors; got {path.name!r}"
                )
            plain = _plain_model(model)
            if shard:
                limit = _shard_bytes(size_per_shard)
                layout = partial(
                    _model_folder_layout, model=plain, limit=limit, prefix=prefix, use_safetensors=use_safetensors
                )
            else:
                use_safetensors = use_safetensors or path.suffix == ".safetensors"
                layout = partial(_model_file_layout, name=path.name, use_safetensors=use_safetensors)
            text = f"ColossalAI's, {size_per_shard} MiB a file, prefix {prefix!r}, safetensors {use_safetensors}"
            return _save_component(
                path, TrainingObjects(plain, rng=False), layout, text, shard=shard, async_save=use_async
            )

    def load_model(
        self,
        model: Any,
        checkpoint: _Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
        *,
        prefix: str | None = None,
    ) -> RestoreResult:
        """Load a model: see :func:`rankless.load_model`. ``prefix`` chooses a variant."""
        with collective_call(None, _TIMEOUT):
            del low_cpu_mem_mode, num_threads
            plain = _plain_model(model)
            path = _choose_path(
                component_calls.wait_for_path(checkpoint), prefix, ("model.safetensors", "pytorch_model.bin")
            )
            return component_calls.load_component(
                TrainingObjects(plain), path, ComponentView("model"), (None, _TIMEOUT), strict=strict
            )

    #: The name in ColossalAI's guide.
    load = load_model

    def save_optimizer(  # noqa: PLR0917 - the real order
        self,
        optimizer: Any,
        checkpoint: _Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_async: bool = False,
    ) -> SaveHandle[Path]:
        """Save an optimizer by parameter number, as a file of ``torch.save`` or a folder of such files."""
        with collective_call(None, _TIMEOUT):
            del gather_dtensor
            path, plain = local_path(checkpoint), _plain_optimizer(optimizer)
            if not shard and path.suffix == ".safetensors":
                raise InvalidArgumentError(
                    "an optimizer is saved by torch.save: use another ending than .safetensors, for which "
                    "ColossalAI puts pickles into safetensors files"
                )
            layout: Layout
            if shard:
                layout = partial(optimizer_folder, limit=_shard_bytes(size_per_shard), prefix=prefix)
            else:
                layout = partial(optimizer_file, name=path.name)
            training = TrainingObjects(optimizer=plain, naming_model=self._find_model(plain), rng=False)
            text = f"ColossalAI's, {size_per_shard} MiB a file, prefix {prefix!r}"
            return _save_component(path, training, layout, text, shard=shard, async_save=use_async)

    def load_optimizer(
        self,
        optimizer: Any,
        checkpoint: _Path,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
        *,
        prefix: str | None = None,
        size_per_shard: float = 1024,
    ) -> RestoreResult:
        """Load an optimizer: see :func:`rankless.load_optimizer`. ``prefix`` chooses a variant."""
        with collective_call(None, _TIMEOUT):
            del low_cpu_mem_mode, num_threads, size_per_shard
            plain = _plain_optimizer(optimizer)
            path = _choose_path(
                component_calls.wait_for_path(checkpoint), prefix, ("pytorch_optim.bin", "optimizer.safetensors")
            )
            training = TrainingObjects(optimizer=plain, naming_model=self._find_model(plain))
            return component_calls.load_component(
                training, path, ComponentView("optimizer"), (None, _TIMEOUT), strict=True, may_skip_frozen=True
            )

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: _Path) -> None:
        """Save a scheduler's state dict as a file of ``torch.save``."""
        with collective_call(None, _TIMEOUT):
            component_calls.save_scheduler_state(lr_scheduler, checkpoint, (None, _TIMEOUT), as_torch=True)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: _Path) -> None:
        """Load a scheduler's state."""
        with collective_call(None, _TIMEOUT):
            component_calls.load_lr_scheduler(lr_scheduler, checkpoint)

    def _find_model(self, optimizer: Any) -> Any:
        """Return the model that an optimizer was boosted with, if it still exists."""
        model_ref = self._model_of.get(optimizer)
        model = None if model_ref is None else model_ref()
        return None if model is None else _plain_model(model)


def _shard_bytes(size_per_shard: float) -> int:
    """Convert MiB to bytes. Raises ``InvalidArgumentError`` if the size is not a positive number."""
    if not isinstance(size_per_shard, int | float) or not size_per_shard > 0:
        raise InvalidArgumentError(f"size_per_shard must be a number of MiB above 0; got {size_per_shard!r}")
    return max(1, int(size_per_shard * _MIB))


def _save_component(
    path: Path, training: TrainingObjects, layout: Layout, text: str, *, shard: bool, async_save: bool
) -> SaveHandle[Path]:
    destination = Destination.for_path(path, folder=shard)
    request = ComponentRequest(destination, training, layout, text, async_save=async_save)
    return component_calls.saves.save(destination, request, None, _TIMEOUT)


def _model_folder_layout(
    content: StoredComponent, *, model: Any, limit: int, prefix: str | None, use_safetensors: bool
) -> FileSet:
    return model_folder(
        content.stored_as(partial(stored_layout, model)), limit, prefix, use_safetensors=use_safetensors
    )


def _model_file_layout(content: StoredComponent, *, name: str, use_safetensors: bool) -> FileSet:
    return safetensors_file(content.without_ties(), name) if use_safetensors else torch_file(content, name)


def _choose_path(path: Path, prefix: str | None, stems: tuple[str, ...]) -> Path:
    """Return the index of a variant in a folder. Without a prefix, return the path itself."""
    if prefix is None or not is_directory(path):
        return path
    for stem in stems:
        index = path / file_variant(f"{stem}.index.json", prefix)
        if is_file(index):
            return index
    raise NoCheckpointError(f"{path} has no index with the prefix {prefix!r}")


def _plain_model(model: Any) -> Any:
    """Return the model inside a plugin's wrappers, by their own ``unwrap`` method."""
    while callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    return model


def _plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a plugin's wrapper.

    Raises ``InvalidArgumentError`` for a wrapper that keeps optimizer states itself.
    """
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if type(optimizer).__name__ != "OptimizerWrapper":
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} keeps optimizer states in shards that only its plugin can read: "
            "use torch's FSDP or ZeroRedundancyOptimizer instead"
        )
    return inner
