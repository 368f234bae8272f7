"""The states of the source's optimizer, and the parameter groups that Megatron sorts them into.

:mod:`rankless.megatron.writer.megatron_source` calls it on each rank that opens the source. The names of states and the
entries of groups are those that Megatron expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import Key
from rankless.errors import FormatError
from rankless.megatron.reader.group_settings import DECAY, DECOUPLED, EXPERT, RATE, STEP, has_weight_decay
from rankless.megatron.reader.model_args import ModelArgs
from rankless.megatron.writer.parts import MODEL, OPTIMIZER, LayerTensor
from rankless.megatron.writer.source_values import list_groups, read_numbers
from rankless.ondisk.validation import split_state_key
from rankless.state.optimizer.whole_states import without_orders

#: The states that Megatron's distributed optimizer has of each parameter, beside the master weights.
STATES = ("exp_avg", "exp_avg_sq")

#: How to convert without the optimizer.
_SKIP = "convert the model alone with model_only (--model-only)"

#: The settings that Megatron, and the optimizers of Transformer Engine and Apex, expect in each group.
_EXPECTED = {RATE: 1.0, DECOUPLED: False, "default_config": True, "bias_correction": True}


@dataclass(frozen=True)
class OptimizerStates:
    """The keys of the states of each trained parameter, and the number of steps."""

    keys: Mapping[str, Mapping[str, Key]]
    step: float

    def check_entry(self, key: str, tensor: LayerTensor) -> bool:
        """Return whether the parameters in a tensor are trained. Raises ``FormatError`` if only some are."""
        trained = [name for name in tensor.names if name in self.keys]
        if trained and len(trained) < len(tensor.names):
            frozen = next(name for name in tensor.names if name not in self.keys)
            raise FormatError(
                f"the optimizer has no {STATES[0]} of {frozen!r}, and it has that of {trained[0]!r}, which Megatron "
                f"has in the same tensor {key}: {_SKIP}"
            )
        return bool(trained)


def collect_states(source: ConversionSource, values: Mapping[str, Any]) -> OptimizerStates:
    """Return the states of an optimizer. Raises ``FormatError`` naming one that Megatron's does not have."""
    tied = source.selected.tied.get(MODEL, {})
    keys: dict[str, dict[str, Key]] = {}
    steps: dict[str, float] = {}
    step_keys: dict[Key, str] = {}
    for name, info in source.selected.infos_of_group(OPTIMIZER).items():
        stored, state = split_state_key(name)
        fqn = tied.get(stored, stored)
        if state == STEP:
            step_keys[OPTIMIZER, name] = fqn
            continue
        weight = source.selected.infos.get((MODEL, fqn))
        if state not in STATES or weight is None or weight.shape != info.shape:
            raise _state_error(source, stored, state)
        keys.setdefault(fqn, {})[state] = OPTIMIZER, name
    for key, number in read_numbers(source, list(step_keys)).items():
        steps[step_keys[key]] = number
    for group in list_groups(values):
        for fqn, plain in group["state"].items():
            for state, value in without_orders(plain).items():
                if state != STEP or type(value) not in {int, float}:
                    raise _state_error(source, fqn, state)
                steps[tied.get(fqn, fqn)] = float(value)
    return OptimizerStates(keys, _find_step(source, keys, steps))


def _state_error(source: ConversionSource, fqn: str, state: str) -> FormatError:
    return FormatError(
        f"{source.reader.path}: the optimizer has the state {state!r} of {fqn!r}, and Megatron's distributed optimizer "
        f"has {', '.join(STATES)} in the shape of the parameter, and {STEP}: {_SKIP}"
    )


def _find_step(source: ConversionSource, keys: Mapping[str, Mapping[str, Key]], steps: Mapping[str, float]) -> float:
    """Return the one number of steps that Megatron has."""
    for fqn, states in keys.items():
        missing = [state for state in STATES if state not in states]
        if missing or fqn not in steps:
            raise FormatError(
                f"{source.reader.path}: the optimizer has no {(*missing, STEP)[0]} of {fqn!r}, as Adam has: {_SKIP}"
            )
    first = next(iter(keys), None)
    if first is None:
        raise FormatError(f"{source.reader.path}: the optimizer has no states yet: {_SKIP}")
    other = next((fqn for fqn in keys if steps[fqn] != steps[first]), None)
    if other is not None:
        raise FormatError(
            f"{source.reader.path}: {first!r} was trained for {steps[first]:g} steps and {other!r} for "
            f"{steps[other]:g}, and Megatron has one number for all: {_SKIP}"
        )
    return steps[first]


def build_groups(
    values: Mapping[str, Any],
    layers: Mapping[str, LayerTensor],
    states: OptimizerStates,
    args: ModelArgs,
    *,
    experts: bool,
) -> list[dict[str, Any]]:
    """Return the settings of Megatron's groups.

    Groups of Megatron stay as they are. Of others, the parameters that Megatron has in one group must have equal
    settings. Raises ``FormatError`` naming one that has not.
    """
    groups = list_groups(values)
    step = {STEP: int(states.step) if states.step.is_integer() else states.step}
    if any(DECAY in group["settings"] for group in groups):
        return [{**group["settings"], **step} for group in groups]
    settings = {name: group["settings"] for group in groups for name in group["params"]}
    merged: dict[tuple[float, bool], dict[str, Any]] = {}
    first: dict[tuple[float, bool], str] = {}
    for layer_name, tensor in layers.items():
        decay = float(has_weight_decay(layer_name, len(tensor.shape), args))
        identity = decay, experts and ".local_experts." in layer_name
        for name in tensor.names if all(name in states.keys for name in tensor.names) else ():
            own = settings[name]
            present = merged.setdefault(identity, dict(own))
            first.setdefault(identity, name)
            _check_equal(present, own, (first[identity], name), args.source)
    return [
        {**_EXPECTED, **merged[identity], DECAY: identity[0], EXPERT: identity[1], **step}
        for identity in sorted(merged, reverse=True)
    ]


def _check_equal(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str], source: str) -> None:
    for setting in sorted({*first, *second}):
        values = first.get(setting), second.get(setting)
        if any(isinstance(value, torch.Tensor) for value in values):
            raise FormatError(f"{source}: {setting} of {names[1]!r} is a tensor, and Megatron has a number: {_SKIP}")
        if values[0] != values[1]:
            raise FormatError(
                f"{source}: {names[0]!r} has {setting} {values[0]!r:.60} and {names[1]!r} has {values[1]!r:.60}, and "
                f"Megatron has both in one group, by its rule for weight decay: {_SKIP}"
            )
