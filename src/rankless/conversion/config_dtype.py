"""The dtype that a ``config.json`` of transformers names.

:class:`~rankless.conversion.native_target.NativeTarget` calls it on rank 0 of a conversion or an export that casts the
model, when it writes the small files; :class:`~rankless.components.stored_component.StoredComponent` on rank 0 of a
save of a model with ``dtype=``, and of published weights. Only entries that name a dtype may change, and no
``quantization_config``.
"""

from __future__ import annotations

import json
from typing import Any

#: The names under which it has the dtype of the weights, now and before transformers 5.
_DTYPE_KEYS = ("dtype", "torch_dtype")

#: How deep configurations of parts are nested at most, and the size of a file up to which it is indented, in bytes.
_MAX_DEPTH, _MAX_INDENTED = 8, 64 * 2**10


def set_config_dtype(config: bytes, dtype: str) -> bytes:
    """Return a ``config.json`` that says that the weights have this dtype, wherever it names one.

    transformers loads a model in the dtype that its configuration names, not in that of the file. Configurations of
    parts of the model (``text_config``) name one, too. Bytes that are not JSON are returned as they are.
    """
    try:
        content = _replace_dtypes(json.loads(config), dtype, _MAX_DEPTH)
        indent = 2 if len(config) <= _MAX_INDENTED else None  # indented lists inside of lists take very much space
        return json.dumps(content, indent=indent, sort_keys=True).encode() + b"\n"
    except (ValueError, RecursionError):
        return config


def _replace_dtypes(content: Any, dtype: str, depth: int) -> Any:
    if not isinstance(content, dict) or not depth:
        return content
    replaced = {key: dtype for key in _DTYPE_KEYS if isinstance(content.get(key), str)}
    parts = {key for key in content if key.endswith("_config") and key != "quantization_config"}
    return content | replaced | {key: _replace_dtypes(content[key], dtype, depth - 1) for key in parts}
