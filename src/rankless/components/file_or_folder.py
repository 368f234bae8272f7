"""Layouts of a component in files: one file, or a folder in the Hugging Face layout.

Rank 0 lays out in the vote "preparing the save". The files must be those that transformers, PEFT and torch open.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch
from msgspec.structs import replace

from rankless.components.component_files import AdapterOutput, ComponentFile, FileSet, SafetensorsOutput, TorchOutput
from rankless.components.stored_component import MODEL, StoredComponent
from rankless.conversion.changed_states import warn_of_changed_states
from rankless.conversion.fake_tensors import FakeTensors
from rankless.conversion.own_values import add_own_values
from rankless.conversion.state_dict_schemas import optimizer_state_dict
from rankless.errors import InvalidArgumentError
from rankless.formats.huggingface import VALUES_KEY
from rankless.formats.peft import ADAPTER_BIN
from rankless.ondisk import header, values
from rankless.ondisk.data_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    DataFile,
    TensorInfo,
    build_index,
    index_path,
    pack_files,
    split_by_size,
)
from rankless.ondisk.validation import split_state_key
from rankless.ondisk.value_files import OWN_STATE
from rankless.ondisk.weight_names import DIFFUSERS, TRANSFORMERS, find_stems, index_and_single, rename_weights

#: Lays a component out in files.
Layout = Callable[[StoredComponent], FileSet]

#: Names of indexes and single weight files of all formats. If several exist, some readers load the one, some another.
STALE_NAMES = {
    "model": tuple(
        name
        for safetensors, torch_stem in (TRANSFORMERS, DIFFUSERS)
        for name in (*index_and_single(safetensors), *index_and_single(torch_stem, "bin"))
    ),
    "optimizer": ("optimizer.safetensors.index.json", "optimizer.safetensors"),
}


def safetensors_file(content: StoredComponent, name: str) -> FileSet:
    """Lay a component out in one safetensors file."""
    files = _pack_safetensors(content, sys.maxsize)
    if len(files) > 1:
        raise InvalidArgumentError("the header of one file is too small for this many tensors: save with shard=True")
    return FileSet(content, [SafetensorsOutput(replace(files[0], path=name))])


def safetensors_folder(content: StoredComponent, limit: int) -> FileSet:
    """Lay a component out in files of at most ``limit`` bytes of tensors.

    Several files get an index, and a model its configuration.
    """
    files = _pack_safetensors(content, limit)
    if content.kind == MODEL:
        files = rename_weights(files, find_stems(content.companions.get(CONFIG, b""))[0])
    small_files = dict(content.companions)
    if len(files) > 1:
        small_files[index_path(files).rpartition("/")[2]] = build_index(files)
    return FileSet(content, [SafetensorsOutput(file) for file in files], small_files, STALE_NAMES[content.kind])


def adapter_folder(content: StoredComponent) -> FileSet:
    """Lay adapters out as PEFT does: the files of the adapter ``default``, and a folder for each other adapter."""
    by_folder: dict[str, dict[str, TensorInfo]] = {}
    for key, info in content.tensors.items():
        folder, _, name = key.partition("/")
        by_folder.setdefault(folder, {})[name] = info
    files: list[ComponentFile] = []
    for folder, tensors in by_folder.items():
        packed = pack_files(ADAPTER, tensors, {}, sys.maxsize)
        if len(packed) > 1:
            raise InvalidArgumentError("the header of one file, in which PEFT stores an adapter, is too small for it")
        files.append(AdapterOutput(folder, packed[0]))
    configurations = {
        name: data for name, data in content.companions.items() if PurePosixPath(name).name == ADAPTER_CONFIG
    }
    return FileSet(content, files, configurations, [ADAPTER_BIN])


def torch_file(content: StoredComponent, name: str) -> FileSet:
    """Lay a component out in one ``torch.save`` file: a state dict for ``load_state_dict``."""
    if content.kind == MODEL:
        return FileSet(content, [model_file(name, content, content.tensors)])
    fakes = FakeTensors({(content.kind, key): info for key, info in content.tensors.items()})
    return FileSet(
        content,
        [TorchOutput(name, _optimizer_tree(content, fakes), _fakes_by_name(fakes, content.tensors, content.kind))],
    )


def torch_folder(content: StoredComponent, limit: int) -> FileSet:
    """Lay a model out in ``torch.save`` files, as transformers did before safetensors."""
    tensors_by_file = file_sets(content.tensors, limit)
    number = len(tensors_by_file)
    _, stem = find_stems(content.companions.get(CONFIG, b""))
    index, single = index_and_single(stem, "bin")
    names = [single] if number == 1 else [f"{stem}-{i:05d}-of-{number:05d}.bin" for i in range(1, number + 1)]
    files = [model_file(name, content, file_tensors) for name, file_tensors in zip(names, tensors_by_file, strict=True)]
    small_files = dict(content.companions)
    if number > 1:
        weight_map = {
            key: name for name, file_tensors in zip(names, tensors_by_file, strict=True) for key in file_tensors
        }
        weight_map |= {alias: weight_map[key] for alias, key in content.tied.items()}
        weight_map |= dict.fromkeys(content.values, names[0])
        table = {"metadata": {"total_size": content.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        small_files[index] = json.dumps(table, indent=2).encode() + b"\n"
    return FileSet(content, files, small_files, STALE_NAMES[MODEL])


def model_file(name: str, content: StoredComponent, tensors: Mapping[str, TensorInfo]) -> TorchOutput:
    """Return a ``torch.save`` file with some tensors of a model and their ties. The first file gets the values."""
    fakes = FakeTensors({(MODEL, key): info for key, info in tensors.items()})
    tree: dict[str, Any] = {key: fakes.make_tensor((MODEL, key)) for key in tensors}
    tree |= {alias: tree[key] for alias, key in content.tied.items() if key in tensors}
    if list(tensors)[:1] == list(content.tensors)[:1]:
        tree |= values.decode_value(dict(content.values), fakes, "the model's values")
    return TorchOutput(name, tree, _fakes_by_name(fakes, tensors, MODEL))


def file_sets(tensors: Mapping[str, TensorInfo], limit: int) -> list[dict[str, TensorInfo]]:
    """Split tensors, in their order, into files of at most ``limit`` bytes or one tensor; at least one file."""
    sizes = {name: info.nbytes for name, info in tensors.items()}
    return [{name: tensors[name] for name in file_tensors} for file_tensors in split_by_size(sizes, limit)]


def is_by_number(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the parameters of an optimizer are named by their positions."""
    names = [name for group in groups for name in group["params"]]
    return bool(names) and names == [str(number) for number in range(len(names))]


