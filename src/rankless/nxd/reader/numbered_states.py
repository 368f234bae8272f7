"""The states of an optimizer by parameter name; NxD's files only contain parameter numbers.

Numbers count over all param groups of the optimizer of one pipeline stage. Within a group, parameters are in the order
of the model. The layout says which groups there are, and which parameters are in none.

:class:`~rankless.nxd.reader.nxd_reader.NxdReader` calls it on each rank that opens a checkpoint. The order of the
numbers must be the same as in NxD's optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader import zero_states
from rankless.nxd.reader.sharding_spec import ShardingSpec
from rankless.nxd.reader.unshard import Unsharder

#: The key of the number of the first group of experts' parameters, if these have separate groups.
_GROUP_OFFSET = "ep_param_group_offset"

#: Settings that are tuples in torch, and that NxD saves as lists.
_TUPLES = ("betas",)

#: Values of the ranks of a stage, by expert-parallel and tensor-parallel rank.
RankValues = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class PipelineStage:
    """One pipeline stage: models and optimizers by expert- and tensor-parallel rank; ``name`` is for messages."""

    name: str
    models: Sequence[Sequence[Mapping[str, StoredTensor]]]
    optimizers: Sequence[Sequence[Mapping[str, Any]]]

    @property
    def tensor_names(self) -> list[str]:
        """The names of the tensors of its model, in order."""
        return list(self.models[0][0])

    def shards_of(self, name: str) -> Sequence[Sequence[StoredTensor]]:
        """Return the shards of a tensor of the model by rank.

        Raises ``CorruptCheckpointError`` if a rank has none.
        """
        if not self._is_uniform:
            raise CorruptCheckpointError(f"{self.name}: ranks have different tensors in their models")
        return [[model[name] for model in row] for row in self.models]

    @cached_property
    def _is_uniform(self) -> bool:
        """True if all ranks have the same tensors. It is computed once, not for each tensor."""
        return all(model.keys() == self.models[0][0].keys() for row in self.models for model in row)


@dataclass(frozen=True)
class NumberedParameter:
    """A parameter: its number, its name in NxD, and the names of the whole parameters in it."""

    pid: Any
    name: str
    whole_names: Sequence[str]


def number_parameters(stage: PipelineStage, unsharder: Unsharder) -> list[list[NumberedParameter]]:
    """Return the parameters of each param group.

    Raises ``InvalidArgumentError`` if the layout does not fit the optimizer, ``CorruptCheckpointError`` if it has no
    groups.
    """
    root = stage.optimizers[0][0]
    groups = root.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CorruptCheckpointError(f"{stage.name}: the optimizer has no param groups")
    if not groups:
        return []
    pids_by_group = [list(group.get("params", ())) for group in groups]
    names_by_group = _names_by_group(stage, unsharder.spec, len(groups), root.get(_GROUP_OFFSET))
    parameters = []
    for number, (pids, group_names) in enumerate(zip(pids_by_group, names_by_group, strict=True)):
        if len(pids) != len(group_names):
            raise InvalidArgumentError(
                f"{stage.name}: group {number} of the optimizer has {len(pids)} parameters, and the layout puts "
                f"{len(group_names)} into it: {', '.join(group_names[:3])}…. NxD saves no names: the layout must list "
                "not_trained (buffers, frozen parameters) and, with several groups, the patterns of each"
            )
        parameters.append(
            [
                NumberedParameter(pid, name, _whole_names(stage, unsharder, pid, name))
                for pid, name in zip(pids, group_names, strict=True)
            ]
        )
    return parameters


def _names_by_group(stage: PipelineStage, spec: ShardingSpec, number: int, experts_from: int | None) -> list[list[str]]:
    """Return the names of the parameters in each param group."""
    names_by_group: list[list[str]] = [[] for _ in range(number)]
    trained = [name for name in stage.tensor_names if spec.is_trained(name)]
    is_filled = [len(group.get("params", ())) > 0 for group in stage.optimizers[0][0]["param_groups"]]
    if not spec.groups and experts_from is None and sum(is_filled) == 1:
        names_by_group[is_filled.index(True)] = trained
        return names_by_group
    if not spec.groups and sum(is_filled) > 1 and experts_from is None:
        raise InvalidArgumentError(
            f"{stage.name}: the optimizer has {number} groups, and the layout does not say which parameters are "
            "in which: "
            'add "groups", such as [["*bias", "*norm*"], ["*"]] in their order (the first that fits counts, so put '
            "the catch-all last and use the order of the optimizer)"
        )
    for name in _sort_by_groups(trained, spec):
        is_expert = experts_from is not None and spec.rule_for(name).experts
        index = spec.group_of(name) + (experts_from or 0 if is_expert else 0)
        if index >= number:
            raise InvalidArgumentError(
                f"{stage.name}: the layout puts {name!r} into group {index}, but the optimizer has {number} groups"
            )
        names_by_group[index].append(name)
    return names_by_group


def _sort_by_groups(trained: list[str], spec: ShardingSpec) -> list[str]:
    """Return the parameters in the order of the lists in ``groups``, or in the model's order for patterns."""
    listed = {name: index for index, name in enumerate(name for group in spec.groups for name in group)}
    return sorted(trained, key=listed.__getitem__) if all(name in listed for name in trained) else trained


