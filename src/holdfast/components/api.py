"""One part at a time: ``save_model``, ``load_model`` and the like, which every rank calls."""

from __future__ import annotations

from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holdfast.components import scheduler_file as schedulers
from holdfast.components.background import PendingSaves
from holdfast.components.component_view import ComponentView
from holdfast.components.destination import Destination
from holdfast.components.file_format import TORCH, model_file_format, optimizer_file_format
from holdfast.components.request import ComponentRequest
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.errors import StorageError
from holdfast.load.fallback import load_with_fallback
from holdfast.load.request import LoadRequest
from holdfast.load.result import RestoreResult
from holdfast.run.cleanup import finish_interrupted_replace
from holdfast.save.background import background_saves
from holdfast.save.handle import SaveHandle
from holdfast.state.restore import RestorePolicy
from holdfast.state.training import TrainingObjects
from holdfast.storage.posix import local_path

#: For all calls, as there are default instances for saves of whole states.
saves = PendingSaves()


def save_model(  # noqa: PLR0917 - the positional order that ColossalAI's users know
    model: Any,
    checkpoint: str | PathLike[str],
    shard: bool = False,
    gather_dtensor: bool = True,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_safetensors: bool = True,
    use_async: bool = False,
    *,
    state_dict_hooks: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> SaveHandle[Path]:
    """Save a model by itself, into a file or a folder, which appears in one atomic step. Every rank calls it.

    Each rank writes what it holds; nothing is gathered. The files are the same whatever the layout.

    Args:
        model: a module in any layout, or a state dict; a list holds parts of one model.
        checkpoint: the path. A file that is there is replaced; in a folder that is there, the model's files are, and
            what else lies in it stays.
        shard: ``False``: one file. Its extension decides: ``.safetensors``; ``.pt``, ``.pth``, ``.bin`` a file of
            ``torch.save``. ``True``: a folder in the Hugging Face layout, which ``from_pretrained`` opens.
        gather_dtensor: changes nothing; the result is the same.
        prefix: put before the names of parameters and buffers, as by ``state_dict(prefix=)``.
        size_per_shard: the most MiB of tensors in one file of a folder.
        use_safetensors: for folders, and for files without an extension; else files of ``torch.save``.
        use_async: return as soon as the model may change, and write in the background.
        state_dict_hooks: as in :func:`holdfast.save_checkpoint`.
        process_group: the ranks that save together.
        timeout: seconds that ranks wait for each other before all of them fail.

    Returns:
        A handle, whose ``wait()`` gives the path once it is there.

    Raises:
        InvalidArgumentError: a path of the wrong kind, a size that is none.
        UnsupportedTensorError, ReplicaMismatchError, RankMismatchError, RankTimeoutError, StorageError: as
            in :func:`holdfast.save_checkpoint`. All ranks raise it, and what was there before is as it was.
    """
    del gather_dtensor
    place = Destination.of(local_path(checkpoint), folder=shard)
    form = model_file_format(place, size_per_shard, use_safetensors=use_safetensors, model=model)
    request = ComponentRequest(
        place,
        TrainingObjects(model, rng=False, state_dict_hooks=state_dict_hooks),
        form.layout,
        form.text,
        prefix or "",
    )
    return saves.save(request, process_group, timeout, use_async=use_async)


def load_model(
    model: Any,
    checkpoint: str | PathLike[str],
    strict: bool = True,
    prefix: str | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> RestoreResult:
    """Load a model in place, from a checkpoint of any format that holdfast reads. Every rank calls it.

    Each rank reads just the bytes that it needs. Floating dtypes are cast as ``load_state_dict`` does.

    Args:
        model: a module in any layout, or a state dict whose tensors are filled; a list holds parts of one model.
        checkpoint: a file or a folder: safetensors or torch, Hugging Face, ColossalAI, or a checkpoint of ours.
        strict: names must match; with ``False`` what matches is loaded, and the rest is reported.
        prefix: taken off the names in the checkpoint; only names that begin with it are looked at.
        process_group: the ranks that load together.
        timeout: seconds that ranks wait for each other before all of them fail.

    Raises:
        NoCheckpointError: there is nothing at the path.
        MismatchError: shapes, or names if ``strict``: one error that lists all of them. Nothing was changed.
        CorruptCheckpointError: bytes are not what was saved; names the file and tensor.
    """
    return load_component(
        TrainingObjects(model),
        checkpoint,
        ComponentView("model", prefix or ""),
        (process_group, timeout),
        strict=strict,
    )


def save_optimizer(  # noqa: PLR0917 - the positional order that ColossalAI's users know
    optimizer: Any,
    checkpoint: str | PathLike[str],
    shard: bool = False,
    gather_dtensor: bool = True,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_async: bool = False,
    *,
    model: Any = None,
    state_dict_hooks: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> SaveHandle[Path]:
    """Save an optimizer by itself: its state by the names of parameters, its groups, its class.

    Arguments, and what is raised, are as in :func:`save_model`. A file of ``torch.save`` is what
    ``Optimizer.load_state_dict`` takes; a folder holds safetensors files.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or a state dict of one.
        checkpoint: the path of a file or, with ``shard``, of a folder, which may be the model's.
        shard: whether it is a folder.
        gather_dtensor: changes nothing.
        prefix: put before the names of parameters.
        size_per_shard: the most MiB of tensors in one file of a folder.
        use_async: return as soon as the optimizer may change, and write in the background.
        model: the model that it trains, which tells the names of parameters. Without it they are called by the names
            that torch keeps where the optimizer was made with ``named_parameters()``, else by their places; where ranks
            hold different parameters in one place, that is an error.
        state_dict_hooks: whether the model's names are those that its ``state_dict`` hooks say: as in
            :func:`holdfast.save_checkpoint`.
        process_group: the ranks that save together.
        timeout: seconds that ranks wait for each other before all of them fail.
    """
    del gather_dtensor
    place = Destination.of(local_path(checkpoint), folder=shard)
    form = optimizer_file_format(place, size_per_shard)
    training = TrainingObjects(optimizer=optimizer, named_by=model, rng=False, state_dict_hooks=state_dict_hooks)
    request = ComponentRequest(place, training, form.layout, form.text, prefix or "")
    return saves.save(request, process_group, timeout, use_async=use_async)


def load_optimizer(
    optimizer: Any,
    checkpoint: str | PathLike[str],
    prefix: str | None = None,
    size_per_shard: float = 1024,
    *,
    model: Any = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> RestoreResult:
    """Load an optimizer in place, from a checkpoint of any format that holdfast reads. Every rank calls it.

    Settings that the file lacks stay as they are. ``named_by`` of the result tells what parameters were found by.

    Args:
        optimizer: a ``torch.optim.Optimizer``; one that has never stepped gets its state without a step.
        checkpoint: a file or a folder.
        prefix: taken off the names of parameters in the checkpoint.
        size_per_shard: changes nothing.
        model: the model that it trains; see :func:`save_optimizer`.
        strict: parameters and groups must be those that were saved; with ``False`` parameters that are in both get
            their state, and the rest is left as it is and reported.
        process_group: the ranks that load together.
        timeout: seconds that ranks wait for each other before all of them fail.

    Raises:
        OptimizerMismatchError: another class or, if ``strict``, other parameters, another grouping. Nothing was
            changed.
        NoCheckpointError, MismatchError, CorruptCheckpointError: as in :func:`load_model`.
    """
    del size_per_shard
    training = TrainingObjects(optimizer=optimizer, named_by=model)
    return load_component(
        training, checkpoint, ComponentView("optimizer", prefix or ""), (process_group, timeout), strict=strict
    )


def save_lr_scheduler(
    lr_scheduler: Any,
    checkpoint: str | PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> None:
    """Save a scheduler's state into one file, atomically; rank 0 writes it.

    With the extension ``.pt``, ``.pth`` or ``.bin`` it is a file of ``torch.save``, as plain torch loads it; else JSON,
    with the scheduler's class and a CRC.
    """
    as_torch = local_path(checkpoint).suffix in TORCH
    save_scheduler_state(lr_scheduler, checkpoint, (process_group, timeout), as_torch=as_torch)


def load_lr_scheduler(
    lr_scheduler: Any,
    checkpoint: str | PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> None:
    """Load a scheduler's state, from a file of ours or of ``torch.save``.

    Raises ``MismatchError`` for the state of a scheduler of another class; nothing was changed then.
    """
    schedulers.read_scheduler(lr_scheduler, local_path(checkpoint), saves.ranks(process_group).session(timeout))


def wait_for_path(checkpoint: str | PathLike[str]) -> Path:
    """The path, when no save of it is under way any more: folders are saved where links lead, files where they are."""
    path = local_path(checkpoint)
    for one in dict.fromkeys((path, path.resolve())):
        background_saves.finalize(one)
    return path


def load_component(
    training: TrainingObjects,
    checkpoint: str | PathLike[str],
    seen: ComponentView,
    where: tuple[dist.ProcessGroup | None, float],
    *,
    strict: bool,
) -> RestoreResult:
    """Load one part. ``where`` are the ranks that load together, and seconds that they wait for each other."""
    path = wait_for_path(checkpoint)
    group, timeout = where
    ranks = saves.ranks(group)
    if ranks.rank == COORDINATOR_RANK:
        with suppress(StorageError):  # which all ranks together will meet again
            finish_interrupted_replace(path.parent)
    request = LoadRequest(
        path=path,
        tag=None,
        training=training,
        policy=RestorePolicy(strict=strict, cast_dtype=True, rng=False),
        verify=True,
        seen=seen,
        seen_as=f"{seen.kind} with the prefix {seen.prefix!r} taken off" if seen.prefix else f"{seen.kind} alone",
    )
    return load_with_fallback(request, ranks, timeout)


def save_scheduler_state(
    lr_scheduler: Any, checkpoint: str | PathLike[str], where: tuple[dist.ProcessGroup | None, float], *, as_torch: bool
) -> None:
    """Save a scheduler's state as JSON or as a file of ``torch.save``. ``where`` is as in :func:`load_component`."""
    group, timeout = where
    schedulers.write_scheduler(
        lr_scheduler, local_path(checkpoint), saves.ranks(group).session(timeout), as_torch=as_torch
    )
