"""Optimizer states that cannot follow parameters that move, because they do not name their parameters.

``torch.save`` of an optimizer, and so transformers' ``Trainer`` and Accelerate, write numbers in place of names; a load
matches them with the parameters of the training. ``LBFGS`` has one vector for all parameters.
:mod:`rankless.edits.apply_edits` hides such states from a verb, on each rank. They stay as they are if the verb leaves
parameters in their places, and cannot be read any more if it does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from rankless.edits.cast import Cast
from rankless.edits.catalog import MODEL, OPTIMIZER, Catalog, Tensors
from rankless.edits.dequantise import Dequantise
from rankless.edits.rename import Rename
from rankless.edits.resize_vocab import ResizeVocab
from rankless.edits.value_changes import ValueChange
from rankless.formats.reader import Reader, UnreadTensorNote
from rankless.inspection.placeholders import PlaceholderCodec
from rankless.ondisk.value_files import BY_NUMBER

#: A number, after the optimizer's number if there are several.
_NUMBER = re.compile(r"\d+(\.\d+)?")


class _OneCheckpointVerb(Protocol):
    """A verb of an edit that reads one checkpoint: all but an average."""

    def apply(self, catalog: Catalog) -> Catalog:
        """Return the catalog after the verb."""


#: The verbs that leave each parameter in its place, with its shape.
IN_PLACE = (Cast, Dequantise, Rename)

#: The verbs that leave each parameter in its place: optimizers without states need not follow them.
_SAME_PARAMETERS = (ResizeVocab,)

_ADVICE = (
    "load the checkpoint into the training and save it with rankless first, or edit the model alone, with model_only"
)

_NUMBERED = (
    f"belongs to a parameter of which the checkpoint has only the number, so that it cannot follow the edit: {_ADVICE}"
)

_FLAT = "belongs to all parameters together, so that it cannot follow parameters that move: edit the model alone"


class BoundStates(msgspec.Struct, frozen=True):
    """The optimizers with states that cannot follow parameters that move: of numbers, and of one vector for all.

    ``optimizers`` are all of the checkpoint, also without states.
    """

    optimizers: frozenset[str] = frozenset()
    numbered: frozenset[str] = frozenset()
    flat: frozenset[str] = frozenset()


def find_bound_states(reader: Reader, catalog: Catalog) -> BoundStates:
    """Return the optimizers of a checkpoint that have states which cannot follow. Reads its values."""
    shared_codec, rank_codec = (PlaceholderCodec(reader.groups.get(group, {})) for group in ("state", "ranks"))
    shared = reader.read_values(0, shared_codec, rank_codec).shared
    optimizers = {slot: value for slot, value in shared.items() if slot.partition("/")[0] == OPTIMIZER}
    return BoundStates(
        frozenset(optimizers),
        frozenset(slot for slot, value in optimizers.items() if _is_numbered(catalog, slot, value)),
        frozenset(slot for slot, value in optimizers.items() if any(map(_is_flat, value.get("groups", ())))),
    )


def apply_to_named(verb: _OneCheckpointVerb, catalog: Catalog, bound: BoundStates) -> Catalog:
    """Return the catalog after a verb is applied, which does not see states that cannot follow."""
    is_in_place = isinstance(verb, IN_PLACE)
    hidden = bound.numbered if is_in_place else bound.numbered | bound.flat
    if isinstance(verb, _SAME_PARAMETERS):
        hidden = frozenset(group for group in hidden if catalog.tensors.get(group))
    held = {group: catalog.tensors.get(group, {}) for group in sorted(hidden)}
    others = {group: tensors for group, tensors in catalog.tensors.items() if group not in held}
    changed = verb.apply(replace(catalog, tensors=others))
    is_in_place = is_in_place and not _exchanges_names(catalog, changed)
    before = len(catalog.value_changes)
    changes = tuple(_leave(change, held) for change in changed.value_changes[before:])
    kept = {group: tensors for group, tensors in held.items() if is_in_place and group in catalog.tensors}
    return replace(
        changed,
        tensors={**changed.tensors, **kept},
        value_changes=(*changed.value_changes[:before], *changes),
        unread=(*changed.unread, *(() if is_in_place else _describe(held, bound))),
    )


def _exchanges_names(before: Catalog, after: Catalog) -> bool:
    """Return whether a parameter has got the name of another one: the training counts it in the place of that."""
    return any(
        {*tensor.inputs()}.isdisjoint(after.tensors[group][name].inputs())
        for group in before.groups_of(MODEL)
        for name, tensor in before.tensors[group].items()
        if name in after.tensors[group]
    )


def _is_numbered(catalog: Catalog, slot: str, optimizer: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has numbers in place of the names of parameters."""
    names = {name for group in optimizer.get("groups", ()) for name in group["params"]}
    if not names or optimizer.get(BY_NUMBER):
        return bool(names)
    owners = (catalog.owner_of(slot, name) for name in names)
    has_names = any(name in catalog.tensors.get(model, {}) for model, name in owners)
    return not has_names and all(map(_NUMBER.fullmatch, names))


def _is_flat(group: Mapping[str, Any]) -> bool:
    """Return whether the states of a parameter group are of all its parameters together, as with ``LBFGS``."""
    return str(group.get("class")).rpartition(".")[2] == "LBFGS"


def _describe(held: Mapping[str, Tensors], bound: BoundStates) -> Iterator[UnreadTensorNote]:
    for group, tensors in held.items():
        why = _NUMBERED if group in bound.numbered else _FLAT
        yield from (UnreadTensorNote(group, key, why) for key in tensors or ("0",))


def _leave(change: ValueChange, held: Collection[str]) -> ValueChange:
    """Return the same change, which leaves the values of some optimizers as they are."""

    def change_others(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = change({slot: value for slot, value in shared.items() if slot not in held})
        return {slot: value if slot in held else changed[slot] for slot, value in shared.items()}

    return change_others
