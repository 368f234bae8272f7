"""The values of a checkpoint on their way into another: tensors in them are passed along by name, not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.conversion.tensor_filter import TensorFilter
from holdfast.formats.reader import Reader
from holdfast.ondisk import values
from holdfast.ondisk.files import TensorInfo
from holdfast.state.arrays import ArrayEncoder
from holdfast.state.capture import STATE
from holdfast.state.tensors import NAMES


@dataclass(frozen=True)
class _Tagged:
    """A tensor, array, dtype, … as the source has it."""

    tag: str
    payload: Any


class _Codec(ArrayEncoder):
    """Gives back what it was given. Arrays that were inside of pickles are taken out."""

    def encode(self, value: object, key: str) -> Any:
        """See :class:`holdfast.ondisk.values.ArrayCodec`."""
        if isinstance(value, _Tagged):
            return {value.tag: value.payload}
        return super().encode(value, key)

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`holdfast.ondisk.values.ArrayCodec`."""
        return _Tagged(tag, payload)


@dataclass(frozen=True)
class CarriedValues:
    """Values encoded as in ``state.json`` and in ``ranks.json``; ``arrays`` are those of the first in memory."""

    shared: Mapping[str, Any]
    ranks: list[Any]
    arrays: Mapping[str, torch.Tensor]

    def infos(self) -> dict[tuple[str, str], TensorInfo]:
        """What the arrays are as tensors of the group of values."""
        return {(STATE, name): TensorInfo(NAMES[one.dtype], tuple(one.shape)) for name, one in self.arrays.items()}


def carry_values(reader: Reader, choice: TensorFilter) -> CarriedValues:
    """The values of a checkpoint that go along, with the names that parameters get. Raises ``CorruptCheckpointError``."""
    codec = _Codec()
    first = reader.values(0, codec, codec)
    shared = {name: value for name, value in first.shared.items() if _goes(name, choice)}
    encoded = values.encode_value({name: _retold(name, value, choice) for name, value in shared.items()}, codec)
    every = [first.own, *(reader.values(rank, codec, codec).own for rank in range(1, first.world_size))]
    ranks = [] if choice.model_only else [values.encode_value(own or {}, codec) for own in every[: first.world_size]]
    return CarriedValues(encoded, ranks, codec.tensors)


def _goes(name: str, choice: TensorFilter) -> bool:
    return name.partition("/")[0] == "model" or not choice.model_only


def _retold(name: str, value: Any, choice: TensorFilter) -> Any:
    kind = name.partition("/")[0]
    if kind == "model":
        return {choice.renamed(key): one for key, one in value.items() if choice.takes(key)}
    if kind == "optimizer":
        return {**value, "groups": [_group(group, choice) for group in value["groups"]]}
    return value


def _group(group: Mapping[str, Any], choice: TensorFilter) -> dict[str, Any]:
    """A parameter group, with the parameters that are taken."""
    return {
        **group,
        "params": [choice.renamed(name) for name in group["params"] if choice.takes(name)],
        "state": {choice.renamed(name): state for name, state in group["state"].items() if choice.takes(name)},
    }
