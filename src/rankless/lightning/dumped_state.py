"""The state that a ``Trainer`` puts into a checkpoint's dict to save it, compared with the state left by hooks.

A ``Trainer`` strategy has one on each rank for each dump. The state that hooks have left must be saved, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import InvalidArgumentError
from rankless.lightning.checkpoints import TIMEOUT
from rankless.lightning.container_trees import copy_containers, has_same_leaves
from rankless.lightning.edited_optimizer import edited_optimizers
from rankless.lightning.hook_overrides import NotRead
from rankless.state.model.fsdp1 import uses_fsdp1
from rankless.state.model.replaced_entries import ReplacedModel

_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"


@dataclass(frozen=True)
class DumpedComponents:
    """The components of a native checkpoint."""

    model: Any
    optimizer: list[Optimizer] | None
    content: dict[str, Any]


class DumpedState:
    """Remembers the dict's state, to detect whether a hook has replaced the model or the optimizers."""

    def __init__(self) -> None:
        self._recorded_model: Any = None
        self._recorded_entries: dict[str, Any] = {}
        self._recorded_optimizers: list[Any] = []

    def record_model(self, state_dict: Any) -> Any:
        """Record the model's state dict, and return it."""
        self._recorded_model = state_dict
        self._recorded_entries = {} if isinstance(state_dict, NotRead) else dict(state_dict)
        return state_dict

    def record_optimizer(self, state_dict: Any) -> Any:
        """Record the state dict of the next optimizer, and return it."""
        self._recorded_optimizers.append(copy_containers(state_dict))
        return state_dict

    def collect_components(
        self, checkpoint: Mapping[str, Any], model: Any, optimizers: Sequence[Optimizer]
    ) -> DumpedComponents:
        """Return the components to save.

        Hooks may have run on rank 0 alone, and Lightning saves rank 0's dict of a replicated model. All ranks raise
        ``InvalidArgumentError`` if the dict cannot be saved.

        Every rank calls it: it holds the vote "looking at what hooks have changed".
        """
        session = RankGroup().open_session(TIMEOUT)

        to_save: list[Optimizer] = []

        def check_changes() -> _RemainingFlags:
            to_save.extend(self._as_left(checkpoint.get(_OPTIMIZERS), model, optimizers))
            same = _MODEL not in checkpoint or self._is_same(checkpoint[_MODEL])
            if not same and uses_fsdp1(model):
                raise InvalidArgumentError(
                    "a hook or callback has changed checkpoint['state_dict'], which cannot be saved under FSDP1: use "
                    "ModelParallelStrategy (FSDP2), or checkpoint_format='lightning'"
                )
            return _RemainingFlags(same, _MODEL in checkpoint, bool(checkpoint.get(_OPTIMIZERS)))

        def merge_flags(posted: list[bytes]) -> bytes:
            flags_by_rank = [_decode_flags(raw) for raw in posted]
            return _encode_flags(
                flags_by_rank[COORDINATOR_RANK]._replace(is_same=all(flags.is_same for flags in flags_by_rank))
            )

        _, merged = session.vote("looking at what hooks have changed", check_changes, _encode_flags, merge_flags)
        remaining = _decode_flags(merged)
        content = {name: value for name, value in checkpoint.items() if name not in {_MODEL, _OPTIMIZERS}}
        if _OPTIMIZERS in checkpoint and not remaining.has_optimizers:
            content[_OPTIMIZERS] = []  # distinguishes it from a checkpoint of weights alone
        model_to_save = (
            model
            if remaining.is_same
            else ReplacedModel(model, _entries_of_rank(checkpoint.get(_MODEL, {}), session.rank))
        )
        return DumpedComponents(
            model_to_save if remaining.has_model else None,
            to_save if remaining.has_optimizers else None,
            content,
        )

    def _is_same(self, remaining: Any) -> bool:
        if isinstance(self._recorded_model, NotRead):
            return remaining is self._recorded_model
        entries = self._recorded_entries
        is_there = self._recorded_model is not None and remaining.keys() == entries.keys()
        return is_there and all(remaining[name] is value for name, value in entries.items())

    def _as_left(self, remaining: Any, model: Any, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the optimizers themselves, or copies if hooks have left other states or values than theirs."""
        if not remaining or has_same_leaves(copy_containers(list(remaining)), self._recorded_optimizers):
            return list(optimizers)
        return edited_optimizers(optimizers, remaining, model)


class _RemainingFlags(NamedTuple):
    """Flags of the dict after hooks: whether the model is unchanged, and whether there are a model and optimizers."""

    is_same: bool
    has_model: bool
    has_optimizers: bool


def _encode_flags(remaining: _RemainingFlags) -> bytes:
    return bytes(remaining)


def _decode_flags(raw: bytes) -> _RemainingFlags:
    return _RemainingFlags(*map(bool, raw))


def _entries_of_rank(entries: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the entries that a rank saves: its shards of sharded tensors, and on rank 0 the replicated values too."""
    return {name: value for name, value in entries.items() if rank == COORDINATOR_RANK or isinstance(value, DTensor)}