def _whole_names(stage: PipelineStage, unsharder: Unsharder, pid: Any, name: str) -> list[str]:
    """Return the names of the whole parameters in an NxD parameter.

    Raises ``InvalidArgumentError`` if the shapes differ from the optimizer's shapes.
    """
    shards = stage.shards_of(name)
    for row, optimizers in zip(shards, stage.optimizers, strict=False):
        for stored, root in zip(row, optimizers, strict=True):
            shapes = root.get(zero_states.SHAPES)
            if isinstance(shapes, dict) and list(shapes.get(pid, ())) != list(stored.info.shape):
                raise InvalidArgumentError(
                    f"{stage.name}: parameter {pid} of the optimizer has shape {shapes.get(pid)}, and {name!r}, which "
                    f"should be it, has {list(stored.info.shape)}: the layout's not_trained or groups are not those "
                    "that it was trained with"
                )
    return list(_join_masters(stage, pid, name, unsharder) or unsharder.join_shards(name, shards, name))


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group without its parameters, in torch's types."""
    return {
        key: tuple(value) if key in _TUPLES and isinstance(value, list) else value
        for key, value in group.items()
        if key not in {"params", "param_names"}
    }


def optimizer_states(
    stage: PipelineStage, parameter: NumberedParameter, unsharder: Unsharder
) -> dict[str, dict[str, Any]]:
    """Return the states of the whole parameters in an NxD parameter, by parameter name and state name."""
    table = [[_parameter_states(root).get(parameter.pid, {}) for root in row] for row in stage.optimizers]
    if any(states.keys() != table[0][0].keys() for row in table for states in row):
        raise CorruptCheckpointError(
            f"{stage.name}: ranks have different states of {parameter.name!r}: their files are from two saves"
        )
    states_by_name: dict[str, dict[str, Any]] = {name: {} for name in parameter.whole_names}
    for state in table[0][0]:
        subject = f"{parameter.name}, {state}"
        if any(str(state) in joined for joined in states_by_name.values()):
            raise FormatError(f"{stage.name}: two states of {parameter.name!r} are called {str(state)!r}")
        values = [[states[state] for states in row] for row in table]
        for name, value in _join_state(parameter, subject, values, unsharder).items():
            states_by_name[name][str(state)] = value
    return states_by_name


def _parameter_states(root: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the states of a rank's optimizer, by parameter number."""
    key = zero_states.BASE if zero_states.is_zero(root) else "state"
    states = root.get(key)
    return states if isinstance(states, dict) else {}


def _join_state(parameter: NumberedParameter, subject: str, values: RankValues, unsharder: Unsharder) -> dict[str, Any]:
    """Join one state of all ranks, and return it by the names of the whole parameters."""
    first = values[0][0]
    flat_values = [value for row in values for value in row]
    if not isinstance(first, StoredTensor):
        if any(type(value) is not type(first) or value != first for value in flat_values):
            raise CorruptCheckpointError(
                f"{subject} is not the same on all ranks: their files are from two different steps"
            )
        return dict.fromkeys(parameter.whole_names, first)
    if not all(isinstance(value, StoredTensor) for value in flat_values):
        raise CorruptCheckpointError(f"{subject} is a tensor on some ranks only")
    if not first.info.shape:
        unsharder.evidence.copies.append((subject, flat_values))
        return dict.fromkeys(parameter.whole_names, first)
    return unsharder.join_shards(parameter.name, values, subject)


def master_weights(stage: PipelineStage, parameter: NumberedParameter, unsharder: Unsharder) -> dict[str, StoredTensor]:
    """Return the master weights of the whole parameters in an NxD parameter, by name; empty if none were saved."""
    return _join_masters(stage, parameter.pid, parameter.name, unsharder)


def _join_masters(stage: PipelineStage, pid: Any, name: str, unsharder: Unsharder) -> dict[str, StoredTensor]:
    weights = [[root.get(zero_states.MASTERS, {}).get(pid) for root in row] for row in stage.optimizers]
    if not any(value is not None for row in weights for value in row):
        return {}
    if not all(isinstance(value, StoredTensor) for row in weights for value in row):
        raise CorruptCheckpointError(f"{stage.name}: only some ranks have a master weight of {name!r}")
    return unsharder.join_shards(name, weights, f"{name}, master weight")
