"""Megatron's keys: equal layers are one tensor. Its first dimension counts them, and the next one experts.

Source: ``sharded_state_dict`` of ``transformer_block.py`` and ``moe/experts.py`` of megatron-core 0.16.

:mod:`rankless.megatron.writer.megatron_source` calls it on each rank that opens the source. The keys are Megatron's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankless.errors import FormatError
from rankless.megatron.reader.model_args import ModelArgs
from rankless.megatron.reader.transformers_layout import EMBEDDING, OUTPUT
from rankless.megatron.writer.parts import LayerTensor, Part

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d{1,6})\.(.+)")
_KNOWN = re.compile(r"(?:decoder|embedding|output_layer)\..+")

#: Arguments of models with layers that differ, so that Megatron does not stack them.
_DIFFERING = ("moe_layer_freq", "linear_attention_freq")

#: Modules that keep a state of their own, for FP8: each has one object a layer. Without FP8 it is empty.
_MODULES = re.compile(r"(.+(?:linear_qkv|linear_proj|linear_fc1|linear_fc2|layernorm))\.weight")
_ATTENTION = re.compile(r"(.+self_attention)\.linear_qkv\.weight")


@dataclass(frozen=True)
class StackedModel:
    """The tensors of a model by Megatron's keys. ``stacks`` has the number of layers, and of experts, of each."""

    tensors: Mapping[str, LayerTensor]
    stacks: Mapping[str, tuple[int, ...]]
    is_homogeneous: bool

    def list_extra_states(self) -> Iterator[str]:
        """Yield the keys of the states of modules, which Megatron expects to find."""
        for key, stack in self.stacks.items():
            for pattern, inner in ((_MODULES, ""), (_ATTENTION, ".core_attention")):
                if match := pattern.fullmatch(key):
                    yield from (f"{match[1]}{inner}._extra_state/{shard}" for shard in _list_shards(stack))


def is_megatron_name(name: str) -> bool:
    """Return whether a parameter has one of Megatron's names.

    For example, ``decoder.layers.0.mlp.linear_fc1.weight`` is one.
    """
    return _LAYER.fullmatch(name) is not None or name in {EMBEDDING, OUTPUT}


def plan_from_megatron(shapes: Mapping[str, tuple[int, ...]], divisor: int, source: str) -> dict[str, LayerTensor]:
    """Return the tensors of a model that has Megatron's names. Raises ``FormatError`` naming another one."""
    tensors = {}
    for name, shape in shapes.items():
        if not _KNOWN.fullmatch(name):
            raise FormatError(
                f"{source}: {name!r} has no place in a GPT of Megatron, whose tensors begin with decoder., embedding. "
                "or output_layer.: leave it out with exclude (--exclude)"
            )
        rows = shape[:1] if name not in {EMBEDDING, OUTPUT} else (pad_rows(shape[0], divisor),)
        tensors[name] = LayerTensor((*rows, *shape[1:]), (Part(name, 0, math.prod(shape), 0),))
    return tensors


def pad_rows(rows: int, divisor: int) -> int:
    """Return the number of rows of an embedding with its padding. For example, 10 rows become 12 with the divisor 4."""
    return -(-rows // divisor) * divisor


def stack_layers(tensors: Mapping[str, LayerTensor], args: ModelArgs) -> StackedModel:
    """Stack the tensors of equal layers and experts. Raises ``FormatError`` if a layer or an expert is missing."""
    stacks: dict[str, tuple[int, ...]] = {name: () for name in tensors if not _LAYER.fullmatch(name)}
    stacked = {name: tensors[name] for name in stacks}
    layers: dict[int, dict[str, LayerTensor]] = {}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    joined = {number: _stack_experts(number, layers[number], args.source) for number in sorted(layers)}
    if list(joined) != list(range(len(joined))):
        raise FormatError(f"{args.source}: the layers {', '.join(map(str, joined))} are no complete model")
    is_homogeneous = not any(_differs(args.get(name)) for name in _DIFFERING) and _are_equal(list(joined.values()))
    for number, layer in joined.items():
        for inner, (tensor, experts) in layer.items():
            if not is_homogeneous:
                stacked[f"decoder.layers.{number}.{inner}"] = tensor
                stacks[f"decoder.layers.{number}.{inner}"] = experts
            elif number == 0:
                stacked[f"decoder.layers.{inner}"] = _stack([joined[index][inner][0] for index in joined])
                stacks[f"decoder.layers.{inner}"] = (len(joined), *experts)
    return StackedModel(stacked, stacks, is_homogeneous)


#: The tensors of a layer by name, each with the number of its experts if it has all experts.
_Layer = dict[str, tuple[LayerTensor, tuple[int, ...]]]


def _stack_experts(number: int, layer: Mapping[str, LayerTensor], source: str) -> _Layer:
    joined: _Layer = {}
    experts: dict[str, dict[int, LayerTensor]] = {}
    for inner, tensor in layer.items():
        if match := _EXPERT.fullmatch(inner):
            experts.setdefault(f"{match[1]}.experts.{match[3]}", {})[int(match[2])] = tensor
        else:
            joined[inner] = tensor, ()
    for inner, rows in experts.items():
        shapes = {rows[expert].shape for expert in rows}
        if sorted(rows) != list(range(len(rows))) or len(shapes) > 1:
            raise FormatError(
                f"{source}: the experts of layer {number} do not all have {inner.rpartition('.experts.')[2]!r} in one "
                "shape, or one is missing"
            )
        joined[inner] = _stack([rows[expert] for expert in sorted(rows)]), (len(rows),)
    return joined


def _stack(rows: Sequence[LayerTensor]) -> LayerTensor:
    size = math.prod(rows[0].shape)
    parts = tuple(part.moved(number * size) for number, row in enumerate(rows) for part in row.parts)
    return LayerTensor((len(rows), *rows[0].shape), parts)


def _are_equal(layers: Sequence[_Layer]) -> bool:
    kinds = [{inner: tensor.shape for inner, (tensor, _) in layer.items()} for layer in layers]
    return all(kind == kinds[0] for kind in kinds)


def _differs(frequency: Any) -> bool:
    return isinstance(frequency, list | str) or (type(frequency) is int and frequency > 1)


def _list_shards(stack: tuple[int, ...]) -> Iterator[str]:
    sizes = stack or (1,)
    of_all = ".".join(map(str, sizes))
    for indices in itertools.product(*map(range, sizes)):
        yield f"shard_{'.'.join(map(str, indices))}_{of_all}"
