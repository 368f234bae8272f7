"""The API for single components: ``save_model``, ``load_model`` and so on, which every rank calls.

:mod:`rankless.colossalai.booster` and :mod:`rankless.torchtitan.manager` call the functions below for loads and for
folders, too, in the thread of the caller.
"""

from __future__ import annotations

from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankless.components import scheduler_file as schedulers
from rankless.components.component_request import ComponentRequest
from rankless.components.component_view import ComponentView
from rankless.components.destination import Destination
from rankless.components.file_format import TORCH, adapter_file_format, model_file_format, optimizer_file_format
from rankless.components.pending_saves import PendingSaves
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument, check_ranks_are_joined
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import InvalidArgumentError, StorageError
from rankless.load.fallback import load_with_fallback
from rankless.load.load_request import LoadRequest
from rankless.load.restore_result import RestoreResult
from rankless.observe.spans import span
from rankless.ondisk.data_files import NO_ADAPTERS, ONLY_ADAPTERS, SHARD_SIZE, parse_size
from rankless.ondisk.dtypes import BY_TORCH_NAME, TORCH_NAMES, UNSCALED_FLOATS
from rankless.run.run_store import run_store_of
from rankless.save.background import background_saves
from rankless.save.handle import SaveHandle
from rankless.state.mismatches import RestorePolicy
from rankless.state.training import TrainingObjects
from rankless.storage.location import parse_location
from rankless.storage.store import store_of

if TYPE_CHECKING:
    import torch

#: The pending saves of all calls.
saves = PendingSaves()


