"""Files as ColossalAI 0.5.0 has them, so that it loads them.

Source: ``colossalai/checkpoint_io`` of that version. Sizes in its indexes are MiB. What it calls a prefix is a variant
of the files' names: ``pytorch_model.foo-00001.bin``, ``pytorch_model.bin.index.foo.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.compat.colossalai.files import build_index, format_mib, number_files
from holdfast.components.content import MODEL, OPTIMIZER, ComponentContent
from holdfast.components.file_layouts import file_sets, model_file
from holdfast.components.files import ComponentFile, FileSet, SafetensorsOutput, TorchOutput
from holdfast.conversion.fake_tensors import FakeTensors
from holdfast.conversion.torch_target import as_saved_tensor
from holdfast.errors import InvalidArgumentError
from holdfast.ondisk import values
from holdfast.ondisk.files import TensorInfo, pack_files, split_by_size
from holdfast.ondisk.param_order import ORDERED
from holdfast.ondisk.validation import split_state_key


def file_variant(name: str, prefix: str | None) -> str:
    """A file's name with the prefix where ColossalAI puts it: before the last ending."""
    if not prefix:
        return name
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{prefix}.{ending}"


def model_folder(content: ComponentContent, limit: int, prefix: str | None, *, use_safetensors: bool) -> FileSet:
    """A model in numbered files with an index, and its configuration where it has one."""
    if use_safetensors and content.values:
        raise InvalidArgumentError(
            f"safetensors files of ColossalAI's have no place for {next(iter(content.values))!r}, which is no tensor: "
            "save with use_safetensors=False"
        )
    # Its loader knows of no tied weights: safetensors files need a copy under each name.
    content = content.untied() if use_safetensors else content
    stem, ending = ("model", "safetensors") if use_safetensors else ("pytorch_model", "bin")
    every = file_sets(content.tensors, limit)
    names = [number_files(file_variant(f"{stem}.{ending}", prefix), number) for number in range(1, len(every) + 1)]
    files: list[ComponentFile] = []
    weight_map: dict[str, str] = {}
    for name, shelf in zip(names, every, strict=True):
        files.append(_safetensors(name, shelf) if use_safetensors else model_file(name, content, shelf))
        weight_map |= dict.fromkeys(shelf, name)
    weight_map |= {alias: weight_map[name] for alias, name in content.tied.items()}
    weight_map |= dict.fromkeys(content.values, names[0])
    total = content.nbytes + sum(content.tensors[name].nbytes for name in content.tied.values())
    table = build_index({"total_size": format_mib(total)}, weight_map)
    small = {**content.companions, file_variant(f"{stem}.{ending}.index.json", prefix): table}
    return FileSet(content, files, small, _rivals(MODEL, prefix))


def optimizer_file(content: ComponentContent, name: str) -> FileSet:
    """An optimizer in one file, as ``Optimizer.load_state_dict`` takes it."""
    known = _NumberedStates.of(content)
    tree = {"state": known.states(known.params()), "param_groups": known.groups}
    return FileSet(content, [TorchOutput(name, tree, known.fakes)])


def optimizer_folder(content: ComponentContent, limit: int, prefix: str | None) -> FileSet:
    """An optimizer in numbered files by number of parameter, with a file of groups and an index."""
    known = _NumberedStates.of(content)
    names: list[str] = []
    files: list[ComponentFile] = []
    weight_map: dict[str, str] = {}
    for number, shelf in enumerate(split_by_size(known.sizes(), limit), start=1):
        names.append(number_files(file_variant("pytorch_optim.bin", prefix), number))
        inside = {key: known.fakes[key] for param in shelf for key in known.keys.get(param, {}).values()}
        files.append(TorchOutput(names[-1], known.states(shelf), inside))
        weight_map |= {str(param): names[-1] for param in shelf}
    groups = file_variant("pytorch_optim_group.bin", prefix)
    metadata = {"param_groups": groups, "total_size": format_mib(content.nbytes)}
    small = {
        file_variant("pytorch_optim.bin.index.json", prefix): build_index(metadata, weight_map),
        groups: as_saved_tensor(list(known.groups)),
    }
    return FileSet(content, files, small, _rivals(OPTIMIZER, prefix))


@dataclass(frozen=True)
class _NumberedStates:
    """An optimizer whose parameters are known by number, counted over all groups.

    ``keys`` are, by number and state, the names of tensors in the content; ``fakes`` are tensors without data by these
    names; ``plain`` are states that are no tensors.
    """

    groups: Sequence[Mapping[str, Any]]
    keys: Mapping[int, Mapping[str, str]]
    fakes: Mapping[str, torch.Tensor]
    plain: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, content: ComponentContent) -> _NumberedStates:
        """Number the parameters. Raises ``InvalidArgumentError`` where nobody knows their order."""
        fakes = FakeTensors({(OPTIMIZER, key): info for key, info in content.tensors.items()})
        groups = values.decode_value(dict(content.values), fakes, "the optimizer's values")["groups"]
        if not all(group[ORDERED] for group in groups):
            raise InvalidArgumentError(
                "ColossalAI numbers an optimizer's parameters, and nobody knows the order of these, which several "
                "stages of a pipeline or several optimizers have: use holdfast.save_optimizer, which goes by names"
            )
        numbers = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
        keys: dict[int, dict[str, str]] = {}
        for key in content.tensors:
            name, state = split_state_key(key)
            keys.setdefault(numbers[name], {})[state] = key
        return cls(
            [{**group["settings"], "params": [numbers[name] for name in group["params"]]} for group in groups],
            keys,
            {key: fakes.make((OPTIMIZER, key)) for key in content.tensors},
            {numbers[name]: states for group in groups for name, states in group["state"].items()},
        )

    def params(self) -> list[int]:
        """The parameters that have a state."""
        return sorted(self.keys.keys() | self.plain.keys())

    def states(self, wanted: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The states of some parameters."""
        return {number: {**self.inside(number), **self.plain.get(number, {})} for number in wanted}

    def inside(self, number: int) -> dict[str, torch.Tensor]:
        """The state tensors of one parameter, by state."""
        return {state: self.fakes[key] for state, key in self.keys.get(number, {}).items()}

    def sizes(self) -> dict[int, int]:
        """The bytes of the states of each parameter that has any."""
        return {number: sum(tensor.nbytes for tensor in self.inside(number).values()) for number in self.params()}


def _safetensors(name: str, shelf: Mapping[str, TensorInfo]) -> SafetensorsOutput:
    (data,) = pack_files(MODEL, shelf, {}, sys.maxsize)
    return SafetensorsOutput(replace(data, path=name))


def _rivals(kind: str, prefix: str | None) -> list[str]:
    """What would be taken for this variant of the part, too."""
    model = ("model.safetensors", "pytorch_model.bin")
    stems = model if kind == MODEL else ("optimizer.safetensors", "pytorch_optim.bin")
    singles = model if kind == MODEL else ("optimizer.safetensors",)
    return [file_variant(f"{stem}.index.json", prefix) for stem in stems] + [
        file_variant(stem, prefix) for stem in singles
    ]
