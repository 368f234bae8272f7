"""The states of torchtitan's data loaders, which belong to data-parallel ranks and not to single processes.

:class:`~rankless.torchtitan.manager.CheckpointManager` makes one on each rank; :mod:`rankless.state.rank_states` takes
and restores states, in the votes of saves and loads. The key ``dp_rank_N`` is torchtitan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.errors import MismatchError

#: The start of the keys that hold the position of one data-parallel rank.
_DP_RANK = "dp_rank_"

#: The key of the number of data-parallel ranks.
_DP_SIZE = "world_size"


class DataLoaderStates:
    """A data loader of torchtitan: its state has a key such as ``dp_rank_3``, here on data-parallel rank 3.

    In another parallel layout a process may have another data-parallel rank. So a load passes on the keys of all
    processes, as torchtitan's own checkpoints do.
    """

    #: A load passes the states of all ranks, also if as many ranks load as saved.
    needs_all_states = True

    def __init__(self, loader: Any, rank: int, size: int) -> None:
        """``rank`` and ``size``: of the processes that load together."""
        self._loader, self._rank, self._size = loader, rank, size

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the only process that saved."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of all processes that saved."""
        self._loader.load_state_dict(self._merge(states))

    def check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``MismatchError`` if the states have no position for this process."""
        saved, expected = self._merge(states), self._loader.state_dict()
        positions = {key for key in saved if key.startswith(_DP_RANK)}
        if not positions and len(states) != self._size:
            raise MismatchError(
                f"the data loader was saved by {len(states)} ranks and is loaded by {self._size}, and its state has no "
                f"keys {_DP_RANK}N: {_advice()}"
            )
        needed = {key for key in expected if key.startswith(_DP_RANK)}
        is_resized = _DP_SIZE in saved and saved[_DP_SIZE] != expected.get(_DP_SIZE, saved[_DP_SIZE])
        if is_resized or needed - positions:
            raise MismatchError(
                f"the data loader was saved with {saved.get(_DP_SIZE, len(positions))} data-parallel ranks, now there "
                f"are {expected.get(_DP_SIZE, 'others')}, and its positions cannot be divided again: {_advice()}"
            )

    def _merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of this process, with the positions of all data-parallel ranks."""
        of_process = states[self._rank if len(states) == self._size else 0]
        positions = {key: value for state in states for key, value in state.items() if key.startswith(_DP_RANK)}
        return {**of_process, **positions}


def _advice() -> str:
    return "set exclude_from_loading=['dataloader'] to let the data start over"
