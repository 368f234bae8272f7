"""The parameters that an optimizer trains, each with its master weights and states, as DeepSpeed can store them.

:class:`~rankless.deepspeed.writer.universal_target.UniversalTarget` collects with it when it is made, on each rank, in
the vote "planning the output": ranks share the work by the places of tensors, so all must get the same order. A folder
gets the name of the parameter: it must not lead out of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rankless.conversion.fake_tensors import Groups
from rankless.conversion.state_dict_schemas import check_named
from rankless.conversion.target import ConversionSource
from rankless.engine.io.source_reader import SourceReader
from rankless.errors import InvalidArgumentError
from rankless.ondisk.validation import split_state_key, state_key
from rankless.state.optimizer.whole_states import without_orders

_MODEL, _OPTIMIZER = "model", "optimizer"

#: The state that counts steps.
STEP = "step"

#: The most bytes of a name of a file or folder; the extension of the files; names that have another meaning.
_NAME_BYTES, _EXTENSION, _RESERVED = 255, ".pt", frozenset({"", ".", "..", "optimizer_state.pt"})

#: The file of the master weights, which no state can have.
_MASTER = "fp32"

#: The number of steps is less than this.
_STEP_LIMIT = 2**63


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter: its fp32 master weights, its states of the same shape, and its number of steps if it is counted."""

    name: str
    master: torch.Tensor
    states: Mapping[str, torch.Tensor]
    step: Any


@dataclass(frozen=True)
class TrainedParameters:
    """All trained parameters.

    Attributes:
        groups: The parameters of each group of the optimizer.
        settings: The settings of each group.
        steps: The number of steps that all parameters have; ``None`` if the optimizer counts none.
    """

    groups: Sequence[Sequence[TrainedParameter]]
    settings: Sequence[Mapping[str, Any]]
    steps: int | None

    @classmethod
    def from_components(cls, source: ConversionSource, tensors: Groups, values: Mapping[str, Any]) -> TrainedParameters:
        """Collect the parameters. Raises ``InvalidArgumentError`` naming one that DeepSpeed has no place for."""
        _check_components(tensors, values)
        groups = values[_OPTIMIZER]["groups"]
        states = _collect_states(tensors.get(_OPTIMIZER, {}), groups)
        parameters = [
            [_make_parameter(name, tensors[_MODEL], states.get(name, {})) for name in group["params"]]
            for group in groups
        ]
        for group in parameters:
            _check_equal_states(group)
        return cls(parameters, [group["settings"] for group in groups], _check_steps(source, parameters))

    def __iter__(self) -> Iterator[TrainedParameter]:
        return (parameter for group in self.groups for parameter in group)


def _check_components(tensors: Groups, values: Mapping[str, Any]) -> None:
    others = sorted(slot for slot in {*tensors, *values} if "/" in slot)
    if others or _MODEL not in tensors or _OPTIMIZER not in values:
        problem = ", ".join(others) or ("no model" if _MODEL not in tensors else "no optimizer")
        raise InvalidArgumentError(
            f"a universal checkpoint of DeepSpeed has one model and one optimizer, but the source has {problem}: "
            "select one by keys, or convert a model alone to 'hf' or 'torch'"
        )
    check_named(values[_OPTIMIZER])
    if [group["number"] for group in values[_OPTIMIZER]["groups"]].count(0) > 1:
        raise InvalidArgumentError("DeepSpeed has one optimizer, but the source has several: convert the model alone")


