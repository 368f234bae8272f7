"""The dtype that a ``config.json`` of transformers names.

:class:`~rankless.conversion.native_target.NativeTarget` calls it on rank 0 of a conversion or an export that casts the
model, when it writes the small files; :class:`~rankless.components.stored_component.StoredComponent` on rank 0 of a
save of a model with ``dtype=``, and of published weights. Only entries that name a dtype may change, and no
``quantization_config``.
"""

from __future__ import annotations

import json

from rankless.edits.config_parts import encode_config, replace_dtypes


def set_config_dtype(config: bytes, dtype: str) -> bytes:
    """Return a ``config.json`` that says that the weights have this dtype, wherever it names one.

    transformers loads a model in the dtype that its configuration names, not in the file's dtype. Configurations of
    parts of the model (``text_config``) name one, too. Bytes that are not JSON are returned as they are.
    """
    try:
        return encode_config(replace_dtypes(json.loads(config), dtype), len(config))
    except (ValueError, RecursionError):
        return config
