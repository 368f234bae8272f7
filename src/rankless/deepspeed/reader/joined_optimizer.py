"""An optimizer of whole parameters, with their names.

The readers of optimizers return one, on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.stored_tensor import StoredTensor


@dataclass
class JoinedOptimizer:
    """The optimizer of whole parameters.

    Attributes:
        masters: The master weights by parameter.
        states: The states by parameter and name.
        groups: The settings of each group, with the names of its parameters under ``params``.
        replicas: Tensors that all ranks should have alike, such as the number of steps, each with a label.
        values: Values that are not per group, of the first rank.
    """

    masters: dict[str, StoredTensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    replicas: list[tuple[str, Sequence[StoredTensor]]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def merge_stage(self, other: JoinedOptimizer, source: str) -> None:
        """Add the optimizer of a further pipeline stage. Of a parameter that both have, the first one's is kept."""
        if not self.groups:
            self.groups = [{**group, "params": []} for group in other.groups]
        if [_settings_of(group) for group in self.groups] != [_settings_of(group) for group in other.groups]:
            raise CorruptCheckpointError(f"{source}: its groups have other settings than those of an earlier stage")
        for group, added in zip(self.groups, other.groups, strict=True):
            group["params"] += [name for name in added["params"] if name not in self.masters]
        self.replicas += other.replicas
        self.replicas += [
            (f"master weight of {name!r:.100}", (self.masters[name], master))
            for name, master in other.masters.items()
            if name in self.masters
        ]
        self.masters = {**other.masters, **self.masters}
        self.states = {**other.states, **self.states}
        self.values = {**other.values, **self.values}

    def rename_parameters(self, names: Mapping[str, str]) -> None:
        """Give some parameters other names."""
        self.masters = {names.get(name, name): master for name, master in self.masters.items()}
        self.states = {names.get(name, name): states for name, states in self.states.items()}
        for group in self.groups:
            group["params"] = [names.get(name, name) for name in group["params"]]


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
