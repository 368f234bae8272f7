"""Tiny configurations of transformers' model families.

All widths of a family's default configuration are divided by one number, so that what must divide another width still
does. Depths, experts and vocabularies are cut to a few. No model is ever run: it only has to be built.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: The parameters that a model may have: a round trip then takes a second.
MAX_PARAMETERS = 4_000_000

#: The kinds of settings, by their names. The first pattern that matches counts.
_KINDS = {
    "kept": r"^(num_channels|in_channels|in_chans|image_size|patch_size|window_size|sampling_rate)$|"
    r"kernel|stride|chunk|pool",
    "token": r"_token_ids?$|_token_index$|^(bos|eos|pad|sep|cls)_",
    "vocabulary": r"vocab.*size|codebook_size|num_embeddings$",
    "position": r"max_.*(position|length|len|embeddings)|n_positions|n_ctx|max_seq",
    "expert": r"^(num|n)_.*experts$|moe_num_experts$",
    "chosen expert": r"experts_per_tok|top_?k$|moe_k$",
    "layer": r"layers?$|^depths?$|^num_blocks$",
    "head": r"heads?$",
    "width": r"(^|_)(dims?|channels|width|rank|features|filters|units|sizes?)$|^d_|^n_embd|^n_inner|ffn|hidden",
}
_LIMITS = {"vocabulary": 128, "position": 64, "expert": 4, "chosen expert": 2}

#: Settings that name layers by their numbers, which do not exist in a model of two layers: their defaults follow.
_BY_LAYER_NUMBER = {"out_features", "out_indices", "_out_features", "_out_indices", "stage_names", "per_layer_config"}
_LABELS = {"id2label", "label2id"}


@dataclass(frozen=True)
class Shrinking:
    """A way to make a configuration smaller: widths are divided, and layers and heads cut if these are given."""

    divisor: int
    layers: int | None = 2
    heads: int | None = None

    def shrink(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return smaller settings, of parts as well."""
        smaller = {
            name: self._shrink_value(name, value)
            for name, value in settings.items()
            if name not in _BY_LAYER_NUMBER | _LABELS
        }
        if self.layers and "num_hidden_layers" in smaller and isinstance(smaller.get("layer_types"), list):
            smaller["num_hidden_layers"] = len(smaller["layer_types"])
        return smaller

    def _shrink_value(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return self.shrink(value) if all(isinstance(key, str) for key in value) else value
        if isinstance(value, list | tuple) and value:
            return self._shrink_list(name, list(value))
        return self._shrink_number(name, value) if type(value) is int else value

    def _shrink_list(self, name: str, entries: list[Any]) -> list[Any]:
        if self.layers and name in {"layer_types", "layers_block_type", "mlp_layer_types", "block_types"}:
            kinds = list(dict.fromkeys(entries))  # each kind of layer once
            return (kinds * self.layers)[: max(self.layers, len(kinds))]
        if _kind_of(name) == "width" and all(type(entry) is int for entry in entries):
            return [self._shrink_number(name, entry) for entry in entries]
        return entries

    def _shrink_number(self, name: str, value: int) -> int:
        kind = _kind_of(name)
        limits = _LIMITS | {"layer": self.layers or value, "head": self.heads or value}
        if kind == "width":
            return value // self.divisor if value % self.divisor == 0 and value >= 32 else value
        if kind == "token":
            return value if value < 0 else value % 100
        return min(value, limits[kind]) if kind in limits else value


#: From small models to larger ones.
_SHRINKINGS = [
    *(Shrinking(divisor, heads=heads) for divisor in (16, 64, 8, 4) for heads in (None, 4)),
    *(Shrinking(divisor, layers=None) for divisor in (16, 64, 8)),
    *(Shrinking(2), Shrinking(1), Shrinking(1, layers=None)),
]


def make_tiny_config(model_class: Any, changes: Mapping[str, Any]) -> Any:
    """Return a configuration of a model with at most ``MAX_PARAMETERS``.

    ``changes`` are settings that replace those of the smaller configuration; those of parts are in dicts. Raises the
    first error of transformers if no model can be built.
    """
    first: Exception | None = None
    for shrinking in _SHRINKINGS:
        try:
            settings = shrinking.shrink(model_class.config_class().to_dict())
            config = model_class.config_class.from_dict(_merge(settings, changes))
            size = _count_parameters(model_class, config)
        except Exception as error:  # noqa: BLE001 - families check their settings in ways of their own
            first = first or error
            continue
        if size <= MAX_PARAMETERS:
            return config
    raise first or ValueError(f"each configuration has more than {MAX_PARAMETERS} parameters")


def _count_parameters(model_class: Any, config: Any) -> int:
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def _merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with some replaced, those of parts one by one."""
    merged = dict(settings)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _kind_of(name: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), None)
