"""The states of an optimizer by the names of parameters, which NxD's files know by number only.

A number counts the parameters over all groups of the optimizer of one stage of the pipeline. Within a group they are in
the order of the model; which groups there are, and what is in no group at all, the layout says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.compat.nxd.format import zero
from holdfast.compat.nxd.format.sharding_spec import ShardingSpec
from holdfast.compat.nxd.format.unshard import Unsharder
from holdfast.errors import CorruptCheckpointError, FormatError, InvalidArgumentError
from holdfast.formats.stored_tensor import StoredTensor

#: The first group of experts' parameters, where these have groups of their own.
_GROUP_OFFSET = "ep_param_group_offset"

#: What torch has as a tuple, and NxD makes a list of.
_TUPLES = ("betas",)

#: What tensor-parallel ranks have of a stage, by their expert-parallel ranks.
Row = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class PipelineStage:
    """One stage of the pipeline: each rank's model, and each rank's optimizer; ``name`` is for messages."""

    name: str
    models: Sequence[Sequence[Mapping[str, StoredTensor]]]
    optimizers: Sequence[Sequence[Mapping[str, Any]]]

    @property
    def names(self) -> list[str]:
        """The tensors of its model, in order."""
        return list(self.models[0][0])

    def shards(self, name: str) -> Sequence[Sequence[StoredTensor]]:
        """What each rank has of a tensor of the model. Raises ``CorruptCheckpointError`` where one has none."""
        if not self._is_uniform:
            raise CorruptCheckpointError(f"{self.name}: ranks have different tensors in their models")
        return [[model[name] for model in row] for row in self.models]

    @cached_property
    def _is_uniform(self) -> bool:
        """Whether all ranks have the same tensors: looked at once, and not for each of many tensors."""
        return all(model.keys() == self.models[0][0].keys() for row in self.models for model in row)


@dataclass(frozen=True)
class KnownParameters:
    """A parameter: its number, its name in NxD, and those of what it becomes."""

    pid: Any
    name: str
    whole: Sequence[str]


def number_parameters(stage: PipelineStage, assembly: Unsharder) -> list[list[KnownParameters]]:
    """The parameters of each group. Raises ``InvalidArgumentError`` where the layout does not fit the optimizer."""
    root = stage.optimizers[0][0]
    groups = root.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CorruptCheckpointError(f"{stage.name}: the optimizer has no groups of parameters")
    if not groups:
        return []
    numbers = [list(group.get("params", ())) for group in groups]
    names = _by_group(stage, assembly.spec, len(groups), root.get(_GROUP_OFFSET))
    found = []
    for number, (pids, own) in enumerate(zip(numbers, names, strict=True)):
        if len(pids) != len(own):
            raise InvalidArgumentError(
                f"{stage.name}: group {number} of the optimizer has {len(pids)} parameters, and the layout puts "
                f"{len(own)} into it: {', '.join(own[:3])}…. NxD keeps no names: the layout must say what is "
                "not_trained (buffers, frozen parameters), and with several groups which patterns are in which"
            )
        found.append(
            [
                KnownParameters(pid, name, _whole(stage, assembly, pid, name))
                for pid, name in zip(pids, own, strict=True)
            ]
        )
    return found


def _by_group(stage: PipelineStage, spec: ShardingSpec, number: int, experts_from: int | None) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(number)]
    trained = [name for name in stage.names if spec.is_trained(name)]
    filled = [len(group.get("params", ())) > 0 for group in stage.optimizers[0][0]["param_groups"]]
    if not spec.groups and experts_from is None and sum(filled) == 1:
        found[filled.index(True)] = trained
        return found
    if not spec.groups and sum(filled) > 1 and experts_from is None:
        raise InvalidArgumentError(
            f"{stage.name}: the optimizer has {number} groups, and the layout does not say which parameters are "
            "in which: "
            'add "groups", such as [["*bias", "*norm*"], ["*"]] in their order (the first that fits counts, so put '
            "the catch-all last and use the order of the optimizer)"
        )
    for name in _ordered(trained, spec):
        is_expert = experts_from is not None and spec.rule(name).experts
        place = spec.group(name) + (experts_from or 0 if is_expert else 0)
        if place >= number:
            raise InvalidArgumentError(f"{stage.name}: the layout puts {name!r} into group {place} of {number}")
        found[place].append(name)
    return found


def _ordered(trained: list[str], spec: ShardingSpec) -> list[str]:
    """As groups list them by their names; in the order of the model where groups are told by patterns."""
    listed = {name: index for index, name in enumerate(name for group in spec.groups for name in group)}
    return sorted(trained, key=listed.__getitem__) if all(name in listed for name in trained) else trained


def _whole(stage: PipelineStage, assembly: Unsharder, pid: Any, name: str) -> list[str]:
    shards = stage.shards(name)
    for row, optimizers in zip(shards, stage.optimizers, strict=False):
        for stored, root in zip(row, optimizers, strict=True):
            shapes = root.get(zero.SHAPES)
            if isinstance(shapes, dict) and list(shapes.get(pid, ())) != list(stored.info.shape):
                raise InvalidArgumentError(
                    f"{stage.name}: parameter {pid} of the optimizer has shape {shapes.get(pid)}, and {name!r}, which "
                    f"should be it, has {list(stored.info.shape)}: the layout's not_trained or groups are not those "
                    "that it was trained with"
                )
    return list(_masters(stage, pid, name, assembly) or assembly.whole(name, shards, name))


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says but for its parameters, as torch has it."""
    return {
        key: tuple(value) if key in _TUPLES and isinstance(value, list) else value
        for key, value in group.items()
        if key not in {"params", "param_names"}
    }