def _optimizer_tree(content: StoredComponent, fakes: FakeTensors) -> dict[str, Any]:
    """Return a state dict that also has the names of parameters and the optimizer's class."""
    decoded = values.decode_value(dict(content.values), fakes, "the optimizer's values")
    groups = decoded["groups"]
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key in content.tensors:
        fqn, state = split_state_key(key)
        tensors.setdefault(fqn, {})[state] = fakes.make_tensor((content.kind, key))
    state_dict = optimizer_state_dict(groups, tensors, named=not is_by_number(groups))
    names = [name for group in groups for name in group["params"]]
    warn_of_changed_states({"optimizer": content.values}, "a file of torch.save")
    state_dict = add_own_values(state_dict, decoded.get(OWN_STATE, ()), names)
    kinds = {group["class"] for group in groups}
    return {**state_dict, "class": kinds.pop()} if len(kinds) == 1 else state_dict


def _fakes_by_name(fakes: FakeTensors, tensors: Mapping[str, TensorInfo], kind: str) -> dict[str, torch.Tensor]:
    return {key: fakes.make_tensor((kind, key)) for key in tensors}


def _pack_safetensors(content: StoredComponent, limit: int) -> list[DataFile]:
    """Pack tensors into safetensors files; the header of the first one holds the values."""
    files = pack_files(content.kind, content.tensors, content.tied, limit)
    files = files or [DataFile(f"{content.kind}/{content.kind}.safetensors", {}, {})]
    files = [replace(file, notes=content.notes) for file in files]
    encoded = _encode_values(content)
    if not encoded:
        return files
    first = replace(files[0], notes={**content.notes, VALUES_KEY: encoded.decode()})
    if first.data_start > header.HEADER_LIMIT:
        subject = f"the header of the first file of the {content.kind}, which holds its values,"
        raise values.too_large_error(encoded, subject, first.data_start, header.HEADER_LIMIT)
    return [first, *files[1:]]


def _encode_values(content: StoredComponent) -> bytes:
    tree = dict(content.values)
    if content.kind != MODEL and is_by_number(tree["groups"]):
        tree["by_number"] = True
    return values.to_json({content.kind: tree}) if tree else b""
