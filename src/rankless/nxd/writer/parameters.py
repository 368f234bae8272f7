"""The parameters of a checkpoint in NxD's layout: by pipeline stage and tensor-parallel rank.

:class:`~rankless.nxd.writer.nxd_files.NxdWriter` makes one, on rank 0. A tensor must be the same object in each call:
files store it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankless.conversion.target import ConversionSource
from rankless.errors import InvalidArgumentError
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader.nxd_file_names import MODEL
from rankless.nxd.reader.sharding_spec import match_number
from rankless.nxd.writer.nxd_options import NxdOptions
from rankless.nxd.writer.shard import ShardedParameter, local_slices, shard_tensor, stored_slices


class ShardedParameters:
    """The parameters of the model, divided as a layout says."""

    def __init__(self, source: ConversionSource, options: NxdOptions, trained: Sequence[str]) -> None:
        """Divide the parameters, ``trained`` ones first. Raises ``InvalidArgumentError`` if the layout does not fit."""
        self._selected, self._options, self._spec = source.selected, options, options.sharding_spec
        self._tied = source.selected.tied.get(MODEL, {})
        names = [*source.selected.infos_of_group(MODEL), *self._tied]
        name_set = set(names)
        self._sharded = shard_tensor(self._spec, [*(name for name in trained if name in name_set), *names])
        #: Whole tensors by parameter name.
        self.whole_tensors = {
            name: stored_slices(source.reader, *source.selected.sources[MODEL, self._tied.get(name, name)])
            for name in names
        }
        self._locals: dict[tuple[int, str, str], StoredTensor] = {}

    def split_stages(self) -> list[list[ShardedParameter]]:
        """Return the parameters of each pipeline stage.

        Raises ``InvalidArgumentError`` if the layers cannot be divided evenly.
        """
        numbers = (
            [match_number(self._spec.layer, parameter.name) for parameter in self._sharded] if self._spec.layer else []
        )
        n_layers = max((number + 1 for number in numbers if number is not None), default=1)
        stages: list[list[ShardedParameter]] = [[] for _ in range(self._options.pp_size)]
        if len(stages) > 1 and n_layers % len(stages):
            raise InvalidArgumentError(
                f"{n_layers} layers cannot be divided evenly among {len(stages)} pipeline stages"
            )
        for parameter in self._sharded:
            stages[self._spec.stage_of(parameter.name, n_layers, len(stages))].append(parameter)
        return stages

    def dtype_of(self, parameter: ShardedParameter) -> str:
        """Return the dtype of a parameter in the output."""
        return self._selected.infos[MODEL, self._tied.get(parameter.names[0], parameter.names[0])].dtype

    def local_tensor(self, parameter: ShardedParameter, tp: int) -> StoredTensor:
        """Return the shard of a tensor-parallel rank, in the dtype of the source. Repeated calls return one object."""
        return self.local_state(parameter, tp, "", self.whole_tensors)

    def local_state(
        self, parameter: ShardedParameter, tp: int, state: str, whole: Mapping[str, StoredTensor]
    ) -> StoredTensor:
        """Return the shard of a state that is divided as its parameter is.

        ``whole`` holds the states of all parameters that it is made of.
        """
        key = (tp if parameter.rule.dim is not None else 0, parameter.name, state)
        if key not in self._locals:
            self._locals[key] = local_slices(parameter, whole, self._options.tp_size, tp)
        return self._locals[key]
