"""Values that differ between ranks where a training expects one value for all: buffers, extra state, stateful objects.

Rank 0's value is stored for all, as if they were equal. Besides, each rank's own values are stored among its per-rank
values, and so are stateful objects that rank 0 does not have. As many ranks with the same layout get them back; others
get rank 0's, and the result of the load says so.

:mod:`rankless.state.capture` stores them on each rank, and :mod:`rankless.state.restore` gives them back on each rank.
The keys are in ``ranks.json``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.ondisk import values
from rankless.state.model.model_view import ModelView
from rankless.state.training import TrainingObjects

#: The keys of a rank's own values, and of the digest of its layout, among its per-rank values.
DIFFERING, LAYOUT = "differing", "layout"

_STATEFUL = "stateful/"


def digest_layout(views: Mapping[str, ModelView]) -> str:
    """Return a digest of how this rank's tensors are a part of the models. It depends on the meshes and their ranks."""
    described = [
        (slot, name, tensor.shape, repr(tensor.layout))
        for slot, view in sorted(views.items())
        for name, tensor in sorted(view.tensors.items())
    ]
    return digest_bytes(repr(described).encode(), 8).hex()


def list_differing(ranks: Sequence[Any]) -> frozenset[str]:
    """Return the names of the values that differ, given the encoded per-rank values of all ranks that saved."""
    tables = [rank_values.get(DIFFERING, {}) for rank_values in ranks if isinstance(rank_values, dict)]
    return frozenset(str(name) for table in tables for name, _ in values.iterate_members(table))


def replace_shared(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``shared`` values of a checkpoint with a rank's ``own`` ones in place of those that differ.

    Values of models are left alone: see :func:`own_model_values`.
    """
    replaced = {name: own.get(name, value) for name, value in shared.items()}
    if "stateful" in replaced:
        of_rank = {name.removeprefix(_STATEFUL): own[name] for name in own if name.startswith(_STATEFUL)}
        replaced["stateful"] = replaced["stateful"] | of_rank
    return replaced


def own_model_values(slot: str, view: ModelView, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``own`` buffers and extra state of one model, by their names in it.

    For example, the own value ``model/bn.running_mean`` is ``bn.running_mean`` in the model ``model``.
    """
    names = (*view.extra, *view.buffers)
    return {name: own[f"{slot}/{name}"] for name in names if f"{slot}/{name}" in own}


def components_of(training: TrainingObjects, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each of the ``names`` that belongs to something that is loaded, with its component."""
    slots = sorted(training.component_names(), key=len, reverse=True)
    stateful_names = training.stateful_names()
    for name in sorted(names):
        slot = next((slot for slot in slots if name == slot or name.startswith(f"{slot}/")), None)
        if name == "user_content" or (name.startswith(_STATEFUL) and name in stateful_names):
            yield name.partition("/")[0], name
        elif slot is not None and slot != "stateful":
            yield slot, name
