"""The parameters of a checkpoint as NxD has them: by stage, and what each tensor-parallel rank has of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.compat.nxd.convert.options import NxdOptions
from holdfast.compat.nxd.format.file_names import MODEL
from holdfast.compat.nxd.format.shard import ShardedTensor, local_slices, shard_tensor, stored_slices
from holdfast.compat.nxd.format.sharding_spec import number_of
from holdfast.conversion.target import ConversionSource
from holdfast.errors import InvalidArgumentError
from holdfast.formats.stored_tensor import StoredTensor


class ShardedParameters:
    """Those of the model, divided as a layout says."""

    def __init__(self, material: ConversionSource, options: NxdOptions, trained: Sequence[str]) -> None:
        """Those that are ``trained`` come first. Raises ``InvalidArgumentError`` where the layout does not fit."""
        self._chosen, self._options, self._spec = material.chosen, options, options.spec
        self._tied = material.chosen.tied.get(MODEL, {})
        names = [*material.chosen.group(MODEL), *self._tied]
        known = set(names)
        self._every = shard_tensor(self._spec, [*(one for one in trained if one in known), *names])
        #: Whole tensors, by the names of parameters.
        self.whole = {
            name: stored_slices(material.reader, *material.chosen.sources[MODEL, self._tied.get(name, name)])
            for name in names
        }
        self._locals: dict[tuple[int, str, str], StoredTensor] = {}

    def stages(self) -> list[list[ShardedTensor]]:
        """Those of each stage. Raises ``InvalidArgumentError`` where layers cannot be divided evenly."""
        numbers = [number_of(self._spec.layer, one.name) for one in self._every] if self._spec.layer else []
        layers = max((found + 1 for found in numbers if found is not None), default=1)
        stages: list[list[ShardedTensor]] = [[] for _ in range(self._options.pp_size)]
        if len(stages) > 1 and layers % len(stages):
            raise InvalidArgumentError(f"{layers} layers cannot be divided evenly among {len(stages)} stages")
        for one in self._every:
            stages[self._spec.stage(one.name, layers, len(stages))].append(one)
        return stages

    def dtype(self, one: ShardedTensor) -> str:
        """The dtype that a parameter gets."""
        return self._chosen.infos[MODEL, self._tied.get(one.names[0], one.names[0])].dtype

    def local(self, one: ShardedTensor, tp: int) -> StoredTensor:
        """What a tensor-parallel rank has of a parameter, in the dtype of the source; the same object each time."""
        return self.local_of(one, tp, "", self.whole)

    def local_of(self, one: ShardedTensor, tp: int, state: str, whole: Mapping[str, StoredTensor]) -> StoredTensor:
        """The same of a state that is divided as its parameter is; ``whole`` has those of all that it is made of."""
        key = (tp if one.rule.dim is not None else 0, one.name, state)
        if key not in self._locals:
            self._locals[key] = local_slices(one, whole, self._options.tp_size, tp)
        return self._locals[key]
