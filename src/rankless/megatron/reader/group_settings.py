"""The parameter groups of Megatron's optimizers. Their files have settings and no lists of parameters.

Megatron sorts parameters into groups by a rule, which is applied again: there is no weight decay for biases and
parameters of one dimension, and experts have groups of their own if ranks divide them.
Source: ``megatron/core/optimizer/__init__.py`` of megatron-core 0.15 to 0.19.

The reader calls it on each rank that opens a checkpoint, the writer on each rank of a conversion. The rule must be the
same as Megatron's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.stored_tensor import InlineTensor, StoredTensor
from rankless.megatron.reader.bucket_search import SKIP
from rankless.megatron.reader.model_args import ModelArgs
from rankless.ondisk.data_files import TensorInfo

#: The settings that tell Megatron's groups apart.
DECAY, RATE, EXPERT, DECOUPLED = "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"

#: Settings that are tuples in torch, and that Megatron saves as lists.
_TUPLES = ("betas",)

#: The key of the number of steps, in a group or in the states.
STEP, COMMON_STEP = "step", "common_step"

#: The names of the parameters with a learning rate of their own, if there is one.
_ENDS = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})


def collect_groups(tree: Any) -> list[list[dict[str, Any]]]:
    """Return the lists of groups of all optimizers in a tree of dicts."""
    if not isinstance(tree, dict):
        return []
    groups = tree.get("param_groups")
    if groups is None:
        return [groups for value in tree.values() for groups in collect_groups(value)]
    rows = list(groups.values()) if isinstance(groups, dict) else groups
    if not isinstance(rows, list) or not all(isinstance(group, dict) for group in rows):
        raise CorruptCheckpointError("param_groups of the optimizer must be a list of dicts")
    return [rows]


def merge_groups(lists: Sequence[Sequence[Mapping[str, Any]]], source: str) -> list[dict[str, Any]]:
    """Return the groups of all ranks. Groups with the same multipliers are one, and must have equal settings.

    Raises ``CorruptCheckpointError`` if they differ.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for groups in lists:
        for group in groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            settings |= {key: tuple(settings[key]) for key in _TUPLES if isinstance(settings.get(key), list)}
            identity = _identity_of(settings)
            if merged.setdefault(identity, settings) != settings:
                raise CorruptCheckpointError(
                    f"{source}: ranks have different settings of the optimizer's group with {DECAY} {identity[0]}: "
                    "files of two saves were mixed"
                )
    return list(merged.values())


def _identity_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    values = (group.get(DECAY, 1.0), group.get(RATE, 1.0), group.get(EXPERT, False), group.get(DECOUPLED, False))
    if not all(isinstance(value, bool | int | float) for value in values):
        raise CorruptCheckpointError(f"a group of the optimizer must have numbers as {DECAY} and {RATE}")
    return values


def assign_groups(
    params: Mapping[str, StoredTensor], groups: Sequence[Mapping[str, Any]], args: ModelArgs
) -> dict[str, int]:
    """Return the number of the group of each parameter, by Megatron's rule.

    Raises ``FormatError`` naming a parameter if the rule does not say which of the groups has it.
    """
    numbers = {}
    decouples_ends = any(group.get(DECOUPLED, False) for group in groups)
    divides_experts = any(group.get(EXPERT, False) for group in groups)  # only with expert parallelism
    for name, parameter in params.items():
        is_expert = divides_experts and ".local_experts." in name
        has_decay = has_weight_decay(name, len(parameter.info.shape), args)
        fitting = [
            number
            for number, group in enumerate(groups)
            if bool(group.get(EXPERT, False)) == is_expert
            and bool(group.get(DECOUPLED, False)) == (decouples_ends and name in _ENDS)
        ]
        if len(fitting) > 1:
            fitting = [number for number in fitting if bool(groups[number].get(DECAY, 1.0)) == has_decay]
        if len(fitting) != 1:
            raise FormatError(
                f"{args.source}: {len(fitting)} of the {len(groups)} groups of the optimizer can have {name!r} by "
                f"Megatron's rule for weight decay, and the files do not say which does; {SKIP}"
            )
        numbers[name] = fitting[0]
    return numbers


def has_weight_decay(name: str, ndim: int, args: ModelArgs) -> bool:
    """Return whether Megatron's rule gives weight decay to a parameter of a layer, of so many dimensions."""
    if args.is_set("apply_wd_to_qk_layernorm") and any(f".{kind}_layernorm." in name for kind in "qk"):
        return True
    return not name.endswith(".bias") and ndim > 1


def make_step(value: Any, source: str) -> StoredTensor:
    """Return a number of steps as a tensor, as torch's optimizers keep it."""
    if isinstance(value, StoredTensor):
        if value.info.shape not in {(), (1,)}:
            raise CorruptCheckpointError(f"{source}: the optimizer's number of steps is a tensor of several numbers")
        return value
    if type(value) not in {int, float}:
        raise CorruptCheckpointError(f"{source}: the optimizer's number of steps is {value!r:.40}, not a number")
    return InlineTensor(TensorInfo("F32", ()), struct.pack("<f", value))
