"""The division of a model and an optimizer into the files of ColossalAI 0.5.0, and their names. Pure functions.

Source: ``colossalai/checkpoint_io`` of that version. Sizes in its indexes are in MiB; the keys of optimizers' weight
maps are the numbers of parameters.

:mod:`rankless.colossalai.booster_layouts` names files with it on rank 0, and :mod:`rankless.colossalai.writer` divides
with it on every rank. ColossalAI reads names and indexes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rankless.ondisk.data_files import split_by_size

_MIB = 2**20


@dataclass(frozen=True)
class FileNames:
    """The trees for files of ``torch.save``, by file name, and the index, which maps tensors to files."""

    trees: Mapping[str, Any]
    index_name: str
    index: bytes


def number_file_name(name: str, number: int) -> str:
    """Insert a file's number, which counts from 1, before the extension of its name.

    For example, ``model-00001.safetensors`` for number 1.
    """
    stem, _, extension = name.rpartition(".")
    return f"{stem}-{number:05d}.{extension}"


def build_index(metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> bytes:
    """Build the JSON text of an index."""
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode() + b"\n"


def format_mib(nbytes: int) -> float:
    """Convert a size in bytes to MiB, the unit of an index."""
    return nbytes / _MIB


def model_files(state: Mapping[str, Any], limit: int) -> FileNames:
    """Divide a model's state dict into numbered files. A tensor with several names is stored once, in one of them."""
    firsts: dict[int, str] = {}
    first_of = {name: firsts.setdefault(id(value), name) for name, value in state.items()}
    sizes = {name: _size_of(value) if first_of[name] == name else 0 for name, value in state.items()}
    file_of = {
        name: number_file_name("pytorch_model.bin", number)
        for number, shelf in enumerate(split_by_size({name: sizes[name] for name in firsts.values()}, limit), start=1)
        for name in shelf
    }
    weight_map = {name: file_of[first_of[name]] for name in state}
    trees: dict[str, dict[str, Any]] = {file: {} for file in file_of.values()}
    for name, value in state.items():
        trees[weight_map[name]][name] = value
    total = sum(map(_size_of, state.values()))
    return FileNames(trees, "pytorch_model.bin.index.json", build_index({"total_size": format_mib(total)}, weight_map))


def optimizer_files(state: Mapping[str, Any], limit: int) -> FileNames:
    """Divide an ``Optimizer.state_dict`` into numbered files by parameter, and a file of the param groups."""
    states: Mapping[int, Mapping[str, Any]] = state["state"]
    sizes = {number: sum(map(_size_of, param_state.values())) for number, param_state in states.items()}
    numbered_files = [
        (number_file_name("pytorch_optim.bin", n), shelf)
        for n, shelf in enumerate(split_by_size(sizes, limit), start=1)
    ]
    groups = "pytorch_optim_group.bin"
    trees: dict[str, Any] = {name: {number: states[number] for number in shelf} for name, shelf in numbered_files}
    metadata = {"param_groups": groups, "total_size": format_mib(sum(sizes.values()))}
    weight_map = {str(number): name for name, shelf in numbered_files for number in shelf}
    return FileNames(
        {**trees, groups: state["param_groups"]}, "pytorch_optim.bin.index.json", build_index(metadata, weight_map)
    )


def _size_of(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0
