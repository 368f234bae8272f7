"""What a ``Trainer`` has put into a checkpoint's dict to be saved, and what hooks and callbacks have left of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.engine.comm.session import RankGroup
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.errors import InvalidArgumentError
from holdfast.lightning.checkpoints import TIMEOUT
from holdfast.lightning.lazy_state import LazyStateDict
from holdfast.state.model.fsdp1 import wrapped_modules
from holdfast.state.model.replaced_entries import ReplacedModel

_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"


@dataclass(frozen=True)
class DumpedParts:
    """What a native checkpoint is made of."""

    model: Any
    optimizer: list[Optimizer] | None
    content: dict[str, Any]


class DumpedState:
    """Remembers what was put into the dict, to tell whether it is still the model and the optimizers themselves."""

    def __init__(self) -> None:
        self._given: Any = None
        self._entries: dict[str, Any] = {}
        self._optimizers: list[LazyStateDict] = []

    def model(self, given: Any) -> Any:
        """Note the model's state dict, and return it."""
        self._given = given
        self._entries = {} if isinstance(given, LazyStateDict) else dict(given)
        return given

    def optimizer(self, given: LazyStateDict) -> Any:
        """Note the state dict of the next optimizer, and return it."""
        self._optimizers.append(given)
        return given

    def parts(self, checkpoint: Mapping[str, Any], model: Any, optimizers: Sequence[Optimizer]) -> DumpedParts:
        """What is saved. Hooks may have run on rank 0 alone, whose dict is what Lightning saves of replicas.

        All ranks raise ``InvalidArgumentError`` if it cannot be saved.
        """
        session = RankGroup().session(TIMEOUT)

        def work() -> _Left:
            self._check_optimizers(checkpoint.get(_OPTIMIZERS))
            same = _MODEL not in checkpoint or self._is_same(checkpoint[_MODEL])
            if not same and wrapped_modules(model):
                raise InvalidArgumentError(
                    "a hook or callback has changed checkpoint['state_dict'], which cannot be saved under FSDP1: use "
                    "ModelParallelStrategy (FSDP2), or checkpoint_format='lightning'"
                )
            return _Left(same, _MODEL in checkpoint, bool(checkpoint.get(_OPTIMIZERS)))

        def decide(posted: list[bytes]) -> bytes:
            said = [_decode(raw) for raw in posted]
            return _encode(said[COORDINATOR_RANK]._replace(is_same=all(one.is_same for one in said)))

        _, told = session.vote("looking at what hooks have changed", work, _encode, decide)
        left = _decode(told)
        content = {name: _plain(one) for name, one in checkpoint.items() if name not in {_MODEL, _OPTIMIZERS}}
        if _OPTIMIZERS in checkpoint and not left.optimizers:
            content[_OPTIMIZERS] = []  # which tells it from a checkpoint of weights alone
        own = model if left.is_same else ReplacedModel(model, _of_rank(checkpoint.get(_MODEL, {}), session.rank))
        return DumpedParts(own if left.model else None, list(optimizers) if left.optimizers else None, content)

    def _is_same(self, left: Any) -> bool:
        if isinstance(self._given, LazyStateDict):
            return left is self._given and not self._given.is_changed
        known = self._entries
        is_there = self._given is not None and left.keys() == known.keys()
        return is_there and all(left[name] is one for name, one in known.items())

    def _check_optimizers(self, left: Any) -> None:
        same = not left or (
            len(left) == len(self._optimizers)
            and all(one is given and not given.is_changed for one, given in zip(left, self._optimizers, strict=True))
        )
        if not same:
            raise InvalidArgumentError(
                "a hook or callback has changed checkpoint['optimizer_states'], and a native checkpoint takes the "
                "optimizers as they are: change the optimizers, or empty that list to save none, or use "
                "checkpoint_format='lightning'"
            )


class _Left(NamedTuple):
    """What hooks have left of the dict: whether it has the model itself, any model, any states of optimizers."""

    is_same: bool
    model: bool
    optimizers: bool


def _encode(left: _Left) -> bytes:
    return bytes(left)


def _decode(raw: bytes) -> _Left:
    return _Left(*map(bool, raw))


def _of_rank(entries: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The entries that a rank saves: all have parts of sharded tensors, and of replicas rank 0 has those that count."""
    return {name: value for name, value in entries.items() if rank == COORDINATOR_RANK or isinstance(value, DTensor)}


def _plain(value: Any) -> Any:
    """A state dict that a hook has put under another key, as it is now."""
    return dict(value) if isinstance(value, LazyStateDict) else value
