"""Optimizer states of which a checkpoint has only numbers: no verb can tell to which parameters they belong.

``torch.save`` of an optimizer, and so transformers' ``Trainer`` and Accelerate, write such numbers; a load matches them
with the parameters of the training. :mod:`rankless.edits.apply_edits` hides them from a verb on each rank. They stay as
they are if the verb leaves parameters in their places, and cannot be read any more if it does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec.structs import replace

from rankless.edits.cast import Cast
from rankless.edits.catalog import OPTIMIZER, Catalog, Tensors
from rankless.edits.dequantise import Dequantise
from rankless.edits.rename import Rename
from rankless.edits.value_changes import ValueChange
from rankless.formats.reader import UnreadTensorNote
from rankless.ondisk.validation import split_state_key
from rankless.ondisk.value_files import BY_NUMBER

#: A number, after that of the optimizer if there are several.
_NUMBER = re.compile(r"\d+(\.\d+)?")

#: The verbs that leave each parameter in its place, with its shape.
IN_PLACE = (Cast, Dequantise, Rename)

_WHY = (
    "belongs to a parameter of which the checkpoint has only the number, so that it cannot follow the edit: load the "
    "checkpoint into the training and save it with rankless first, or edit the model alone, with model_only"
)


def apply_to_named(apply: Callable[[Catalog], Catalog], catalog: Catalog, *, is_in_place: bool) -> Catalog:
    """Return the catalog after a verb is applied, which does not see numbered optimizers.

    ``is_in_place``: the verb is one of :data:`IN_PLACE`.
    """
    numbered = {group: catalog.tensors[group] for group in catalog.groups_of(OPTIMIZER) if is_numbered(catalog, group)}
    others = {group: tensors for group, tensors in catalog.tensors.items() if group not in numbered}
    changed = apply(replace(catalog, tensors=others))
    before = len(catalog.value_changes)
    changes = tuple(_leave(change, numbered) for change in changed.value_changes[before:])
    kept, unread = (numbered, ()) if is_in_place else ({}, _describe(numbered))
    return replace(
        changed,
        tensors={**changed.tensors, **kept},
        value_changes=(*changed.value_changes[:before], *changes),
        unread=(*changed.unread, *unread),
    )


def is_numbered(catalog: Catalog, group: str) -> bool:
    """Return whether an optimizer has numbers in place of the names of parameters."""
    names = {split_state_key(key)[0] for key in catalog.tensors[group]}
    owners = (catalog.owner_of(group, name) for name in names)
    has_names = any(name in catalog.tensors.get(model, {}) for model, name in owners)
    return bool(names) and not has_names and all(map(_NUMBER.fullmatch, names))


def _describe(numbered: Mapping[str, Tensors]) -> tuple[UnreadTensorNote, ...]:
    return tuple(UnreadTensorNote(group, key, _WHY) for group, tensors in numbered.items() for key in tensors)


def _leave(change: ValueChange, numbered: Collection[str]) -> ValueChange:
    """Return the same change, which leaves the values of numbered optimizers as they are."""

    def change_others(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        left = {slot: value for slot, value in shared.items() if slot in numbered or _has_numbers(slot, value)}
        changed = change({slot: value for slot, value in shared.items() if slot not in left})
        return {slot: left[slot] if slot in left else changed[slot] for slot in shared}

    return change_others


def _has_numbers(slot: str, value: Any) -> bool:
    return slot.partition("/")[0] == OPTIMIZER and isinstance(value, Mapping) and bool(value.get(BY_NUMBER))
