"""The training step of checkpoints of other systems, which have it among their values.

A load asks it on each rank after its last vote, for the result; conversions store the step in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The keys that lead to the step in the user content, by the name of the format.
_KEYS = (
    ("trainer", ("trainer_state", "global_step")),
    ("deepspeed", ("global_steps",)),
    ("megatron", ("iteration",)),
    ("megatron", ("global_step",)),  # of NeMo
    ("lightning", ("global_step",)),
)

#: Steps are less than this, so that they fit into the manifest.
_LIMIT = 2**63


def find_step(format_name: str, user_content: Any) -> int | None:
    """Return the training step, or ``None``.

    Several formats in one folder are joined by ``+``, for example ``deepspeed+trainer``.
    """
    for name, keys in _KEYS:
        value = user_content if name in format_name.split("+") else None
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if type(value) is int and 0 <= value < _LIMIT:
            return value
    return None