def save_model(
    model: Any,
    path: str | PathLike[str],
    *,
    shard: bool = False,
    prefix: str | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    use_safetensors: bool = True,
    async_save: bool = False,
    state_dict_hooks: bool = True,
    adapter_only: bool = False,
    dtype: torch.dtype | str | None = None,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> SaveHandle[Path]:
    """Save a model into a file or a folder, which appears in one atomic step. Every rank calls it.

    Each rank writes its own shards; nothing is gathered. The files do not depend on the parallel layout.

    Args:
        model: a module in any layout, or a state dict; a list holds the modules of one model.
        path: the file or folder, or its URL in an object store. An existing file is replaced. In an existing folder the
            model's files are replaced, and all other files are kept. In an object store, the files of a folder are
            replaced one after another.
        shard: ``False``: one file. Its extension decides: ``.safetensors``, or ``.pt``, ``.pth``, ``.bin`` for a file
            of ``torch.save``. ``True``: a folder in the Hugging Face layout, which ``from_pretrained`` opens.
        prefix: is put before the names of parameters and buffers, as by ``state_dict(prefix=)``.
        max_shard_size: the maximum size of the tensors in one file of a folder, as a number of bytes or as text such as
            ``"500MB"``.
        use_safetensors: write safetensors files for folders and for files without an extension; if false, files of
            ``torch.save``.
        async_save: return as soon as the model may change, and write in the background.
        state_dict_hooks: as in :class:`rankless.SaveOptions`.
        adapter_only: save only the PEFT adapters of the model, into a folder that ``PeftModel.from_pretrained`` opens:
            ``adapter_model.safetensors`` and ``adapter_config.json``, of adapters that are not called ``default`` in a
            folder with their name. ``shard``, ``max_shard_size`` and ``use_safetensors`` have no effect then.
        dtype: the dtype that floating-point tensors are cast to in the files, such as ``torch.bfloat16``. The model
            keeps its own. Tensors of 8 bits are not cast: their scales are stored apart.
        process_group: the ranks that save together; ``"self"`` is this process alone.
        timeout: how many seconds ranks wait for each other before all of them fail.

    Returns:
        A handle. Its ``wait()`` returns the path when the save is complete.

    Raises:
        InvalidArgumentError: the path is of the wrong kind, or the size cannot be parsed; or, with
            ``adapter_only``, the model has no PEFT adapters, or a prefix was passed.
        StateError: with ``adapter_only``, PEFT computes the tensors that it stores from sharded ones.
        UnsupportedTensorError, ReplicaMismatchError, RankMismatchError, RankTimeoutError, StorageError: as
            in :meth:`rankless.RunDirectory.save`. All ranks raise it, and existing files are left unchanged.
    """
    with collective_call(process_group, timeout):
        if adapter_only and prefix:
            raise InvalidArgumentError("PEFT gives the names of adapters their prefix: leave out prefix")
        cast = None if dtype is None else check_cast(dtype)
        if adapter_only and cast:
            raise InvalidArgumentError("adapters are stored as they are: leave out dtype")
        destination = Destination.for_path(parse_location(path), folder=shard or adapter_only)
        file_format = (
            adapter_file_format()
            if adapter_only
            else model_file_format(
                destination, parse_size(max_shard_size), use_safetensors=use_safetensors, model=model, dtype=cast
            )
        )
        adapters = ONLY_ADAPTERS if adapter_only else NO_ADAPTERS
        request = ComponentRequest(
            destination,
            TrainingObjects(model, rng=False, state_dict_hooks=state_dict_hooks, adapters=adapters, dtype=cast),
            file_format.layout,
            file_format.text,
            prefix or "",
            async_save,
        )
        return saves.save(destination, request, process_group, timeout)


def check_cast(dtype: Any) -> str:
    """Return the name in safetensors files of the dtype that a model is cast to, from torch's or its name there.

    For example, ``"BF16"`` for ``torch.bfloat16`` or ``"bfloat16"``. Raises ``InvalidArgumentError`` for a dtype with
    values that would need a scale, and for anything else.
    """
    name = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    if name not in UNSCALED_FLOATS:
        names = ", ".join(sorted(TORCH_NAMES[each] for each in UNSCALED_FLOATS))
        raise InvalidArgumentError(f"dtype must be one of {names}; got {dtype!r}")
    return name


def replace_with_model(model: Any, folder: Path, *, timeout: float) -> None:
    """Save a model in the Hugging Face layout in place of a folder. No file of that is kept. Every rank calls it.

    :mod:`rankless.torchtitan.manager` calls it in the thread of the caller.
    """
    destination = Destination(folder.resolve(), folder=True, keeps_others=False)
    file_format = model_file_format(destination, parse_size(SHARD_SIZE), use_safetensors=True, model=model)
    training = TrainingObjects(model, rng=False, adapters=NO_ADAPTERS)
    request = ComponentRequest(destination, training, file_format.layout, file_format.text)
    saves.save(destination, request, None, timeout)


def load_model(
    model: Any,
    path: str | PathLike[str],
    *,
    strict: bool = True,
    prefix: str | None = None,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> RestoreResult:
    """Load a model in place, from a checkpoint of any format that rankless reads. Every rank calls it.

    Each rank reads only the bytes that it needs. Floating dtypes are cast as ``load_state_dict`` does.

    Args:
        model: a module in any layout, or a state dict with tensors to fill; a list holds the modules of one model.
        path: a file or a folder: safetensors or torch, Hugging Face, ColossalAI, or a rankless checkpoint.
        strict: names must match. With ``False`` matching names are loaded, and all others are reported.
        prefix: is removed from the names in the checkpoint; only names that begin with it are loaded. With ``"net."``,
            for example, ``net.0.weight`` is loaded into ``0.weight``.
        process_group: the ranks that load together.
        timeout: how many seconds ranks wait for each other before all of them fail.

    Raises:
        NoCheckpointError: the path does not exist.
        MismatchError: shapes differ, or names if ``strict``. The error lists all differences. Nothing was changed.
        CorruptCheckpointError: bytes do not match their checksums; the error names the file and tensor.
    """
    with collective_call(process_group, timeout):
        return load_component(
            TrainingObjects(model),
            path,
            ComponentView("model", prefix or ""),
            (process_group, timeout),
            strict=strict,
        )


def save_optimizer(
    optimizer: Any,
    path: str | PathLike[str],
    *,
    shard: bool = False,
    prefix: str | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    async_save: bool = False,
    model: Any = None,
    state_dict_hooks: bool = True,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> SaveHandle[Path]:
    """Save an optimizer: its state by parameter name, its parameter groups and its class.

    Arguments and errors are as in :func:`save_model`. A file of ``torch.save`` holds a state dict for
    ``Optimizer.load_state_dict``. A folder holds safetensors files.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or a state dict of one.
        path: the path of a file or, with ``shard``, of a folder, which may be the model's folder.
        shard: whether to write a folder.
        prefix: is put before the names of parameters.
        max_shard_size: the maximum size of the tensors in one file of a folder, as a number of bytes or as text such as
            ``"500MB"``.
        async_save: return as soon as the optimizer may change, and write in the background.
        model: the model that it trains, which names the parameters. Without it, parameters have the names that torch
            keeps if the optimizer was made with ``named_parameters()``, otherwise their positions. It is an error if
            ranks hold different parameters at one position.
        state_dict_hooks: whether names are as the model's ``state_dict`` hooks change them: see
            :class:`rankless.SaveOptions`.
        process_group: the ranks that save together; ``"self"`` is this process alone.
        timeout: how many seconds ranks wait for each other before all of them fail.
    """
    with collective_call(process_group, timeout):
        destination = Destination.for_path(parse_location(path), folder=shard)
        file_format = optimizer_file_format(destination, parse_size(max_shard_size))
        training = TrainingObjects(
            optimizer=optimizer, naming_model=model, rng=False, state_dict_hooks=state_dict_hooks
        )
        request = ComponentRequest(
            destination, training, file_format.layout, file_format.text, prefix or "", async_save
        )
        return saves.save(destination, request, process_group, timeout)


def load_optimizer(
    optimizer: Any,
    path: str | PathLike[str],
    *,
    prefix: str | None = None,
    model: Any = None,
    strict: bool = True,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> RestoreResult:
    """Load an optimizer in place, from a checkpoint of any format that rankless reads. Every rank calls it.

    Settings that the file lacks are left unchanged. ``matched_by`` of the result says how parameters were matched.

    Args:
        optimizer: a ``torch.optim.Optimizer``. If it has never stepped, its state is created without a step.
        path: a file or a folder, of any format, or its URL.
        prefix: is removed from the names of parameters in the checkpoint.
        model: the model that it trains; see :func:`save_optimizer`.
        strict: parameters and groups must be those that were saved. With ``False`` parameters that are in both get
            their state; all others are left unchanged and reported.
        process_group: the ranks that load together.
        timeout: how many seconds ranks wait for each other before all of them fail.

    Raises:
        OptimizerMismatchError: the class differs or, if ``strict``, the parameters or their grouping. Nothing was
            changed.
        NoCheckpointError, MismatchError, CorruptCheckpointError: as in :func:`load_model`.
    """
    with collective_call(process_group, timeout):
        training = TrainingObjects(optimizer=optimizer, naming_model=model)
        return load_component(
            training, path, ComponentView("optimizer", prefix or ""), (process_group, timeout), strict=strict
        )


def save_lr_scheduler(
    scheduler: Any,
    path: str | PathLike[str],
    *,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> None:
    """Save a scheduler's state into one file, atomically. Rank 0 writes it.

    With the extension ``.pt``, ``.pth`` or ``.bin`` it is a file of ``torch.save``, which plain torch can load.
    Otherwise it is JSON with the scheduler's class and a CRC.
    """
    with collective_call(process_group, timeout):
        as_torch = parse_location(path).suffix in TORCH
        save_scheduler_state(scheduler, path, (process_group, timeout), as_torch=as_torch)


def load_lr_scheduler(
    scheduler: Any,
    path: str | PathLike[str],
    *,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> None:
    """Load a scheduler's state from a file of rankless or of ``torch.save``.

    Raises ``MismatchError`` if another scheduler class has saved the state; nothing is changed then.
    """
    with collective_call(process_group, timeout):
        schedulers.read_scheduler(
            scheduler, parse_location(path), saves.rank_group(process_group).open_session(timeout)
        )


def wait_for_path(checkpoint: str | PathLike[str]) -> Path:
    """Wait for the pending saves of a path, and return it. A link to a folder waits for the folder's saves, too.

    A load of one component calls it first, on each rank for itself.
    """
    path = parse_location(checkpoint)
    for saved_path in dict.fromkeys((path, path.resolve())):
        background_saves.finalize(saved_path)
    return path


def load_component(
    training: TrainingObjects,
    checkpoint: str | PathLike[str],
    view: ComponentView,
    ranks_and_timeout: tuple[ProcessGroupArgument, float],
    *,
    strict: bool,
    ignores_unexpected: bool = False,
    may_skip_frozen: bool = False,
) -> RestoreResult:
    """Load one component. ``ranks_and_timeout``: the ranks that load together, and how many seconds they wait.

    ``ignores_unexpected`` and ``may_skip_frozen``: see :class:`RestorePolicy`.

    Every rank calls it, in the thread of the caller. Errors become common in the votes of the load.
    """
    path = wait_for_path(checkpoint)
    group, timeout = ranks_and_timeout
    ranks = saves.rank_group(group)
    if ranks.rank == COORDINATOR_RANK and not store_of(path).is_remote:
        with suppress(StorageError):  # all ranks will raise it together when they read
            run_store_of(path.parent).repair_names()
    request = LoadRequest(
        path=path,
        tag=None,
        training=training,
        policy=RestorePolicy(
            strict=strict,
            cast_dtype=True,
            rng=False,
            ignores_unexpected=ignores_unexpected,
            may_skip_frozen=may_skip_frozen,
        ),
        verify=True,
        reader_adapter=view,
        reader_adapter_text=f"{view.kind} with the prefix {view.prefix!r} removed"
        if view.prefix
        else f"{view.kind} only",
    )
    with span("load", "call", path.name):
        return load_with_fallback(request, ranks, timeout)


def save_scheduler_state(
    lr_scheduler: Any,
    checkpoint: str | PathLike[str],
    ranks_and_timeout: tuple[ProcessGroupArgument, float],
    *,
    as_torch: bool,
) -> None:
    """Save a scheduler's state as JSON or as a ``torch.save`` file. See :func:`load_component` for the arguments.

    Every rank calls it, in the thread of the caller. It is one vote.
    """
    group, timeout = ranks_and_timeout
    check_ranks_are_joined(group)
    schedulers.write_scheduler(
        lr_scheduler, parse_location(checkpoint), saves.rank_group(group).open_session(timeout), as_torch=as_torch
    )
