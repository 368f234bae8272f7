"""The tensors that transformers leaves out of a model's files, such as computed tables of positions.

Loads ask :func:`optional_names` on each rank while they match, layouts of saves ask :func:`names_not_saved`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from rankless.state.model.hf_config import unwrap_model

#: The attributes of transformers' models: names that are not saved, and patterns of names that may be missing.
_NOT_SAVED, _OPTIONAL = "_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing"


def names_not_saved(model: object) -> frozenset[str]:
    """Return the names of the tensors that ``save_pretrained`` does not write."""
    return frozenset(_read_texts(model, _NOT_SAVED))


def optional_names(model: object) -> Callable[[str], bool]:
    """Return a function that says whether a tensor may be missing in a checkpoint: the model keeps its own then."""
    not_saved, patterns = names_not_saved(model), [re.compile(text) for text in _read_texts(model, _OPTIONAL)]
    return lambda name: name in not_saved or any(pattern.search(name) for pattern in patterns)


def _read_texts(model: object, attribute: str) -> list[str]:
    module: Any = unwrap_model(model) if isinstance(model, nn.Module) else None
    return [str(text) for text in getattr(module, attribute, None) or ()]
