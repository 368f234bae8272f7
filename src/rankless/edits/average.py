"""The verb ``average``: the mean of several checkpoints of one training. It is the first verb of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from rankless.edits.catalog import MODEL, OPTIMIZER, STEP, Catalog, Change, Tensors
from rankless.edits.formulas import AverageFormula, is_floating
from rankless.errors import InvalidArgumentError, MismatchError
from rankless.formats.edited_reader import EditedTensor
from rankless.ondisk.validation import split_state_key

#: The dtype of complex numbers.
_COMPLEX = "C64"


class Average(msgspec.Struct, frozen=True, tag_field="verb", tag="average", forbid_unknown_fields=True):
    """Average floating-point tensors of models, masters and moments: ``(a + b + …) / n`` in float64, cast once.

    Checkpoints are added up from the oldest to the newest. Integers, counts of steps, and values come from the newest,
    which is the checkpoint that is edited.

    Args:
        last: How many checkpoints of the run, up to the one that is edited: for example, ``3`` averages it with the two
            before.
        paths: Other checkpoints instead, in the order of the sum, before the one that is edited.
    """

    last: int = 0
    paths: list[str] = []

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` unless it says which checkpoints are averaged."""
        if (self.last > 0) == bool(self.paths):
            raise InvalidArgumentError("average: pass last with a number of checkpoints, or paths")

    def apply(self, catalog: Catalog, others: Sequence[tuple[str, Mapping[str, Tensors]]]) -> Catalog:
        """Return the catalog of the mean. ``others`` are the checkpoints before it, each with its name.

        Raises ``MismatchError`` if one has other tensors.
        """
        for label, tensors in others:
            _check_alike(catalog, label, tensors)
        averaged = {
            group: {
                name: _mean([*(tensors[group][name] for _, tensors in others), tensor])
                if _is_averaged(group, name, tensor)
                else tensor
                for name, tensor in names.items()
            }
            for group, names in catalog.tensors.items()
        }
        labels = [*(label for label, _ in others), catalog.label]
        text = f"the mean of {len(labels)} checkpoints: {', '.join(labels)}"
        return replace(catalog, tensors=averaged).with_changes([Change(MODEL, text)])


def _is_averaged(group: str, name: str, tensor: EditedTensor) -> bool:
    kind = group.partition("/")[0]
    is_step = kind == OPTIMIZER and split_state_key(name)[1] == STEP
    if kind in {MODEL, OPTIMIZER} and tensor.info.dtype == _COMPLEX:
        raise InvalidArgumentError(f"average: {group} tensor {name!r} has complex numbers, which are not averaged")
    return kind in {MODEL, OPTIMIZER} and is_floating(tensor.info) and not is_step


def _mean(tensors: Sequence[EditedTensor]) -> EditedTensor:
    return AverageFormula(tensors[-1].info, tuple(tensors)) if len(tensors) > 1 else tensors[0]


def _check_alike(catalog: Catalog, label: str, others: Mapping[str, Tensors]) -> None:
    """Raise ``MismatchError``, which names the first tensor of a model or optimizer that differs."""
    for group, names in catalog.tensors.items():
        if group.partition("/")[0] not in {MODEL, OPTIMIZER}:
            continue
        theirs = others.get(group, {})
        for name, tensor in names.items():
            other = theirs.get(name)
            if other is None or other.info != tensor.info:
                found = "no such tensor" if other is None else f"{other.info.dtype} {list(other.info.shape)}"
                raise MismatchError(
                    f"average: {group} tensor {name!r} is {tensor.info.dtype} {list(tensor.info.shape)} in "
                    f"{catalog.label}, and {label} has {found}"
                )
        if further := sorted(theirs.keys() - names.keys()):
            raise MismatchError(f"average: {label} has {group} tensor {further[0]!r}, and {catalog.label} has not")
