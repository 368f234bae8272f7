"""What is loaded: straight from the checkpoint into the tensors, or what hooks have made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.engine.ranks import Ranks
from holdfast.falling_back import load
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader
from holdfast.functions import restore
from holdfast.lightning.given import GivenModel, given_optimizers
from holdfast.lightning.lazy import LazyDict
from holdfast.lightning.opened import Opened
from holdfast.lightning.saves import TIMEOUT
from holdfast.request import LoadRequest
from holdfast.state.capture import Training
from holdfast.state.restore import Policy

#: How a checkpoint is seen.
Seen = Callable[[Reader], Reader]


def load_model(opened: Opened, given: Mapping[str, Any], model: nn.Module, *, strict: bool) -> None:
    """Fill a model with the state dict that hooks have left. dtypes may differ, as for ``Module.load_state_dict``."""
    if _on_any_rank(given is not opened.model or opened.model.is_touched):
        _load(opened, Training(model=model), partial(GivenModel, entries=given), strict=strict)
    else:
        restore(opened.path, None, model, strict=strict, rng=False, map_dtype=True)


def load_optimizers(
    opened: Opened, given: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], model: nn.Module
) -> None:
    """Fill as many optimizers as there are states, by the names of the model's parameters; then the random states.

    Lightning, too, leaves the others as they are.
    """
    wanted = list(optimizers)[: len(given)]
    is_same = len(given) == len(opened.optimizers) and all(map(_is_same, given, opened.optimizers))
    changed = _on_any_rank(not is_same)
    if wanted:
        training = Training(optimizer=wanted, named_by=model)
        _load(opened, training, partial(given_optimizers, states=given) if changed else None, strict=True)
    if isinstance(opened.reader, NativeReader):  # Lightning's own files have no random states
        restore(opened.path, rng=True)


def _is_same(given: Any, stored: LazyDict) -> bool:
    return given is stored and not stored.is_made


def _on_any_rank(changed: bool) -> bool:
    """Whether hooks have changed or looked at something on any rank. All ranks must load it the same way."""
    _, told = (
        Ranks()
        .session(TIMEOUT)
        .vote(
            "looking at what hooks have changed",
            lambda: None,
            lambda _: b"1" if changed else b"",
            lambda posted: b"1" if any(posted) else b"",
        )
    )
    return bool(told)


def _load(opened: Opened, training: Training, seen: Seen | None, *, strict: bool) -> None:
    """Load a part of what is in the checkpoint, or of what hooks have made of it."""
    request = LoadRequest(
        path=opened.path,
        tag=None,
        training=training,
        policy=Policy(strict=strict, map_dtype=True, rng=False),
        verify=True,
    )
    if seen is not None:  # what one rank has in memory, another may have in a file
        request = replace(request, seen=seen, seen_as="as hooks have left it", exchange="never")
    load(request, Ranks(), TIMEOUT)
