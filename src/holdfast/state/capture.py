"""Everything that one save takes from this rank: tensors with a spec of them, values, companion files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan.placements import MeshShape, PlacementLayout
from holdfast.engine.plan.spec import OWN, PER_RANK, LayoutSpec, Meshes, Spec, TensorSpec
from holdfast.engine.plan.split_tensors import Splits
from holdfast.errors import StateError, UnsupportedValueError
from holdfast.ondisk import param_order, values
from holdfast.ondisk.validation import check_utf8
from holdfast.state import per_rank, stateful
from holdfast.state import scheduler as schedulers
from holdfast.state.arrays import INLINE_BYTES, ArrayEncoder
from holdfast.state.model import traversal as models
from holdfast.state.model.hf_config import pretrained_files
from holdfast.state.model.view import ModelView, check_duplicate_tensors
from holdfast.state.optimizer import adapters
from holdfast.state.optimizer import view as optimizers
from holdfast.state.optimizer.param_groups import merge_groups
from holdfast.state.split_parameters import split_group, split_refs, split_state
from holdfast.state.tensors import TensorView, check_present, view_of
from holdfast.state.training import TrainingObjects

#: Groups of tensors, and so the folders or files that they are in.
MODEL, OPTIMIZER, STATE = "model", "optimizer", "state"

#: Values that are put together from several ranks.
_MERGED = (MODEL, OPTIMIZER)


class Inventory:
    """Tensors that a rank has or wants, with a spec of them that does not depend on the rank."""

    def __init__(self) -> None:
        self._meshes: dict[MeshShape, int] = {}
        self._layouts: dict[LayoutSpec, int] = {}
        self._tensors: list[TensorSpec] = []
        self.tied: dict[str, dict[str, str]] = {}
        self.names: dict[str, list[str]] = {}

    def add(
        self,
        group: str,
        name: str,
        tensor: TensorView,
        *,
        dtype: str | None = None,
        shared: bool = True,
        splits: Splits = (),
    ) -> None:
        """Take note of one tensor. ``dtype`` is that of the checkpoint where the tensor has another."""
        layout = None if tensor.layout is None else self._layout(tensor.layout)
        self._tensors.append(TensorSpec(group, name, dtype or tensor.dtype, tensor.shape, layout, shared, splits))

    def _layout(self, layout: PlacementLayout) -> int:
        mesh = self._meshes.setdefault(layout.mesh, len(self._meshes))
        return self._layouts.setdefault(LayoutSpec(mesh, layout.placements), len(self._layouts))

    def spec(self) -> Spec:
        """The spec of the tensors."""
        return Spec(tuple(self._layouts), tuple(self._tensors), self.tied, self.names)

    def meshes(self) -> Meshes:
        """The meshes that the spec names by number."""
        return Meshes(tuple(self._meshes))


@dataclass
class Capture:
    """What one rank brings to a save.

    ``parts`` are in memory, by group and name; those that are stored in parts by the names of these, too.
    ``small`` are files that rank 0 writes; ``own`` are this rank's values, as JSON, ``merged`` those to be put together
    with other ranks', encoded, ``shared`` those that rank 0 has for all, by name, as JSON.
    """

    inventory: Inventory = field(default_factory=Inventory)
    parts: dict[tuple[str, str], TensorBytes] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    own: bytes = b"{}"
    merged: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, bytes] = field(default_factory=dict)

    def add(self, group: str, name: str, tensor: TensorView, *, shared: bool = True, splits: Splits = ()) -> None:
        """Take in one tensor, which is stored as ``splits`` tell, or under its name."""
        names = {name, *(split.name for split in splits)}
        for one in names:
            check_utf8(one, "a name of a tensor")
        check_present(tensor, f"{group} tensor {name!r}")
        self.inventory.add(group, name, tensor, shared=shared, splits=splits)
        self.parts |= dict.fromkeys(((group, one) for one in names), TensorBytes(tensor.local))


def capture_training(training: TrainingObjects, rank: int) -> Capture:
    """Look at the training objects. Changes nothing in them.

    What is equal on all ranks is taken from rank 0. Raises ``UnsupportedValueError``,
    ``UnsupportedTensorError``, ``StateError`` or ``InvalidArgumentError``.
    """
    captured = Capture()
    tree: dict[str, Any] = {}
    views = {}
    for slot, parts in models.model_components(training.model).items():
        views[slot] = models.build_view(parts, hooks=training.state_dict_hooks)
        _add_model(captured, slot, views[slot])
        tree[slot] = views[slot].extra
        captured.small.update((f"{slot}/{name}", data) for name, data in pretrained_files(parts))
    for slot, parts in adapters.optimizer_components(training.optimizer).items():
        groups = optimizers.view_groups(parts, optimizers.refs_for(slot, views or _named(training)))
        handles = split_refs(groups)
        for name, tensor in optimizers.optimizer_tensors(groups):
            captured.add(slot, name, tensor, splits=split_state(name, tensor, handles))
        tree[slot] = _by_part([split_group(group, handles) for group in optimizers.optimizer_values(groups)])
    of_all = _shared(training)
    shared = of_all if rank == 0 else {}
    arrays = ArrayEncoder(_MERGED)
    encoded = values.encode_value({**tree, **shared}, arrays)
    captured.merged = {slot: _merged(slot, encoded[slot]) for slot in tree}
    captured.shared = {name: values.to_json(encoded[name]) for name in shared}
    if rank == 0:
        _add_arrays(captured, STATE, arrays)
    own = ArrayEncoder()
    belonging = per_rank.capture_rank_state(training.dataloader, training.per_rank_content, generators=training.rng)
    captured.own = values.check_size(values.dump_values(belonging, own, f"{rank}/"), values.RANKS_FILE)
    _add_own_arrays(captured, own, f"{rank}/")
    return captured


def _named(training: TrainingObjects) -> dict[str, ModelView]:
    """The models that only tell names, by slot."""
    every = models.model_components(training.named_by).items()
    return {slot: models.build_view(parts, hooks=training.state_dict_hooks) for slot, parts in every}


def _add_model(captured: Capture, slot: str, view: ModelView) -> None:
    check_duplicate_tensors(view)
    for name, tensor in view.tensors.items():
        captured.add(slot, name, tensor, shared=name not in view.buffers, splits=view.splits.get(name, ()))
    if view.tied:
        captured.inventory.tied[slot] = view.tied


def _by_part(groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups by the part of the optimizer that they are of, each of which begins with group 0."""
    parts: list[list[dict[str, Any]]] = []
    for group in groups:
        if group["number"] == 0:
            parts.append([])
        parts[-1].append(group)
    return parts


