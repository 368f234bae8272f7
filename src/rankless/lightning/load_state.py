"""Loading: straight from the checkpoint into the tensors, or from the dict that hooks have changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rankless.api import restore
from rankless.engine.comm.session import RankGroup
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader
from rankless.lightning.checkpoint_dict import ResumedCheckpoint
from rankless.lightning.checkpoints import TIMEOUT
from rankless.lightning.hooked_state import HookedModel, hooked_optimizers
from rankless.lightning.lazy_state import LazyStateDict
from rankless.load.fallback import load_with_fallback
from rankless.load.load_request import LoadRequest
from rankless.state.restore import RestorePolicy
from rankless.state.training import TrainingObjects

#: Wraps the reader of a checkpoint.
ReaderAdapter = Callable[[Reader], Reader]


def load_model(checkpoint: ResumedCheckpoint, state_dict: Mapping[str, Any], model: nn.Module, *, strict: bool) -> None:
    """Fill a model with the state dict that hooks have left. Cast dtypes as ``Module.load_state_dict`` does."""
    if _on_any_rank(state_dict is not checkpoint.model or checkpoint.model.is_touched):
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

    Further optimizers are left unchanged, as in Lightning.
    """
    filled = list(optimizers)[: len(states)]
    is_same = len(states) == len(checkpoint.optimizers) and all(map(_is_same, states, checkpoint.optimizers))
    changed = _on_any_rank(not is_same)
    if filled:
        training = TrainingObjects(optimizer=filled, naming_model=model)
        _load_components(
            checkpoint, training, partial(hooked_optimizers, states=states) if changed else None, strict=True
        )
    if isinstance(checkpoint.reader, NativeReader):  # Lightning's own files have no random states
        restore(checkpoint.path, rng=True)


def _is_same(state: Any, stored: LazyStateDict) -> bool:
    return state is stored and not stored.is_created


def _on_any_rank(changed: bool) -> bool:
    """Return whether hooks have changed or read something on any rank. All ranks must load it the same way."""
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
    """Load some components of the checkpoint, or of what hooks have made of them."""
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
