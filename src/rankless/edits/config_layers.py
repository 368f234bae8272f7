"""The layers in a ``config.json`` of transformers, after a stack of them has changed.

:mod:`rankless.edits.layers` passes it to the catalog, on each rank that opens the source. Nothing of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.edits.config_parts import change_parts, iterate_parts, text_parts
from rankless.errors import InvalidArgumentError

#: Entries of ``config.json`` with the number of layers.
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")

#: Entries of ``config.json`` that only models with an encoder and a decoder have.
_TWO_STACKS = {"num_decoder_layers", "decoder_layers"}

#: Entries of ``config.json`` with a list that has an element for each layer, and entries with numbers of layers.
_LISTS = ("layer_types", "no_rope_layers", "attention_layers", "layers_block_type", "moe_layer_freq", "mlp_layer_types")
_NUMBERS = ("mlp_only_layers", "full_attn_idxs", "cross_attention_layers", "attn_layer_indices")

#: The entry of ``config.json`` with the number of the first layers, which are dense, before those with experts.
_DENSE = "first_k_dense_replace"

#: The entry with the number of layers for multi-token prediction, which DeepSeek-V3 stores behind the others.
_FURTHER = "num_nextn_predict_layers"


def change_layers(config: dict[str, Any], order: Sequence[int], count: int, stack: str) -> dict[str, Any]:
    """Return the configuration with the new layers, in the part that describes the stack.

    For example ``model.vision_tower.encoder.layers`` changes ``vision_config`` alone, and ``model.layers`` the entries
    of the whole model and of its text. Raises ``InvalidArgumentError`` if that part has another number of layers.
    """
    own = _own_parts(config, stack)
    for key, part in text_parts(config).items():
        if not own and any(_own_parts(inner, stack) for inner in iterate_parts(part)):
            return {**config, key: change_layers(part, order, count, stack)}
    parts = [config[key] for key in own] or [*iterate_parts(config)]
    for part in parts:
        _check_numbers(part, stack)
    counts = [entry for part in parts for entry in _counts_of(part, stack).items()]
    further = sum(part[_FURTHER] for part in parts if type(part.get(_FURTHER)) is int)
    if further > 0 and count in {value + further for _, value in counts}:
        raise InvalidArgumentError(
            f"layers: the last {further} of the {count} layers in {stack} predict further tokens ({_FURTHER} in "
            "config.json), and are no part of the stack: save the model without them, and set the entry to 0, first"
        )
    if counts and count not in (value for _, value in counts):
        listed = ", ".join(f"{key} {value}" for key, value in counts)
        raise InvalidArgumentError(
            f"layers: {stack} has {count} layers, and config.json has {listed}: correct config.json first"
        )
    if own:
        return {**config, **{key: _change_part(config[key], order, count, stack) for key in own}}
    return change_parts(config, lambda part: _change_part(part, order, count, stack))


def _own_parts(config: Mapping[str, Any], stack: str) -> list[str]:
    """Return the entries of a configuration that describe a stack of another kind than text, such as of vision."""
    words, text = stack.replace("visual", "vision"), text_parts(config)
    described = [key for key, part in config.items() if isinstance(part, dict) and _counts_of(part, stack)]
    return [key for key in described if key not in text and key.removesuffix("_config") in words]


def _check_numbers(config: Mapping[str, Any], stack: str) -> None:
    """Raise ``InvalidArgumentError`` if an entry that would have to follow is not a whole number, or a list of them."""
    numbers = [(key, [config.get(key)]) for key in (*_count_keys(config, stack), _DENSE, _FURTHER)]
    numbers += [(key, config[key]) for key in _NUMBERS if isinstance(config.get(key), list)]
    for key, values in numbers:
        if not all(value is None or type(value) is int for value in values):
            raise InvalidArgumentError(
                f"layers: config.json has {key} {config[key]!r:.80}, where whole numbers are expected: correct it first"
            )


def _counts_of(config: Mapping[str, Any], stack: str) -> dict[str, int]:
    return {key: config[key] for key in _count_keys(config, stack) if type(config.get(key)) is int}


def _change_part(config: dict[str, Any], order: Sequence[int], count: int, stack: str) -> dict[str, Any]:
    found = _counts_of(config, stack)
    changed: dict[str, Any] = {key: len(order) for key, value in found.items() if value == count}
    for key in _LISTS:
        if isinstance(config.get(key), list) and len(config[key]) == count:  # else it is a list of something else
            changed[key] = [config[key][old] for old in order]
    for key in _NUMBERS:
        if isinstance(config.get(key), list):
            changed[key] = [new for new, old in enumerate(order) if old in config[key]]
    if changed.keys() & found.keys() and type(config.get(_DENSE)) is int:
        changed[_DENSE] = _count_dense(order, config[_DENSE])
    return {**config, **changed}


def _count_dense(order: Sequence[int], first: int) -> int:
    """Return how many of the new layers are dense. Raises ``InvalidArgumentError`` if they are not the first ones."""
    are_dense = [old < first for old in order]
    if not all(are_dense[: sum(are_dense)]):
        raise InvalidArgumentError(
            f"layers: the first {first} layers are dense ({_DENSE} in config.json), and must stay before the others"
        )
    return sum(are_dense)


def _count_keys(config: Mapping[str, Any], stack: str) -> Sequence[str]:
    """Return the entries with the number of layers of a stack. Models with two stacks have one for each."""
    if not _TWO_STACKS & config.keys():
        return _COUNTS
    if "decoder" in stack:
        return ("num_decoder_layers", "decoder_layers")
    if "encoder" in stack:
        return ("encoder_layers", "num_layers", "num_hidden_layers")
    raise InvalidArgumentError(f"layers: the model has an encoder and a decoder: pass stack= with one, not {stack!r}")
