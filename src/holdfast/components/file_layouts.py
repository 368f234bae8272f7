"""How a part lies in files: one file, or a folder as Hugging Face libraries have it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.components.content import MODEL, ComponentContent
from holdfast.components.files import FileSet, SafetensorsOutput, TorchOutput
from holdfast.conversion.fake_tensors import FakeTensors
from holdfast.conversion.state_dict_schemas import optimizer_state_dict
from holdfast.errors import InvalidArgumentError
from holdfast.formats.huggingface import VALUES_KEY
from holdfast.ondisk import header, values
from holdfast.ondisk.files import DataFile, TensorInfo, build_index, index_path, pack_files, split_by_size
from holdfast.ondisk.validation import split_state_key

#: Lays a part out in files.
Layout = Callable[[ComponentContent], FileSet]

#: Names of indexes and of single files of weights, of either format: where both are, readers take the one or the other.
STALE_NAMES = {
    "model": (
        *("model.safetensors.index.json", "model.safetensors"),
        *("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ),
    "optimizer": ("optimizer.safetensors.index.json", "optimizer.safetensors"),
}


def safetensors_file(content: ComponentContent, name: str) -> FileSet:
    """One safetensors file."""
    files = _pack(content, sys.maxsize)
    if len(files) > 1:
        raise InvalidArgumentError("there are more tensors than the header of one file holds; save with shard=True")
    return FileSet(content, [SafetensorsOutput(replace(files[0], path=name))])


def safetensors_folder(content: ComponentContent, limit: int) -> FileSet:
    """Files of at most ``limit`` bytes of tensors, an index where there are several, and a model's configuration."""
    files = _pack(content, limit)
    small = dict(content.companions)
    if len(files) > 1:
        small[index_path(content.kind).rpartition("/")[2]] = build_index(files)
    return FileSet(content, [SafetensorsOutput(file) for file in files], small, STALE_NAMES[content.kind])


def torch_file(content: ComponentContent, name: str) -> FileSet:
    """One file of ``torch.save``: a state dict, as ``load_state_dict`` takes it."""
    if content.kind == MODEL:
        return FileSet(content, [model_file(name, content, content.tensors)])
    fakes = FakeTensors({(content.kind, key): info for key, info in content.tensors.items()})
    return FileSet(
        content, [TorchOutput(name, _optimizer(content, fakes), _by_name(fakes, content.tensors, content.kind))]
    )


def torch_folder(content: ComponentContent, limit: int) -> FileSet:
    """A model in files of ``torch.save``, as transformers had them before safetensors."""
    every = file_sets(content.tensors, limit)
    number = len(every)
    names = [f"pytorch_model-{i:05d}-of-{number:05d}.bin" for i in range(1, number + 1)]
    names = ["pytorch_model.bin"] if number == 1 else names
    files = [model_file(name, content, shelf) for name, shelf in zip(names, every, strict=True)]
    small = dict(content.companions)
    if number > 1:
        weight_map = {key: name for name, shelf in zip(names, every, strict=True) for key in shelf}
        weight_map |= {alias: weight_map[key] for alias, key in content.tied.items()}
        weight_map |= dict.fromkeys(content.values, names[0])
        table = {"metadata": {"total_size": content.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        small["pytorch_model.bin.index.json"] = json.dumps(table, indent=2).encode() + b"\n"
    return FileSet(content, files, small, STALE_NAMES[MODEL])


def model_file(name: str, content: ComponentContent, tensors: Mapping[str, TensorInfo]) -> TorchOutput:
    """A file of ``torch.save`` with some tensors of a model, and all that is tied to them; the first has the values."""
    fakes = FakeTensors({(MODEL, key): info for key, info in tensors.items()})
    tree: dict[str, Any] = {key: fakes.make((MODEL, key)) for key in tensors}
    tree |= {alias: tree[key] for alias, key in content.tied.items() if key in tensors}
    if list(tensors)[:1] == list(content.tensors)[:1]:
        tree |= values.decode_value(dict(content.values), fakes, "the model's values")
    return TorchOutput(name, tree, _by_name(fakes, tensors, MODEL))


def file_sets(tensors: Mapping[str, TensorInfo], limit: int) -> list[dict[str, TensorInfo]]:
    """Tensors in their order, as they go into files of at most ``limit`` bytes or one tensor; one file at least."""
    sizes = {name: info.nbytes for name, info in tensors.items()}
    return [{name: tensors[name] for name in shelf} for shelf in split_by_size(sizes, limit)]


def is_by_number(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the parameters of an optimizer have no names but their places."""
    names = [name for group in groups for name in group["params"]]
    return bool(names) and names == [str(number) for number in range(len(names))]


def _optimizer(content: ComponentContent, fakes: FakeTensors) -> dict[str, Any]:
    """A state dict that says, beside what torch's have, the names of parameters and the optimizer's class."""
    groups = values.decode_value(dict(content.values), fakes, "the optimizer's values")["groups"]
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key in content.tensors:
        fqn, state = split_state_key(key)
        tensors.setdefault(fqn, {})[state] = fakes.make((content.kind, key))
    found = optimizer_state_dict(groups, tensors, named=not is_by_number(groups))
    kinds = {group["class"] for group in groups}
    return {**found, "class": kinds.pop()} if len(kinds) == 1 else found


def _by_name(fakes: FakeTensors, tensors: Mapping[str, TensorInfo], kind: str) -> dict[str, torch.Tensor]:
    return {key: fakes.make((kind, key)) for key in tensors}


def _pack(content: ComponentContent, limit: int) -> list[DataFile]:
    """Files of safetensors; the header of the first one holds the values."""
    files = pack_files(content.kind, content.tensors, content.tied, limit)
    files = files or [DataFile(f"{content.kind}/{content.kind}.safetensors", {}, {})]
    told = _told(content)
    if not told:
        return files
    first = replace(files[0], notes={VALUES_KEY: told.decode()})
    if first.data_start > header.HEADER_LIMIT:
        where = f"the header of the first file of the {content.kind}, which holds its values,"
        raise values.too_large_error(told, where, first.data_start, header.HEADER_LIMIT)
    return [first, *files[1:]]


def _told(content: ComponentContent) -> bytes:
    told = dict(content.values)
    if content.kind != MODEL and is_by_number(told["groups"]):
        told["by_number"] = True
    return values.to_json({content.kind: told}) if told else b""
