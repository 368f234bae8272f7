"""The values of a checkpoint that are carried into another. Tensors in them are passed on by name, not read.

:mod:`rankless.conversion.pipeline` calls it on each rank that opens the source. No tensor is read, and values must keep
their encoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankless.conversion.tensor_filter import STATE, TensorFilter
from rankless.formats.find_training_step import find_step
from rankless.formats.reader import Reader
from rankless.formats.stored_tensor import InlineTensor
from rankless.ondisk import values
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_of_array
from rankless.ondisk.value_files import OWN_STATE
from rankless.state.array_decoder import encode_scalar


@dataclass(frozen=True)
class _Tagged:
    """A tagged value (tensor, array, dtype, …) as the source encodes it."""

    tag: str
    payload: Any


class _Codec:
    """A codec that keeps tagged values as they are. The bytes of arrays from pickles are in :attr:`arrays`, by key."""

    def __init__(self) -> None:
        self.arrays: dict[str, InlineTensor] = {}

    def encode(self, value: object, key: str) -> Any:
        """See :class:`rankless.ondisk.values.ArrayCodec`."""
        if isinstance(value, _Tagged):
            return {value.tag: value.payload}
        if type(value) is np.ndarray:
            name = values.name_tensor(self.arrays, key)
            self.arrays[name] = InlineTensor(TensorInfo(dtype_of_array(value), value.shape), value.tobytes())
            return {"$array": name}
        return encode_scalar(value) if isinstance(value, np.generic) else NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`rankless.ondisk.values.ArrayCodec`."""
        return _Tagged(tag, payload)


@dataclass(frozen=True)
class CarriedValues:
    """Values, encoded as in ``state.json`` and ``ranks.json``. ``arrays`` are in-memory arrays of the shared values.

    ``step`` is the training step that the values of another system name.
    """

    shared: Mapping[str, Any]
    ranks: list[Any]
    arrays: Mapping[str, InlineTensor]
    step: int | None = None

    def array_infos(self) -> dict[tuple[str, str], TensorInfo]:
        """Return the dtypes and shapes of the arrays, as tensors of the group of values."""
        return {(STATE, name): array.info for name, array in self.arrays.items()}


def carry_values(reader: Reader, tensor_filter: TensorFilter) -> CarriedValues:
    """Return the values of a checkpoint to carry over, with parameters renamed. Raises ``CorruptCheckpointError``."""
    codec = _Codec()
    first = reader.read_values(0, codec, codec)
    shared = {name: value for name, value in first.shared.items() if _is_carried(name, tensor_filter)}
    encoded = values.encode_value(
        {name: _filter_value(name, value, tensor_filter) for name, value in shared.items()}, codec
    )
    per_rank = [
        first.rank_values,
        *(reader.read_values(rank, codec, codec).rank_values for rank in range(1, first.world_size)),
    ]
    ranks = (
        []
        if tensor_filter.model_only
        else [values.encode_value(rank_values or {}, codec) for rank_values in per_rank[: first.world_size]]
    )
    return CarriedValues(encoded, ranks, codec.arrays, find_step(reader.format, first.shared.get("user_content")))


def _is_carried(name: str, tensor_filter: TensorFilter) -> bool:
    return name.partition("/")[0] == "model" or not tensor_filter.model_only


def _filter_value(name: str, value: Any, tensor_filter: TensorFilter) -> Any:
    kind = name.partition("/")[0]
    if kind == "model":
        return {
            tensor_filter.rename_parameter(key): item for key, item in value.items() if tensor_filter.is_selected(key)
        }
    if kind == "optimizer":
        groups = [_filter_group(group, tensor_filter) for group in value["groups"]]
        own = [
            _rename_own(entry, tensor_filter) for entry in value.get(OWN_STATE, ()) if _is_whole(entry, tensor_filter)
        ]
        return {**value, "groups": groups, **({OWN_STATE: own} if own else {})}
    if kind == "scheduler":
        return _filter_scheduler(value, tensor_filter)
    return value


def _filter_scheduler(value: Any, tensor_filter: TensorFilter) -> Any:
    """Return a scheduler, or several, with the selected parameters in its groups, if it has any."""
    if isinstance(value, list):
        return [_filter_scheduler(entry, tensor_filter) for entry in value]
    params = value.get("params") if isinstance(value, Mapping) else None
    return {**value, "params": [_filter_names(names, tensor_filter) for names in params]} if params else value


def _is_whole(entry: Mapping[str, Any], tensor_filter: TensorFilter) -> bool:
    """Return whether all parameters are selected of an optimizer that keeps values besides their states."""
    return all(map(tensor_filter.is_selected, entry["params"]))


def _rename_own(entry: Mapping[str, Any], tensor_filter: TensorFilter) -> dict[str, Any]:
    return {**entry, "params": [tensor_filter.rename_parameter(name) for name in entry["params"]]}


def _filter_names(names: Sequence[str], tensor_filter: TensorFilter) -> list[str]:
    return [tensor_filter.rename_parameter(name) for name in names if tensor_filter.is_selected(name)]


def _filter_group(group: Mapping[str, Any], tensor_filter: TensorFilter) -> dict[str, Any]:
    """Return a parameter group with the selected parameters."""
    return {
        **group,
        "params": _filter_names(group["params"], tensor_filter),
        "state": {
            tensor_filter.rename_parameter(name): state
            for name, state in group["state"].items()
            if tensor_filter.is_selected(name)
        },
    }
