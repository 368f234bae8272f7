"""torchao's form of quantized tensors in safetensors files, which transformers reads and writes.

An inner tensor of ``0.weight`` is called ``0._weight_qdata``, and the header's metadata describes each tensor. Source:
torchao's ``prototype/safetensors``.

Exports of quantized models write this form (components and conversions), and the reader of Hugging Face's layout reads
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rankless.errors import UnsupportedTensorError
from rankless.ondisk.value_files import SUBCLASS, TORCHAO

#: The key of the metadata with the names of all tensors, and torchao's description of a tensor that is not quantized.
_NAMES, _PLAIN = "tensor_names", json.dumps({"_type": "Tensor"})

#: The members of torchao's description: the class, its settings, and the names of the inner tensors.
_TYPE, _SETTINGS, _INNER = "_type", "_data", "_tensor_data_names"


def select_described(values: Mapping[str, Any]) -> dict[str, str]:
    """Return torchao's description of each tensor that has one, given the values of a model.

    A tensor that is in no module has no name in torchao's form.
    """
    described = {
        name: value.get(TORCHAO) for name, value in values.items() if "." in name and isinstance(value, Mapping)
    }
    return {name: text for name, text in described.items() if isinstance(text, str)}


def check_described(values: Mapping[str, Any], described: Mapping[str, str], config: bytes) -> None:
    """Raise ``UnsupportedTensorError`` if a configuration names torchao, which does not describe a quantized tensor.

    transformers would not open the model, and ``save_pretrained`` does not save it.
    """
    quantization = _parse_object(config.decode(errors="replace")).get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "torchao":
        return
    for name, value in values.items():
        if isinstance(value, Mapping) and SUBCLASS in value and name not in described:
            raise UnsupportedTensorError(
                f"model tensor {name!r} is a {value[SUBCLASS]}, which torchao cannot describe in safetensors files, so "
                "from_pretrained could not open the model: save a file of rankless with shard=False, or quantize with "
                "a configuration whose class torchao stores, such as Int8WeightOnlyConfig"
            )


def flat_names(described: Mapping[str, str]) -> dict[str, str]:
    """Return torchao's name of each inner tensor, by rankless's name ``NAME.INNER``."""
    return {
        f"{name}.{inner}": _flatten(name, inner)
        for name, text in described.items()
        for inner in _inner_names(_parse_object(text))
    }


def header_notes(described: Mapping[str, str], plain: Iterable[str]) -> dict[str, str]:
    """Return the entries of the header's metadata. ``plain`` are the names of the tensors that are not quantized."""
    notes = {**described, **dict.fromkeys(plain, _PLAIN)}
    return {**notes, _NAMES: json.dumps(list(notes))} if described else {}


def read_descriptions(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return torchao's description of each quantized tensor in a file, given its header's metadata.

    There is none if the metadata is not in torchao's form.
    """
    names = _parse_json(metadata.get(_NAMES, ""))
    texts = {name: metadata.get(name, "") for name in names if type(name) is str} if isinstance(names, list) else {}
    return {name: text for name, text in texts.items() if _inner_names(_parse_object(text))}


def native_names(stored: Iterable[str], described: Mapping[str, str]) -> dict[str, str]:
    """Return rankless's name of each stored inner tensor, by torchao's.

    A model may be stored under other names than those that the metadata has, so inner tensors are known by their last
    part: ``_weight_qdata``.
    """
    endings = {
        _flatten(f".{own}", inner).removeprefix("."): f"{own}.{inner}"
        for own, text in ((name.rpartition(".")[2], text) for name, text in described.items())
        for inner in _inner_names(_parse_object(text))
    }
    parts = ((name, name.rpartition(".")) for name in stored)
    return {name: f"{module}.{endings[last]}" for name, (module, _, last) in parts if last in endings}


def rename_ties(tied: Mapping[str, str], described: Mapping[str, str]) -> dict[str, str]:
    """Return the further names of tied tensors with rankless's names instead of torchao's."""
    renamed = native_names([*tied, *tied.values()], described)
    return {renamed.get(alias, alias): renamed.get(name, name) for alias, name in tied.items()}


def has_equal_settings(saved: str, here: str) -> bool:
    """Return whether two of torchao's descriptions agree. Another version of torchao may have fewer settings."""
    first, second = _parse_object(saved), _parse_object(here)
    ours, theirs = first.get(_SETTINGS), second.get(_SETTINGS)
    if not isinstance(ours, dict) or not isinstance(theirs, dict) or first.get(_TYPE) != second.get(_TYPE):
        return False
    return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


def _flatten(name: str, inner: str) -> str:
    module, _, own = name.rpartition(".")
    return f"{module}._{own}_{inner}"


def _inner_names(description: Mapping[str, Any]) -> list[str]:
    inner = description.get(_INNER)
    return [name for name in inner if type(name) is str] if isinstance(inner, list) else []


def _parse_object(text: str) -> dict[str, Any]:
    value = _parse_json(text)
    return value if isinstance(value, dict) else {}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # another library may have such keys, in another form
        return None
