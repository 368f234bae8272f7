"""Totals of an edit: for each group, how many tensors stay, move, are computed anew or are left out.

:mod:`rankless.edits.apply_edits` adds them to the report of an edit. For example ``resize-vocab`` of a model trained by
AdamW gives ``optimizer: 54 tensors: 48 as stored, 6 computed``: two moments of an embedding, a head and its bias.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankless.edits.catalog import Catalog, Tensors
from rankless.formats.edited_reader import StoredKey


def describe_groups(before: Catalog, after: Catalog) -> Iterator[str]:
    """Yield a line for each group that the checkpoint had before the edit, or has after it."""
    for group in dict.fromkeys((*before.tensors, *after.tensors)):
        yield f"{group}: {_describe_group(group, before.tensors.get(group, {}), after.tensors.get(group, {}))}"


def _describe_group(group: str, before: Tensors, after: Tensors) -> str:
    wholes = {name: tensor.whole for name, tensor in after.items()}
    stay = sum(whole == StoredKey(0, group, name) for name, whole in wholes.items())
    computed = sum(whole is None for whole in wholes.values())
    inputs = {key for tensor in after.values() for key in tensor.inputs()}
    counts = {
        "as stored": stay,
        "under another name": len(after) - stay - computed,
        "computed": computed,
        "left out": sum(StoredKey(0, group, name) not in inputs for name in before),
    }
    parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{len(after)} tensors: {parts}" if parts else "no tensor"
