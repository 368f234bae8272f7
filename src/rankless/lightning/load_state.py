"""Loading: straight from the checkpoint into the tensors, or from the dict that hooks have changed.

A ``Trainer`` strategy (:mod:`rankless.lightning.trainer`) calls it on every rank, in the thread of the caller. All
ranks must load in the same way, so they vote on whether hooks got something, "looking at what hooks have changed".
States that hooks have left are loaded through readers of :mod:`rankless.lightning.hooked_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from torch import nn
from torch.optim import Optimizer

from rankless.api import restore
from rankless.engine.comm.session import RankGroup
from rankless.errors import MismatchError
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader
from rankless.lightning.checkpoint_dict import ResumedCheckpoint
from rankless.lightning.checkpoints import TIMEOUT
from rankless.lightning.hook_overrides import NotRead
from rankless.lightning.hooked_state import HookedModel, hooked_optimizers
from rankless.load.fallback import load_with_fallback
from rankless.load.load_request import LoadRequest
from rankless.state.mismatches import RestorePolicy
from rankless.state.training import TrainingObjects

#: Wraps the reader of a checkpoint.
ReaderAdapter = Callable[[Reader], Reader]


def load_model(checkpoint: ResumedCheckpoint, state_dict: Mapping[str, Any], model: nn.Module, *, strict: bool) -> None:
    """Fill a model with the state dict that hooks have left. Cast dtypes as ``Module.load_state_dict`` does."""
    if _on_any_rank(not isinstance(state_dict, NotRead)):
        _load_components(
            checkpoint, TrainingObjects(model=model), partial(HookedModel, entries=state_dict), strict=strict
        )
    else:
        restore(checkpoint.path, None, model, strict=strict, rng=False, cast_dtype=True)


def load_optimizers(
    checkpoint: ResumedCheckpoint,
    states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Optimizer],
    model: nn.Module,
) -> None:
    """Fill as many optimizers as there are states, by the names of the model's parameters; then the random states.

    Further optimizers are left unchanged, as in Lightning, which loads optimizers only if the training goes on.
    """
    filled = list(optimizers)[: len(states)]
    is_read = _on_any_rank(not all(isinstance(state, NotRead) for state in states))
    if filled:
        if is_read:
            _check_groups(states, filled)
        training = TrainingObjects(optimizer=filled, naming_model=model)
        _load_components(
            checkpoint, training, partial(hooked_optimizers, states=states) if is_read else None, strict=True
        )
    if isinstance(checkpoint.reader, NativeReader):  # Lightning's own files have no random states
        restore(checkpoint.path, rng=True, resume=True)


def _check_groups(states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer]) -> None:
    """Raise ``MismatchError`` if a state has another number of parameter groups than its optimizer."""
    for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=False)):
        saved, present = len(state["param_groups"]), len(optimizer.param_groups)
        if saved != present:
            raise MismatchError(
                f"checkpoint['optimizer_states'][{number}] has {saved} parameter groups, and the optimizer {present}: "
                "a hook has changed them, or the optimizer is created in another way than when it was saved"
            )


def _on_any_rank(changed: bool) -> bool:
    """Return whether hooks got something on any rank. All ranks must load it the same way."""
    _, changed_anywhere = (
        RankGroup()
        .open_session(TIMEOUT)
        .vote(
            "looking at what hooks have changed",
            lambda: None,
            lambda _: b"1" if changed else b"",
            lambda posted: b"1" if any(posted) else b"",
        )
    )
    return bool(changed_anywhere)


def _load_components(
    checkpoint: ResumedCheckpoint, training: TrainingObjects, reader_adapter: ReaderAdapter | None, *, strict: bool
) -> None:
    """Load some components of the checkpoint, or the states that hooks have made of them."""
    request = LoadRequest(
        path=checkpoint.path,
        tag=None,
        training=training,
        policy=RestorePolicy(strict=strict, cast_dtype=True, rng=False),
        verify=True,
    )
    if reader_adapter is not None:  # a tensor may be in memory on one rank and in a file on another
        request = replace(
            request, reader_adapter=reader_adapter, reader_adapter_text="as hooks have left it", share_reads="never"
        )
    load_with_fallback(request, RankGroup(), TIMEOUT)
