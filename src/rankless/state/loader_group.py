"""Several data loaders that are saved and restored as one, under names.

:func:`rankless.state.training.as_loader` makes one of a dict, on each rank. The states are stored: their keys are the
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.errors import InvalidArgumentError, MismatchError
from rankless.state.user_objects import check_stateful_object


class LoaderGroup:
    """Data loaders by name, with the methods of one.

    Raises ``InvalidArgumentError`` if one is no data loader that any number of ranks can resume.
    """

    def __init__(self, loaders: Mapping[str, Any]) -> None:
        if not loaders or not all(isinstance(name, str) for name in loaders):
            raise InvalidArgumentError(f"dataloader must be a loader, or a dict of them by name; got {loaders!r:.80}")
        for name, loader in loaders.items():
            check_stateful_object(loader, "the data loader")
            if not hasattr(loader, "load_state_dicts"):
                raise InvalidArgumentError(
                    f"dataloader: {name!r} is a {type(loader).__qualname__}, which has no load_state_dicts(states). Of "
                    "several loaders each must be a rankless.ResumableLoader or a rankless.StreamLoader"
                )
        self._loaders = dict(loaders)

    @property
    def needs_all_states(self) -> bool:
        """True if a load gives each rank the states of all ranks that saved."""
        return any(getattr(loader, "needs_all_states", False) for loader in self._loaders.values())

    @property
    def common_settings(self) -> tuple[str, str]:
        """The ranks that share the data of each loader, and the settings that must be equal on them, as text."""
        known = {name: getattr(loader, "common_settings", ("", "")) for name, loader in self._loaders.items()}
        shared = {name: both for name, both in known.items() if both[0]}
        members = "; ".join(f"{name}: {members}" for name, (members, _) in shared.items())
        return members, "; ".join(f"{name}: {settings}" for name, (_, settings) in shared.items())

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name."""
        return {name: loader.state_dict() for name, loader in self._loaders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each loader its state."""
        for name, loader in self._loaders.items():
            loader.load_state_dict(state[name])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give each loader its states of all ranks that saved."""
        for name, loader in self._loaders.items():
            loader.load_state_dicts([state[name] for state in states])

    def check_states(self, states: Sequence[Any]) -> None:
        """Raise ``MismatchError`` if the states are not those of these loaders. It changes nothing."""
        for state in states:
            if not isinstance(state, Mapping) or state.keys() != self._loaders.keys():
                saved = ", ".join(map(repr, state)) if isinstance(state, Mapping) else "one loader"
                raise MismatchError(f"the data loaders are {', '.join(map(repr, self._loaders))}; saved were: {saved}")
        for name, loader in self._loaders.items():
            check = getattr(loader, "check_states", None)
            if callable(check):
                check([state[name] for state in states])