def optimizer_states(stage: PipelineStage, known: KnownParameters, assembly: Unsharder) -> dict[str, dict[str, Any]]:
    """The states of what a parameter becomes, by name."""
    table = [[_own(root).get(known.pid, {}) for root in row] for row in stage.optimizers]
    if any(own.keys() != table[0][0].keys() for row in table for own in row):
        raise CorruptCheckpointError(
            f"{stage.name}: ranks have different states of {known.name!r}: they are of two saves"
        )
    found: dict[str, dict[str, Any]] = {name: {} for name in known.whole}
    for state in table[0][0]:
        what = f"{known.name}, {state}"
        if any(str(state) in own for own in found.values()):
            raise FormatError(f"{stage.name}: two states of {known.name!r} are called {str(state)!r}")
        values = [[own[state] for own in row] for row in table]
        for name, value in _state(known, what, values, assembly).items():
            found[name][str(state)] = value
    return found


def _own(root: Mapping[str, Any]) -> Mapping[Any, Any]:
    key = zero.BASE if zero.is_zero(root) else "state"
    own = root.get(key)
    return own if isinstance(own, dict) else {}


def _state(known: KnownParameters, what: str, values: Row, assembly: Unsharder) -> dict[str, Any]:
    first = values[0][0]
    every = [value for row in values for value in row]
    if not isinstance(first, StoredTensor):
        if any(type(value) is not type(first) or value != first for value in every):
            raise CorruptCheckpointError(f"{what} is not the same on all ranks: they are of two different steps")
        return dict.fromkeys(known.whole, first)
    if not all(isinstance(value, StoredTensor) for value in every):
        raise CorruptCheckpointError(f"{what} is a tensor on some ranks only")
    if not first.info.shape:
        assembly.evidence.copies.append((what, every))
        return dict.fromkeys(known.whole, first)
    return assembly.whole(known.name, values, what)


def master_weights(stage: PipelineStage, known: KnownParameters, assembly: Unsharder) -> dict[str, StoredTensor]:
    """The master weights of what a parameter becomes, by name; none where none were saved."""
    return _masters(stage, known.pid, known.name, assembly)


def _masters(stage: PipelineStage, pid: Any, name: str, assembly: Unsharder) -> dict[str, StoredTensor]:
    every = [[root.get(zero.MASTERS, {}).get(pid) for root in row] for row in stage.optimizers]
    if not any(value is not None for row in every for value in row):
        return {}
    if not all(isinstance(value, StoredTensor) for row in every for value in row):
        raise CorruptCheckpointError(f"{stage.name}: only some ranks have a master weight of {name!r}")
    return assembly.whole(name, every, f"{name}, master weight")
