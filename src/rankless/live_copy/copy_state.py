"""``copy_state``: the training state of running ranks, copied to other running ranks without a file.

A training calls it on every rank. Steps wait, and saves have copied their state, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group
from rankless.engine.comm.session import RankGroup
from rankless.live_copy.copy_operation import CopyOperation
from rankless.live_copy.copy_request import CopyRequest, list_ranks
from rankless.live_copy.copy_result import CopyResult
from rankless.ondisk.validation import check_timeout
from rankless.process.gc_pause import gc_paused
from rankless.save.background import background_saves
from rankless.state.mismatches import RestorePolicy, as_components
from rankless.state.training import TrainingObjects, as_loader


class _LatestRanks:
    """The ranks of the last copy: they keep the group for the exchange, if the process group cannot send itself."""

    def __init__(self) -> None:
        self._ranks: RankGroup | None = None

    def get(self, process_group: ProcessGroupArgument) -> RankGroup:
        """Return the ranks of a process group, by default of the default one."""
        if self._ranks is None or self._ranks.process_group is not current_process_group(process_group):
            self._ranks = RankGroup(process_group)
        return self._ranks

    def clear(self) -> None:
        """Forget the ranks of the last copy."""
        self._ranks = None


_latest_ranks = _LatestRanks()


def copy_state(
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    sources: Collection[int] | None = None,
    source: Mapping[str, Any] | None = None,
    stateful: Mapping[str, Any] | None = None,
    dataloader: Any = None,
    user_content: Any = None,
    strict: bool = True,
    allow_missing: Collection[str] = (),
    cast_dtype: bool = False,
    rng: bool | None = None,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> CopyResult:
    """Copy the training state of running ranks to other running ranks, without a file. Every rank must call it.

    There are two forms. With ``sources``, the objects of these ranks are the source, and the objects of all other ranks
    get the state, in place: a replica that has come back gets it from the others. With ``source``, a rank passes the
    objects that hold the state as a dict, and the objects that get it as the other arguments: the state moves to
    another number of ranks or to another layout. A rank may pass both, or only one of them.

    Bytes that a rank has itself are copied there; others come from all ranks that have them, in equal shares. The
    objects of the source are never changed. Layouts and dtypes are matched as in :func:`rankless.restore`.

    Args:
        model: A module in any layout, or a state dict; as in :func:`rankless.save_checkpoint`.
        optimizer: A ``torch.optim.Optimizer``. If it has never stepped, its state is created without a step.
        scheduler: An object with ``state_dict`` and ``load_state_dict``. The state of the lowest source rank is taken.
        sources: The ranks of the process group that have the source objects. All ranks pass the same.
        source: The objects that are the source on this rank, by the names of the arguments:
            ``{"model": model, "optimizer": optimizer}``, also ``scheduler``, ``stateful`` and ``dataloader``. Ranks
            that only receive leave it out.
        stateful: A dict of objects with ``state_dict`` and ``load_state_dict``. The state of the lowest source rank is
            taken.
        dataloader: An object with ``load_state_dicts``, such as a :class:`ResumableLoader`: it gets the states of all
            source ranks.
        user_content: A tree of plain values, tensors and arrays, such as ``{"step": step}``. The lowest source rank's
            content is returned to the ranks that receive.
        strict: Whether names must match. If ``False``, matching names are copied and all others are left unchanged.
        allow_missing: The components that the sources may lack although ``strict`` is set; as in
            :func:`rankless.restore`.
        cast_dtype: Whether to cast between floating point dtypes instead of raising if they differ.
        rng: Whether ranks that are no sources get states of the random number generators: a state that is equal on all
            sources, otherwise one that is derived from theirs, another on each rank. By default they do if an
            optimizer is passed. Sources keep their own states.
        process_group: The ranks that take part. By default the default process group, or this process alone if there
            is none.
        timeout: The number of seconds that ranks wait for each other before all of them fail.

    Returns:
        The user content, and a report of the copied components and the bytes that were sent.

    Every rank raises the same error. Until all ranks have checked everything, nothing is changed. If a rank fails
    later, the objects that receive may be partly filled, and the message says so.

    Raises:
        MismatchError: Names, shapes, dtypes or param groups do not match. Nothing was changed.
        ReplicaMismatchError: Source ranks hold different values of one tensor. Nothing was changed.
        StateError: No source has a shard that a rank needs, or the objects of a rank contradict each other.
        InvalidArgumentError: An argument is invalid, or no rank is a source.
        UnsupportedValueError: Some values cannot be copied; the message names each by its path.
        RankMismatchError: Ranks were called with different arguments.
        RankFailedError: A rank failed, or received bytes do not match their CRC; the message names rank and tensor.
        RankTimeoutError: A rank did not arrive in time.
    """
    with collective_call(process_group, timeout):
        policy = RestorePolicy(
            strict=strict,
            cast_dtype=cast_dtype,
            rng=optimizer is not None if rng is None else rng,
            allow_missing=as_components(allow_missing) | ({"rng"} if rng is None else set()),
        )
        objects = TrainingObjects(
            model, optimizer, scheduler, user_content, stateful=stateful, dataloader=as_loader(dataloader)
        )
        request = CopyRequest(objects, source, list_ranks(sources), policy)
        operation = CopyOperation(request, _latest_ranks.get(process_group), check_timeout(timeout))
        background_saves.wait_for_copies()
        # Tensors that are created in inference mode could not be trained.
        with gc_paused(), torch.inference_mode(mode=False):
            return operation.run()
