"""The warning of outputs that have no place for values which an optimizer keeps besides states and settings.

Conversions and the writer of NxD's format call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.observe.warning import warn_caller
from rankless.ondisk.value_files import OWN_STATE


def warn_left_out(output: str) -> None:
    """Warn that such values are not in an output."""
    warn_caller(
        f"an optimizer keeps values in its state_dict() besides states and settings, for which {output} has no place: "
        "they are left out"
    )


def has_values(saved: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether one of the saved entries of optimizers has such values."""
    return any(entry.get("values") or entry.get("entries") for entry in saved)


def warn_if_left_out(values: Mapping[str, Any], output: str) -> None:
    """Warn if one of the optimizers among the ``values`` of a checkpoint has such values."""
    if any(
        has_values(value.get(OWN_STATE, ())) for slot, value in values.items() if slot.partition("/")[0] == "optimizer"
    ):
        warn_left_out(output)
