"""What is loaded: straight from the checkpoint into the tensors, or what hooks have made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.api import restore
from holdfast.engine.comm.session import RankGroup
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader
from holdfast.lightning.checkpoint_dict import ResumedCheckpoint
from holdfast.lightning.checkpoints import TIMEOUT
from holdfast.lightning.hooked_state import HookedModel, hooked_optimizers
from holdfast.lightning.lazy_state import LazyStateDict
from holdfast.load.fallback import load_with_fallback
from holdfast.load.request import LoadRequest
from holdfast.state.restore import RestorePolicy
from holdfast.state.training import TrainingObjects

#: How a checkpoint is seen.
Seen = Callable[[Reader], Reader]


def load_model(opened: ResumedCheckpoint, given: Mapping[str, Any], model: nn.Module, *, strict: bool) -> None:
    """Fill a model with the state dict that hooks have left. dtypes may differ, as for ``Module.load_state_dict``."""
    if _on_any_rank(given is not opened.model or opened.model.is_touched):
        _load(opened, TrainingObjects(model=model), partial(HookedModel, entries=given), strict=strict)
    else:
        restore(opened.path, None, model, strict=strict, rng=False, cast_dtype=True)


def load_optimizers(
    opened: ResumedCheckpoint, given: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], model: nn.Module
) -> None:
    """Fill as many optimizers as there are states, by the names of the model's parameters; then the random states.

    Lightning, too, leaves the others as they are.
    """
    wanted = list(optimizers)[: len(given)]
    is_same = len(given) == len(opened.optimizers) and all(map(_is_same, given, opened.optimizers))
    changed = _on_any_rank(not is_same)
    if wanted:
        training = TrainingObjects(optimizer=wanted, named_by=model)
        _load(opened, training, partial(hooked_optimizers, states=given) if changed else None, strict=True)
    if isinstance(opened.reader, NativeReader):  # Lightning's own files have no random states
        restore(opened.path, rng=True)


def _is_same(given: Any, stored: LazyStateDict) -> bool:
    return given is stored and not stored.is_made


def _on_any_rank(changed: bool) -> bool:
    """Whether hooks have changed or looked at something on any rank. All ranks must load it the same way."""
    _, told = (
        RankGroup()
        .session(TIMEOUT)
        .vote(
            "looking at what hooks have changed",
            lambda: None,
            lambda _: b"1" if changed else b"",
            lambda posted: b"1" if any(posted) else b"",
        )
    )
    return bool(told)


def _load(opened: ResumedCheckpoint, training: TrainingObjects, seen: Seen | None, *, strict: bool) -> None:
    """Load a part of what is in the checkpoint, or of what hooks have made of it."""
    request = LoadRequest(
        path=opened.path,
        tag=None,
        training=training,
        policy=RestorePolicy(strict=strict, cast_dtype=True, rng=False),
        verify=True,
    )
    if seen is not None:  # what one rank has in memory, another may have in a file
        request = replace(request, seen=seen, seen_as="as hooks have left it", share_reads="never")
    load_with_fallback(request, RankGroup(), TIMEOUT)
