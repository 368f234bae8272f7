"""The states of an optimizer as ranks of NxD have them, by number of parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.convert import torch_files
from holdfast.compat.nxd.convert.options import NxdOptions
from holdfast.compat.nxd.convert.parameters import ShardedParameters
from holdfast.compat.nxd.format import zero
from holdfast.compat.nxd.format.consistency import digest_evidence
from holdfast.compat.nxd.format.shard import ShardedTensor
from holdfast.errors import InvalidArgumentError
from holdfast.formats.stored_tensor import StoredTensor

#: The groups of an optimizer, as values have them.
Groups = Sequence[Mapping[str, Any]]

#: States of whole parameters, by parameter and state, tensors and others.
States = Mapping[str, Mapping[str, Any]]


class ShardedOptimizerStates:
    """What goes into the files of each rank. ``source`` is named where it does not fit."""

    def __init__(
        self, groups: Groups, states: States, parameters: ShardedParameters, options: NxdOptions, source: Path
    ) -> None:
        self._groups, self._states, self._parameters = groups, states, parameters
        self._options, self._source = options, source

    def of(self, stage: Sequence[ShardedTensor], tp: int) -> list[dict[str, Any]]:
        """Those of all data-parallel ranks of a tensor-parallel one; of one where it is no ZeRO-1 optimizer."""
        rows, numbered = self._numbered(stage)
        own = {pid: found for pid, one in numbered.items() if (found := self._own(one, tp))}
        groups = [{**group["settings"], "params": row} for group, row in zip(self._groups, rows, strict=True)]
        if self._options.dp_size is None:
            return [{"state": own, "param_groups": groups}]
        here = {pid: self._parameters.local(one, tp) for pid, one in numbered.items()}
        shapes = {pid: list(one.info.shape) for pid, one in here.items()}
        root = {"state": {}, "param_groups": groups, zero.BASE: own, zero.SHAPES: shapes}
        if self._options.master_weights:
            root[zero.MASTERS] = {pid: torch_files.cast_provider(one, "F32") for pid, one in here.items()}
        return zero.shard_zero_state(root, self._options.dp_size, self._source)

    def _numbered(self, stage: Sequence[ShardedTensor]) -> tuple[list[list[int]], dict[int, ShardedTensor]]:
        """The numbers in each group, and what has them."""
        rows: list[list[int]] = []
        numbered: dict[int, ShardedTensor] = {}
        for group in self._groups:
            names = set(group["params"])
            members = [one for one in stage if not names.isdisjoint(one.names)]
            apart = next((one for one in members if not names.issuperset(one.names)), None)
            if apart is not None:
                raise InvalidArgumentError(
                    f"{apart.name!r} of NxD is made of parameters in different groups of the optimizer"
                )
            rows.append([len(numbered) + index for index in range(len(members))])
            numbered |= dict(zip(rows[-1], members, strict=True))
        return rows, numbered

    def _own(self, one: ShardedTensor, tp: int) -> dict[str, Any]:
        every = [self._states.get(name, {}) for name in one.names]
        if any(own.keys() != every[0].keys() for own in every):
            raise InvalidArgumentError(f"{one.name!r} of NxD is made of parameters with different states")
        return {state: self._state(one, state, [own[state] for own in every], tp) for state in every[0]}

    def _state(self, one: ShardedTensor, state: str, row: Sequence[Any], tp: int) -> Any:
        first = row[0]
        if not isinstance(first, StoredTensor) or not first.info.shape:
            if not all(_same(first, other) for other in row[1:]):
                raise InvalidArgumentError(f"{state!r} differs among what {one.name!r} of NxD is made of")
            return first
        whole = dict(zip(one.names, row, strict=True))
        if any(whole[name].info.shape != self._parameters.whole[name].info.shape for name in whole):
            if one.rule.dim is None or self._options.tp_size == 1 == len(row):
                return first
            raise InvalidArgumentError(
                f"how tensor-parallel ranks would divide {state!r} of {one.name!r}, nobody can tell"
            )
        return self._parameters.local_of(one, tp, state, whole)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, StoredTensor) and isinstance(other, StoredTensor):
        return one.info == other.info and digest_evidence(one) == digest_evidence(other)
    return type(one) is type(other) and bool(one == other)
