"""Optimizers without ZeRO and without master weights: state dicts of torch with numbers for parameters.

:mod:`rankless.deepspeed.reader.tag_contents` calls it on each rank that opens such a checkpoint. Numbers without a
certain name must be refused: states would belong to other parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rankless.deepspeed.reader.joined_optimizer import JoinedOptimizer
from rankless.deepspeed.reader.pipeline_layers import Layers
from rankless.errors import FormatError
from rankless.formats.stored_tensor import StoredTensor

_SKIP = "use --key optimizer=skip (keys={'optimizer': 'skip'}), or save with ZeRO-1"


def name_stages(
    optimizers: Sequence[Mapping[str, Any]], layers: Layers, buffers: Collection[str], source: str
) -> JoinedOptimizer:
    """Return the optimizers of the stages of a pipeline by the names of the parameters.

    Numbers count over the layers of a stage, in their order. Raises ``FormatError`` if these do not fit.
    """
    tensors = {
        f"{number}.{name}": value
        for number, layer in layers.items()
        for name, value in layer.items()
        if isinstance(value, StoredTensor) and f"{number}.{name}" not in buffers
    }
    joined = JoinedOptimizer()
    for optimizer, names in zip(optimizers, _divide_names(list(tensors), optimizers, source), strict=True):
        joined.merge_stage(_name_stage(optimizer, names, tensors, source), source)
    return joined


def _divide_names(names: list[str], optimizers: Sequence[Mapping[str, Any]], source: str) -> Iterator[list[str]]:
    """Yield the names of the parameters of each stage."""
    counts = [sum(len(group["params"]) for group in optimizer["param_groups"]) for optimizer in optimizers]
    if len(names) != sum(counts):
        raise FormatError(
            f"{source}: its layers have {len(names)} tensors, and the optimizers of its stages {sum(counts)} "
            f"parameters without names, so it is unknown which are trained: {_SKIP}"
        )
    start = 0
    for count in counts:
        yield names[start : start + count]
        start += count


def _name_stage(
    optimizer: Mapping[str, Any], names: list[str], tensors: Mapping[str, StoredTensor], source: str
) -> JoinedOptimizer:
    """Return the optimizer of a stage by name."""
    if len(optimizer["param_groups"]) != 1:
        raise FormatError(
            f"{source}: the optimizer has several groups without names, so it is unknown which layers are in which: "
            f"{_SKIP}"
        )
    (group,) = optimizer["param_groups"]
    joined = JoinedOptimizer(groups=[{**group, "params": names}])
    for name, number in zip(names, group["params"], strict=True):
        states = optimizer["state"].get(number, {})
        shapes = {value.info.shape for value in states.values() if isinstance(value, StoredTensor)}
        if not shapes <= {tensors[name].info.shape, ()}:
            raise FormatError(
                f"{source}: the states of parameter {number} have another shape than {name!r:.100}, so the optimizer "
                f"does not train all parameters in the order of the layers: {_SKIP}"
            )
        joined.states[name] = dict(states)
    return joined
