"""File layouts of ColossalAI 0.5.0, so that it loads files of rankless.

Source: ``colossalai/checkpoint_io`` of that version. Sizes in its indexes are in MiB. ColossalAI's "prefix" is a
variant in the file names: ``pytorch_model.foo-00001.bin``, ``pytorch_model.bin.index.foo.json``.

:class:`~rankless.colossalai.booster.Booster` passes them as the layout of a save: rank 0 calls them in the vote
"preparing the save". ColossalAI reads the names, the indexes and the numbers of parameters: all must stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from rankless.colossalai.file_division import build_index, format_mib, number_file_name
from rankless.components.component_files import ComponentFile, FileSet, SafetensorsOutput, TorchOutput
from rankless.components.file_or_folder import file_sets, model_file
from rankless.components.stored_component import MODEL, OPTIMIZER, StoredComponent
from rankless.conversion.fake_tensors import FakeTensors
from rankless.conversion.torch_target import as_saved_bytes
from rankless.errors import InvalidArgumentError
from rankless.ondisk import values
from rankless.ondisk.data_files import TensorInfo, pack_files, split_by_size
from rankless.ondisk.validation import split_state_key
from rankless.ondisk.value_files import ORDERED
from rankless.state.optimizer.whole_states import whole_states


def file_variant(name: str, prefix: str | None) -> str:
    """Insert the prefix into a file name where ColossalAI puts it: before the extension.

    For example, ``model.safetensors`` with the prefix ``ema`` becomes ``model.ema.safetensors``.
    """
    if not prefix:
        return name
    stem, _, extension = name.rpartition(".")
    return f"{stem}.{prefix}.{extension}"


def model_folder(content: StoredComponent, limit: int, prefix: str | None, *, use_safetensors: bool) -> FileSet:
    """Lay out a model in numbered files with an index, and its configuration files if it has any."""
    if use_safetensors and content.values:
        raise InvalidArgumentError(
            f"ColossalAI's safetensors files have no place for {next(iter(content.values))!r}, which is not a tensor: "
            "save with use_safetensors=False"
        )
    # ColossalAI's loader does not support tied weights: safetensors files need a copy under each name.
    content = content.without_ties() if use_safetensors else content
    stem, extension = ("model", "safetensors") if use_safetensors else ("pytorch_model", "bin")
    tensors_by_file = file_sets(content.tensors, limit)
    names = [
        number_file_name(file_variant(f"{stem}.{extension}", prefix), number)
        for number in range(1, len(tensors_by_file) + 1)
    ]
    files: list[ComponentFile] = []
    weight_map: dict[str, str] = {}
    for name, tensors in zip(names, tensors_by_file, strict=True):
        files.append(_safetensors_output(name, tensors) if use_safetensors else model_file(name, content, tensors))
        weight_map |= dict.fromkeys(tensors, name)
    weight_map |= {alias: weight_map[name] for alias, name in content.tied.items()}
    weight_map |= dict.fromkeys(content.values, names[0])
    total_bytes = content.nbytes + sum(content.tensors[name].nbytes for name in content.tied.values())
    index = build_index({"total_size": format_mib(total_bytes)}, weight_map)
    small_files = {**content.companions, file_variant(f"{stem}.{extension}.index.json", prefix): index}
    return FileSet(content, files, small_files, _stale_names(MODEL, prefix))


def optimizer_file(content: StoredComponent, name: str) -> FileSet:
    """Lay out an optimizer in one file, in the format of ``Optimizer.load_state_dict``."""
    states = _NumberedStates.from_content(content)
    tree = {"state": states.state_dicts(states.params_with_state), "param_groups": states.groups}
    return FileSet(content, [TorchOutput(name, tree, states.fakes)])


def optimizer_folder(content: StoredComponent, limit: int, prefix: str | None) -> FileSet:
    """Lay out an optimizer in files numbered by parameter, with a file of param groups and an index."""
    states = _NumberedStates.from_content(content)
    names: list[str] = []
    files: list[ComponentFile] = []
    weight_map: dict[str, str] = {}
    for number, params in enumerate(split_by_size(states.state_sizes(), limit), start=1):
        names.append(number_file_name(file_variant("pytorch_optim.bin", prefix), number))
        fakes = {key: states.fakes[key] for param in params for key in states.keys.get(param, {}).values()}
        files.append(TorchOutput(names[-1], states.state_dicts(params), fakes))
        weight_map |= {str(param): names[-1] for param in params}
    groups = file_variant("pytorch_optim_group.bin", prefix)
    metadata = {"param_groups": groups, "total_size": format_mib(content.nbytes)}
    small_files = {
        file_variant("pytorch_optim.bin.index.json", prefix): build_index(metadata, weight_map),
        groups: as_saved_bytes(list(states.groups)),
    }
    return FileSet(content, files, small_files, _stale_names(OPTIMIZER, prefix))


@dataclass(frozen=True)
class _NumberedStates:
    """The states of an optimizer by parameter number, which counts over all param groups.

    ``keys`` maps number and state to the name of a tensor in the content; ``fakes`` are tensors without data by these
    names; ``plain`` are states that are not tensors.
    """

    groups: Sequence[Mapping[str, Any]]
    keys: Mapping[int, Mapping[str, str]]
    fakes: Mapping[str, torch.Tensor]
    plain: Mapping[int, Mapping[str, Any]]

    @classmethod
    def from_content(cls, content: StoredComponent) -> _NumberedStates:
        """Assign numbers to the parameters. Raises ``InvalidArgumentError`` if their order is unknown."""
        fakes = FakeTensors({(OPTIMIZER, key): info for key, info in content.tensors.items()})
        groups = values.decode_value(dict(content.values), fakes, "the optimizer's values")["groups"]
        if not all(group[ORDERED] for group in groups):
            raise InvalidArgumentError(
                "ColossalAI numbers an optimizer's parameters, but the order of these is unknown, because they are of "
                "several pipeline stages or several optimizers: use rankless.save_optimizer, which uses names"
            )
        numbers = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
        keys: dict[int, dict[str, str]] = {}
        for key in content.tensors:
            name, state = split_state_key(key)
            keys.setdefault(numbers[name], {})[state] = key
        return cls(
            [{**group["settings"], "params": [numbers[name] for name in group["params"]]} for group in groups],
            keys,
            {key: fakes.make_tensor((OPTIMIZER, key)) for key in content.tensors},
            {numbers[name]: states for group in groups for name, states in group["state"].items()},
        )

    @property
    def params_with_state(self) -> list[int]:
        """The numbers of the parameters that have a state."""
        return sorted(self.keys.keys() | self.plain.keys())

    def state_dicts(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the states of some parameters, by number."""
        return {number: whole_states(self.state_tensors(number), self.plain.get(number, {})) for number in numbers}

    def state_tensors(self, number: int) -> dict[str, torch.Tensor]:
        """Return the state tensors of one parameter, by state."""
        return {state: self.fakes[key] for state, key in self.keys.get(number, {}).items()}

    def state_sizes(self) -> dict[int, int]:
        """Return the size in bytes of each parameter's states."""
        return {
            number: sum(tensor.nbytes for tensor in self.state_tensors(number).values())
            for number in self.params_with_state
        }


def _safetensors_output(name: str, tensors: Mapping[str, TensorInfo]) -> SafetensorsOutput:
    (data_file,) = pack_files(MODEL, tensors, {}, sys.maxsize)
    return SafetensorsOutput(replace(data_file, path=name))


def _stale_names(kind: str, prefix: str | None) -> list[str]:
    """Return the names of other files that a reader could take for this variant of the component."""
    model = ("model.safetensors", "pytorch_model.bin")
    stems = model if kind == MODEL else ("optimizer.safetensors", "pytorch_optim.bin")
    singles = model if kind == MODEL else ("optimizer.safetensors",)
    return [file_variant(f"{stem}.index.json", prefix) for stem in stems] + [
        file_variant(stem, prefix) for stem in singles
    ]
