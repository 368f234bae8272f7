"""Changes of a ``config.json`` of transformers that hold for its parts, too: the dtype, and entries that verbs change.

Verbs use it, and :mod:`rankless.conversion.config_dtype` for the bytes of a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rankless.ondisk.dtypes import TORCH_NAMES

#: The names that a configuration has for the dtype of the weights, now and before transformers 5.
_DTYPE_KEYS = ("dtype", "torch_dtype")

#: The parts of a configuration that describe a model of text, or contain such a part: of Qwen-Omni, InternVL, Janus.
_TEXT_PARTS = ("text_config", "decoder", "thinker_config", "llm_config", "language_config")

#: How deep configurations of parts are nested at most.
_MAX_DEPTH = 8

#: The largest size in bytes of a file that is indented: indented lists inside of lists take very much space.
_MAX_INDENTED = 64 * 2**10


def set_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration that names a dtype, of files, wherever it names one. Parts of the model name one, too."""
    changed: dict[str, Any] = replace_dtypes(config, TORCH_NAMES[dtype], _MAX_DEPTH)
    return changed


def encode_config(config: Any, nbytes: int) -> bytes:
    """Return the bytes of a configuration that had ``nbytes`` before.

    Raises ``RecursionError`` if it is nested too deeply: the parser of Python 3.12 takes more than the encoder.
    """
    indent = 2 if nbytes <= _MAX_INDENTED else None
    return json.dumps(config, indent=indent, sort_keys=True).encode() + b"\n"


def change_parts(
    config: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]], depth: int = _MAX_DEPTH
) -> dict[str, Any]:
    """Return a configuration after a change of it, and of its parts for text and for a decoder."""
    parts = text_parts(config) if depth else {}
    return {**change(config), **{key: change_parts(dict(part), change, depth - 1) for key, part in parts.items()}}


def text_parts(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parts of a configuration that describe its model of text, such as ``text_config``."""
    return {key: config[key] for key in _TEXT_PARTS if isinstance(config.get(key), dict)}


def iterate_parts(config: Mapping[str, Any], depth: int = _MAX_DEPTH) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration, and its parts for text and for a decoder, which :func:`change_parts` changes."""
    yield config
    for part in text_parts(config).values() if depth else ():
        yield from iterate_parts(part, depth - 1)


def replace_dtypes(content: Any, dtype: str, depth: int = _MAX_DEPTH) -> Any:
    """Return a configuration with a dtype of torch wherever it names one, except the dtype of quantization."""
    if not isinstance(content, dict) or not depth:
        return content
    replaced = {key: dtype for key in _DTYPE_KEYS if isinstance(content.get(key), str)}
    parts = {key for key in content if key.endswith("_config") and key != "quantization_config"}
    return content | replaced | {key: replace_dtypes(content[key], dtype, depth - 1) for key in parts}
