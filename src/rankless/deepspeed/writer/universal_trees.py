"""The trees in the files of a universal checkpoint. Pure functions.

:class:`~rankless.deepspeed.writer.universal_target.UniversalTarget` builds them when it is made, on each rank: they
must be equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rankless.conversion.fake_tensors import Groups
from rankless.deepspeed.reader.deepspeed_file_names import UNIVERSAL
from rankless.deepspeed.writer.trained_parameters import STEP, TrainedParameters
from rankless.deepspeed.writer.universal_values import EngineValues

#: The files of the model: of ZeRO-1 and 2, and of ZeRO-3. DeepSpeed reads the latter for its values only.
_MODEL_FILE, _DIVIDED_FILE = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"

_OPTIMIZER_FILE, _WEIGHTS = "optimizer_state.pt", "fp32"

#: The states that DeepSpeed reads under ZeRO-3, whatever the optimizer.
_STAGE3_STATES = {"exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class UniversalTrees:
    """The contents of a universal checkpoint. ``tied`` are further names of parameters."""

    trained: TrainedParameters
    engine: EngineValues
    tensors: Groups
    values: Mapping[str, Any]
    tied: Mapping[str, str]

    def files(self) -> dict[str, Any]:
        """Return the tree of each file, by its path in the folder of the tag."""
        module = self._module()
        files = {
            _MODEL_FILE: self._model_tree(module),
            _DIVIDED_FILE: self._model_tree({}),
            f"{UNIVERSAL}/{_OPTIMIZER_FILE}": self._optimizer_tree(),
        }
        for parameter in self.trained:
            folder = f"{UNIVERSAL}/{parameter.name}"
            for state, tensor in {_WEIGHTS: parameter.master, **parameter.states}.items():
                files[f"{folder}/{state}.pt"] = {"param": tensor}
            if parameter.step is not None:
                files[f"{folder}/{STEP}.pt"] = parameter.step
        return files

    def warnings(self) -> Iterator[str]:
        """Yield the values that DeepSpeed will not restore from these files."""
        module = self._module()
        if module:
            yield (
                f"DeepSpeed does not restore frozen parameters and buffers from universal checkpoints: {len(module)} "
                f"of them, such as {next(iter(module))!r}, are in module of {_MODEL_FILE}; load them into the model "
                "before deepspeed.initialize"
            )
        differing = sorted(set().union(*self.trained.settings) - self._common_settings().keys())
        if differing:
            yield (
                f"groups of the optimizer have different {', '.join(differing)}: under ZeRO-3, where DeepSpeed gives "
                "all groups the settings of one, these keep the values of the job's configuration"
            )
        others = {state for parameter in self.trained for state in parameter.states} - _STAGE3_STATES
        if others:
            names = ", ".join(sorted(others))
            yield f"under ZeRO-3 DeepSpeed does not read the states {names}: load the checkpoint under ZeRO-1 or 2"
        if len(self.trained.groups) > 1 and any(isinstance(parameter.step, torch.Tensor) for parameter in self.trained):
            yield (
                "under ZeRO-3 DeepSpeed 0.19.8 gives all groups one tensor that counts the steps, so that each counts "
                "those of all: give each state in engine.optimizer.optimizer.state a clone of it after the load"
            )

    def _module(self) -> dict[str, Any]:
        """Return the entries of the model that are not trained."""
        trained = {id(parameter.master) for parameter in self.trained}
        model = {**self.tensors["model"], **self.values.get("model", {})}
        return {name: value for name, value in model.items() if id(value) not in trained}

    def _model_tree(self, module: Mapping[str, Any]) -> dict[str, Any]:
        shapes = [
            OrderedDict((parameter.name, torch.Size(parameter.master.shape)) for parameter in group)
            for group in self.trained.groups
        ]
        names = {parameter.name for parameter in self.trained}
        return {
            **self.engine.client,
            **self.engine.counters,
            "module": OrderedDict(module),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {alias: name for alias, name in self.tied.items() if name in names},
            "lr_scheduler": self.engine.scheduler,
            "ds_version": self.engine.version,
        }

    def _optimizer_tree(self) -> dict[str, Any]:
        """Return the values that all ranks share: for ZeRO-1 and 2 in the dict itself, for ZeRO-3 in its entry."""
        groups = [{**settings, "params": [number]} for number, settings in enumerate(self.trained.settings)]
        steps = {number: self._steps_of(group) for number, group in enumerate(self.trained.groups)}
        return {
            **self.engine.optimizer,
            "ds_version": self.engine.version,
            "param_groups": groups,
            "optimizer_state_dict": {
                "state": {number: step for number, step in steps.items() if step},
                "param_groups": [{**self._common_settings(), "params": list(range(len(groups)))}],
            },
        }

    def _steps_of(self, group: Sequence[Any]) -> dict[str, Any]:
        return {STEP: group[0].step} if group and group[0].step is not None else {}

    def _common_settings(self) -> dict[str, Any]:
        """Return the settings that are equal in all groups: ZeRO-3 gives all groups the settings of the first."""
        first, *others = self.trained.settings
        return {key: value for key, value in first.items() if all(_is_equal(value, o.get(key)) for o in others)}


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first is second
    return type(first) is type(second) and bool(first == second)
