"""``save_checkpoint`` and ``load_checkpoint`` for DeepSpeed engines, in the form of the engine's own methods.

A training script calls them on every rank. Steps that may fail on one rank alone are done in the vote "reading the
engine's state".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, Unpack

from rankless import api
from rankless.deepspeed.engine_partitions import open_engine
from rankless.deepspeed.engine_state import EngineState
from rankless.deepspeed.engine_values import (
    EngineContent,
    as_component,
    collect_values,
    restore_values,
    separate_client_state,
)
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.session import RankGroup
from rankless.errors import InvalidArgumentError
from rankless.options import LoadKeywords, LoadOptions, SaveKeywords, SaveOptions, with_keywords
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.retention import Retention
from rankless.run.tag_arguments import TagArgument
from rankless.save.handle import SaveHandle
from rankless.state.mismatches import as_components

_T = TypeVar("_T")


def save_checkpoint(
    engine: Any,
    path: str | PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    *,
    dataloader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    per_rank_content: Any = None,
    metrics: Mapping[str, Any] | None = None,
    keep: Retention | int | None = None,
    overwrite: bool = False,
    async_save: bool = False,
    timeout: float = 600.0,
    options: SaveOptions | None = None,
    **more: Unpack[SaveKeywords],
) -> SaveHandle[CheckpointInfo]:
    """Save the state of an engine as the checkpoint ``path/tag``. Every rank must call it, between steps.

    The model is stored with its fp32 master weights, under the names of its parameters, and the optimizer's states by
    the same names. So other jobs load both, and the files are the same for any number of ranks and stage of ZeRO.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        path: The run directory, on a file system that all ranks share, or in an object store.
        tag: The name of the checkpoint; ``global_stepN`` by default.
        client_state: A tree of plain values and tensors, which :func:`load_checkpoint` returns. Saved from rank 0.
        dataloader: As in :meth:`rankless.RunDirectory.save`.
        stateful: As in :meth:`rankless.RunDirectory.save`.
        per_rank_content: As in :meth:`rankless.RunDirectory.save`.
        metrics: As in :meth:`rankless.RunDirectory.save`.
        keep: As in :meth:`rankless.RunDirectory.save`.
        overwrite: As in :meth:`rankless.RunDirectory.save`.
        async_save: As in :meth:`rankless.RunDirectory.save`.
        timeout: The number of seconds that ranks wait for each other before all of them fail.
        options: Options that few need: see :class:`rankless.SaveOptions`.
        more: Fields of :class:`rankless.SaveOptions`, except ``staging``. Without ``options``, random states are saved
            with ``rng=True`` only, as each rank has its own.

    Returns:
        The handle of the save, as of :func:`rankless.save_checkpoint`.

    Raises:
        StateError: The engine has a form that cannot be stored, such as states on NVMe; gradients are accumulated; or
            weights were changed without their master weights. The message names the parameter.
        InvalidArgumentError: ``engine`` is no engine, or ``client_state`` no dict or with a key of the engine's values;
            or ``staging`` is ``"overlapped"``.
        Exception: All errors of :func:`rankless.save_checkpoint`.
    """
    with collective_call(None, timeout):
        chosen = with_keywords(SaveOptions(rng=False), options, more, save_checkpoint)
        if chosen.staging == "overlapped":
            raise InvalidArgumentError(
                "an engine cannot be saved with staging='overlapped': its master weights also change outside of steps "
                "of torch.optim, which the copies wait for; leave staging out"
            )

        def open_and_check() -> tuple[EngineState, EngineContent]:
            state = open_engine(engine)
            state.check_weights()
            return state, collect_values(engine, client_state or {})

        opened, content = _run_on_all(open_and_check, timeout)
        with opened as state:
            return api.save_checkpoint(
                path,
                f"global_step{engine.global_steps}" if tag is None else tag,
                state.model,
                state.optimizer,
                content.scheduler,
                content.user_content,
                dataloader=dataloader,
                stateful=stateful,
                per_rank_content=per_rank_content,
                step=engine.global_steps,
                metrics=metrics,
                keep=keep,
                overwrite=overwrite,
                async_save=async_save,
                timeout=timeout,
                options=chosen,
            )


def load_checkpoint(
    engine: Any,
    path: str | PathLike[str],
    tag: TagArgument = None,
    *,
    load_module_only: bool = False,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    dataloader: Any = None,
    stateful: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    options: LoadOptions | None = None,
    **more: Unpack[LoadKeywords],
) -> tuple[Path, dict[str, Any]]:
    """Load a checkpoint into an engine, on any number of ranks and with any stage of ZeRO. Every rank must call it.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        path: A run directory, or one checkpoint of any format that rankless reads, such as DeepSpeed's own.
        tag: The checkpoint of the run: its tag, an alias, or the latest one by default.
        load_module_only: Load only the weights: no optimizer states, scheduler and counters.
        load_optimizer_states: Whether to load the states of the optimizer.
        load_lr_scheduler_states: Whether to load the state of the scheduler, if the engine has one.
        dataloader: As in :func:`rankless.restore`.
        stateful: As in :func:`rankless.restore`.
        timeout: The number of seconds that ranks wait for each other before all of them fail.
        options: Options that few need: see :class:`rankless.LoadOptions`. The scheduler may always be missing there:
            DeepSpeed's own are among the values.
        more: Fields of :class:`rankless.LoadOptions`, such as ``cast_dtype`` and ``strict``. Without ``options``,
            random states are restored with ``rng=True`` only.

    Returns:
        The path of the checkpoint, and its client state, as the engine's ``load_checkpoint`` does.

    Raises:
        NoCheckpointError: There is no checkpoint.
        StateError: The engine has a form that cannot be loaded into.
        MismatchError: The checkpoint does not match the engine, or lacks the state of its scheduler or loss scaler.
        Exception: All other errors of :func:`rankless.restore`.
    """
    with collective_call(None, timeout):
        chosen = with_keywords(LoadOptions(rng=False), options, more, load_checkpoint)
        chosen = replace(chosen, allow_missing=as_components(chosen.allow_missing) | {"scheduler"})
        with _run_on_all(lambda: open_engine(engine), timeout) as state:
            with_optimizer = load_optimizer_states and not load_module_only
            scheduler = None if load_module_only or not load_lr_scheduler_states else engine.lr_scheduler
            result = api.restore(
                path,
                tag,
                state.model,
                state.optimizer if with_optimizer else None,
                as_component(scheduler),
                dataloader=dataloader,
                stateful=stateful,
                timeout=timeout,
                options=chosen,
            )
            state.update_weights()
            client_state = separate_client_state(result.user_content)
            if not load_module_only:
                restore_values(engine, result, scheduler)
        return result.path or Path(path), client_state


def _run_on_all(work: Callable[[], _T], timeout: float) -> _T:
    """Do ``work`` on all ranks: if it fails on one, all raise the same error."""
    return RankGroup().open_session(timeout).run_on_all("reading the engine's state", work)
