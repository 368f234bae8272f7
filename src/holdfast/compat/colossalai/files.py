"""How ColossalAI 0.5.0 divides a model and an optimizer among files, and what it calls these. Pure functions.

Source: ``colossalai/checkpoint_io`` of that version. Sizes in its indexes are MiB; weight maps of optimizers have the
numbers of parameters for names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.ondisk.files import split_by_size

_MIB = 2**20


@dataclass(frozen=True)
class FileNames:
    """Trees for files of ``torch.save`` by name, and an index that says what is where, by its name."""

    trees: Mapping[str, Any]
    index_name: str
    index: bytes


def number_files(name: str, number: int) -> str:
    """A file's name with its number, which counts from 1, before the ending."""
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{number:05d}.{ending}"


def build_index(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    """An index."""
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode() + b"\n"


def format_mib(nbytes: int) -> float:
    """What an index calls a size."""
    return nbytes / _MIB


def model_files(state: Mapping[str, Any], limit: int) -> FileNames:
    """A model's state dict in numbered files. A tensor that has several names lies in one of them, once."""
    firsts: dict[int, str] = {}
    first_of = {name: firsts.setdefault(id(value), name) for name, value in state.items()}
    sizes = {name: _nbytes(value) if first_of[name] == name else 0 for name, value in state.items()}
    file_of = {
        name: number_files("pytorch_model.bin", number)
        for number, shelf in enumerate(split_by_size({name: sizes[name] for name in firsts.values()}, limit), start=1)
        for name in shelf
    }
    weight_map = {name: file_of[first_of[name]] for name in state}
    trees: dict[str, dict[str, Any]] = {file: {} for file in file_of.values()}
    for name, value in state.items():
        trees[weight_map[name]][name] = value
    total = sum(map(_nbytes, state.values()))
    return FileNames(trees, "pytorch_model.bin.index.json", build_index({"total_size": format_mib(total)}, weight_map))


def optimizer_files(state: Mapping[str, Any], limit: int) -> FileNames:
    """An ``Optimizer.state_dict`` in numbered files, each parameter with all its states, and a file of the groups."""
    states: Mapping[int, Mapping[str, Any]] = state["state"]
    sizes = {number: sum(map(_nbytes, own.values())) for number, own in states.items()}
    held = [
        (number_files("pytorch_optim.bin", n), shelf) for n, shelf in enumerate(split_by_size(sizes, limit), start=1)
    ]
    groups = "pytorch_optim_group.bin"
    trees: dict[str, Any] = {name: {number: states[number] for number in shelf} for name, shelf in held}
    metadata = {"param_groups": groups, "total_size": format_mib(sum(sizes.values()))}
    weight_map = {str(number): name for name, shelf in held for number in shelf}
    return FileNames(
        {**trees, groups: state["param_groups"]}, "pytorch_optim.bin.index.json", build_index(metadata, weight_map)
    )


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0