def _merged(slot: str, encoded: Any) -> dict[str, Any]:
    """The values of one slot as the file has them: in the same order whichever part, or rank, brings what."""
    return (
        {"groups": merge_groups(encoded)}
        if slot.startswith(OPTIMIZER)
        else values.as_table(values.iterate_members(encoded))
    )


def merge_values(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values that several ranks have, put together: every entry of a model, every parameter of an optimizer."""
    found: dict[str, Any] = {}
    for slot in said[0]:
        if slot.startswith(OPTIMIZER):
            found[slot] = {"groups": merge_groups([one[slot]["groups"] for one in said])}
        else:
            found[slot] = values.as_table(member for one in said for member in values.iterate_members(one[slot]))
    beyond = sorted(_references(found) - _references(said[0]))
    if beyond:
        raise StateError(
            f"{beyond[0]}, a value of a model or optimizer that only some ranks have, holds a tensor of more than "
            f"{INLINE_BYTES} bytes; such values must be on rank 0, too"
        )
    return found


def _references(encoded: Any) -> set[str]:
    """The keys of the tensors that encoded values refer to."""
    if isinstance(encoded, list):
        return {key for one in encoded for key in _references(one)}
    if isinstance(encoded, dict):
        own = {encoded[tag] for tag in ("$tensor", "$array") if tag in encoded}
        return own or {key for one in encoded.values() for key in _references(one)}
    return set()


def state_file(merged: Mapping[str, Any], shared: Mapping[str, bytes]) -> bytes:
    """The file of values that all ranks share; ``shared`` as JSON. Raises ``UnsupportedValueError`` if it is too large."""
    parts = {slot: values.to_json(_by_name(slot, value)) for slot, value in merged.items()}
    return _checked_file({**parts, **shared}, values.SHARED_FILE)


def check_rank_state(captured: Capture, merged: bytes) -> None:
    """Raise ``UnsupportedValueError`` if what a rank brings to a save is too large for the file of shared values already.

    ``merged`` are its :func:`merged_bytes`.
    """
    if len(merged) + sum(map(len, captured.shared.values())) > values.VALUES_LIMIT:
        state_file(captured.merged, captured.shared)


def check_rank_states(sizes: Sequence[int]) -> None:
    """Raise ``UnsupportedValueError`` if what belongs to single ranks, of so many bytes each, is too large for its file."""
    if sum(sizes) > values.VALUES_LIMIT:
        raise UnsupportedValueError(
            f"{values.RANKS_FILE} would have {sum(sizes):,} bytes, and readers take {values.VALUES_LIMIT:,} at most; rank "
            f"{sizes.index(max(sizes))} brings the most, {max(sizes):,}. Store bytes in per_rank_content, and in states of "
            "data loaders, as tensors"
        )


def _checked_file(parts: Mapping[str, bytes], file: str) -> bytes:
    raw = b"{" + b",".join(values.to_json(name) + b":" + part for name, part in parts.items()) + b"}"
    return values.check_size(raw, file)


def _by_name(slot: str, value: Any) -> Any:
    return {**value, "groups": param_order.sort_by_name(value["groups"])} if slot.startswith(OPTIMIZER) else value


def ranks_file(owns: Sequence[bytes], merged: Mapping[str, Any]) -> bytes:
    """The file of values that belong to single ranks, and of what is known of the order of optimizers' parameters."""
    orders = {
        slot: param_order.order_names(value["groups"]) for slot, value in merged.items() if slot.startswith(OPTIMIZER)
    }
    kept = b',"order":' + values.to_json(orders) if orders else b""
    return values.check_size(b'{"ranks":[' + b",\n".join(owns) + b"]" + kept + b"}\n", values.RANKS_FILE)


def merged_bytes(captured: Capture) -> bytes:
    """What a rank tells the others of its values, and the digest of which tells whether it has to."""
    return json.dumps(captured.merged, separators=(",", ":")).encode()


def _shared(training: TrainingObjects) -> dict[str, Any]:
    shared: dict[str, Any] = {
        slot: schedulers.scheduler_values(parts)
        for slot, parts in schedulers.scheduler_components(training.scheduler).items()
    }
    if training.stateful is not None:
        shared["stateful"] = {
            name: one.state_dict() for name, one in stateful.check_stateful(training.stateful).items()
        }
    if training.user_content is not None:
        shared["user_content"] = training.user_content
    return shared


def _add_arrays(captured: Capture, group: str, arrays: ArrayEncoder) -> None:
    """The tensors of encoded values become tensors of ``group``."""
    for name, tensor in arrays.tensors.items():
        captured.inventory.add(group, name, view_of(tensor, f"{group} tensor {name!r}"))
        captured.parts[group, name] = TensorBytes(tensor)


def _add_own_arrays(captured: Capture, arrays: ArrayEncoder, prefix: str) -> None:
    """Those of this rank's own values, in the spec without the rank."""
    for name, tensor in arrays.tensors.items():
        captured.inventory.add(OWN, name.removeprefix(prefix), view_of(tensor, f"{PER_RANK} tensor {name!r}"))
        captured.parts[PER_RANK, name] = TensorBytes(tensor)
