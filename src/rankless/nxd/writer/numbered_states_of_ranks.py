"""The optimizer states of each NxD rank, by parameter number.

:class:`~rankless.nxd.writer.nxd_files.NxdWriter` makes one, on rank 0. Parameters must get the numbers that they have
in an optimizer of NxD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.errors import InvalidArgumentError
from rankless.formats.read_stored_tensor import digest_tensor
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader import zero_states
from rankless.nxd.writer import torch_files
from rankless.nxd.writer.nxd_options import NxdOptions
from rankless.nxd.writer.parameters import ShardedParameters
from rankless.nxd.writer.shard import ShardedParameter

#: The param groups of an optimizer, in the format of rankless's values.
Groups = Sequence[Mapping[str, Any]]

#: States of whole parameters, by parameter name and state name. A state is a tensor or another value.
States = Mapping[str, Mapping[str, Any]]


class ShardedOptimizerStates:
    """The optimizer states for the files of each rank. ``origin`` is the path that error messages name."""

    def __init__(
        self, groups: Groups, states: States, parameters: ShardedParameters, options: NxdOptions, origin: Path
    ) -> None:
        self._groups, self._states, self._parameters = groups, states, parameters
        self._options, self._origin = options, origin

    def rank_states(self, stage: Sequence[ShardedParameter], tp: int) -> list[dict[str, Any]]:
        """Return the states of all data-parallel ranks of a tensor-parallel rank.

        Without ZeRO-1 (``dp_size`` is ``None``) there is only one.
        """
        pids_by_group, numbered = self._number_parameters(stage)
        states = {
            pid: param_states
            for pid, parameter in numbered.items()
            if (param_states := self._parameter_states(parameter, tp))
        }
        groups = [
            {**group["settings"], "params": pids} for group, pids in zip(self._groups, pids_by_group, strict=True)
        ]
        if self._options.dp_size is None:
            return [{"state": states, "param_groups": groups}]
        local_tensors = {pid: self._parameters.local_tensor(parameter, tp) for pid, parameter in numbered.items()}
        shapes = {pid: list(tensor.info.shape) for pid, tensor in local_tensors.items()}
        root = {"state": {}, "param_groups": groups, zero_states.BASE: states, zero_states.SHAPES: shapes}
        if self._options.master_weights:
            root[zero_states.MASTERS] = {
                pid: torch_files.cast_tensor(tensor, "F32") for pid, tensor in local_tensors.items()
            }
        return zero_states.shard_zero_state(root, self._options.dp_size, self._origin)

    def _number_parameters(
        self, stage: Sequence[ShardedParameter]
    ) -> tuple[list[list[int]], dict[int, ShardedParameter]]:
        """Return the parameter numbers of each group, and the parameters by number.

        Raises ``InvalidArgumentError`` if an NxD parameter is made of parameters in different groups.
        """
        pids_by_group: list[list[int]] = []
        numbered: dict[int, ShardedParameter] = {}
        for group in self._groups:
            names = set(group["params"])
            members = [parameter for parameter in stage if not names.isdisjoint(parameter.names)]
            split = next((parameter for parameter in members if not names.issuperset(parameter.names)), None)
            if split is not None:
                raise InvalidArgumentError(
                    f"the NxD parameter {split.name!r} is made of parameters in different groups of the optimizer"
                )
            pids_by_group.append([len(numbered) + index for index in range(len(members))])
            numbered |= dict(zip(pids_by_group[-1], members, strict=True))
        return pids_by_group, numbered

    def _parameter_states(self, parameter: ShardedParameter, tp: int) -> dict[str, Any]:
        """Return the states of one parameter on a tensor-parallel rank, by state name."""
        whole_states = [self._states.get(name, {}) for name in parameter.names]
        if any(states.keys() != whole_states[0].keys() for states in whole_states):
            raise InvalidArgumentError(
                f"the NxD parameter {parameter.name!r} is made of parameters with different states"
            )
        return {
            state: self._shard_state(parameter, state, [states[state] for states in whole_states], tp)
            for state in whole_states[0]
        }

    def _shard_state(self, parameter: ShardedParameter, state: str, values: Sequence[Any], tp: int) -> Any:
        """Return one state of a parameter on a tensor-parallel rank: its shard, or a value that all ranks have."""
        first = values[0]
        if not isinstance(first, StoredTensor) or not first.info.shape:
            if not all(_are_equal(first, other) for other in values[1:]):
                raise InvalidArgumentError(
                    f"{state!r} differs among the parameters that the NxD parameter {parameter.name!r} is made of"
                )
            return first
        whole_values = dict(zip(parameter.names, values, strict=True))
        if any(
            whole_values[name].info.shape != self._parameters.whole_tensors[name].info.shape for name in whole_values
        ):
            if parameter.rule.dim is None or self._options.tp_size == 1 == len(values):
                return first
            raise InvalidArgumentError(
                f"cannot tell how tensor-parallel ranks divide {state!r} of {parameter.name!r}: its shape differs"
            )
        return self._parameters.local_state(parameter, tp, state, whole_values)


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, StoredTensor) and isinstance(other, StoredTensor):
        return value.info == other.info and digest_tensor(value) == digest_tensor(other)
    return type(value) is type(other) and bool(value == other)