def _collect_states(tensors: Mapping[str, torch.Tensor], groups: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return all states by parameter and name. A state that is ``None`` is not initialized."""
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, state = split_state_key(key)
        states.setdefault(name, {})[state] = tensor
    for group in groups:
        for name, plain in group["state"].items():
            present = {state: value for state, value in without_orders(plain).items() if value is not None}
            states.setdefault(name, {}).update(present)
    return states


def _make_parameter(name: str, model: Mapping[str, torch.Tensor], states: Mapping[str, Any]) -> TrainedParameter:
    if not _is_file_name(name):
        raise InvalidArgumentError(
            f"the parameter {name!r:.300} cannot have a folder of its name, which DeepSpeed needs: pass rename"
        )
    master = model.get(name)
    if master is None:
        raise InvalidArgumentError(
            f"the optimizer trains {name!r}, which the model of the source does not have: select both, or neither"
        )
    if master.dtype != torch.float32:
        raise InvalidArgumentError(
            f"{name!r} is {str(master.dtype).removeprefix('torch.')}, and DeepSpeed's master weights are float32: pass "
            "dtype='float32' (--dtype float32) to cast the model"
        )
    shaped = {state: value for state, value in states.items() if state != STEP}
    for state, value in shaped.items():
        if state in {"", _MASTER} or not _is_file_name(f"{state}{_EXTENSION}"):
            raise InvalidArgumentError(
                f"the optimizer's state {state!r:.300} of {name!r} cannot have a file of its name, as DeepSpeed needs"
            )
        if not isinstance(value, torch.Tensor) or value.shape != master.shape:
            what = f"the shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"the value {value!r:.40}"
            raise InvalidArgumentError(
                f"the optimizer's state {state!r} of {name!r} has {what}: DeepSpeed stores states of the shape of "
                "their parameter, and the number of steps"
            )
    step = states.get(STEP)
    if isinstance(step, torch.Tensor) and (step.shape or step.is_complex()):
        raise InvalidArgumentError(
            f"the number of steps of {name!r} is a tensor of the shape {list(step.shape)} and the dtype {step.dtype}: "
            "it must be a whole number"
        )
    return TrainedParameter(name, master, shaped, step)


def _is_file_name(name: str) -> bool:
    """Return whether a file or folder can have a name, in the folder where it is created."""
    return name not in _RESERVED and not set(name) & {"/", "\0"} and len(name.encode()) <= _NAME_BYTES


def _check_equal_states(group: Sequence[TrainedParameter]) -> None:
    """Raise ``InvalidArgumentError`` if parameters of a group have different states: DeepSpeed joins them."""
    for parameter in group:
        first = group[0]
        if (parameter.states.keys(), parameter.step is None) != (first.states.keys(), first.step is None):
            raise InvalidArgumentError(
                f"the optimizer has other states of {parameter.name!r} than of {first.name!r} in the same group (one "
                "of them had no gradient yet), and DeepSpeed has the same for all: leave it out with exclude, or train "
                "it for a step"
            )


def _check_steps(source: ConversionSource, groups: Sequence[Sequence[TrainedParameter]]) -> int | None:
    """Return the number of steps. Raises ``InvalidArgumentError`` if parameters have different ones."""
    first: tuple[str, float] | None = None
    for parameter in (parameter for group in groups for parameter in group):
        if parameter.step is None:
            continue
        step = _read_step(source, parameter)
        if not (0 <= step < _STEP_LIMIT and step == int(step)):
            raise InvalidArgumentError(
                f"the number of steps of {parameter.name!r} is {step:g}: it must be a whole number"
            )
        first = first or (parameter.name, step)
        if step != first[1]:
            raise InvalidArgumentError(
                f"the optimizer has {step:g} steps of {parameter.name!r}, and {first[1]:g} of {first[0]!r}: DeepSpeed "
                "has one number of steps for all parameters"
            )
    return None if first is None else int(first[1])


def _read_step(source: ConversionSource, parameter: TrainedParameter) -> float:
    if isinstance(parameter.step, int | float):
        return parameter.step
    if not isinstance(parameter.step, torch.Tensor):
        raise _step_error(parameter, f"{parameter.step!r:.40}")
    key = source.selected.sources[_OPTIMIZER, state_key(parameter.name, STEP)]
    dtype = parameter.step.dtype
    buffer = np.empty(parameter.step.nbytes, np.uint8)
    extents = source.reader.find_extents(*key, 0, buffer.nbytes)
    with SourceReader([extent.file for extent in extents]) as opened:
        for number, extent in enumerate(extents):
            opened.read(number, extent.offset, buffer[extent.start : extent.stop].data)
    return float(torch.from_numpy(buffer).view(dtype)[0])


def _step_error(parameter: TrainedParameter, step: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"the number of steps of {parameter.name!r} is {step}: it must be a whole number")
