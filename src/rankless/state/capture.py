"""Capture of the state that one save takes from this rank: tensors with a spec of them, values, config files.

:mod:`rankless.save.save_negotiation` calls :func:`capture_training` on every rank in the vote "looking at what to
save", in the thread of the caller; a live copy does so on its sources. The order of tensors in an inventory, and all
names, follow from the objects alone: ranks with the same objects must have equal specs, and the files keep the names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rankless.engine.integrity.compare_values_by_digest import select_differing
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.split_tensors import Splits
from rankless.engine.plan.tensor_specs import OWN, PER_RANK, STATE
from rankless.errors import InvalidArgumentError, StateError, UnsupportedValueError
from rankless.observe.spans import traced
from rankless.observe.units import format_count
from rankless.ondisk import values
from rankless.ondisk.data_files import NO_ADAPTERS, ONLY_ADAPTERS, adapter_group
from rankless.ondisk.dtypes import UNSCALED_FLOATS
from rankless.ondisk.validation import check_utf8
from rankless.ondisk.value_files import OWN_STATE, build_state_file
from rankless.state import rank_states, user_objects
from rankless.state import scheduler as schedulers
from rankless.state.array_encoder import ArrayEncoder, digest_tensor, name_merged
from rankless.state.compared_values import ComparedValue, compare_buffer, compare_state_names
from rankless.state.differing_values import DIFFERING, LAYOUT, digest_layout
from rankless.state.inventory import MODEL, OPTIMIZER, Inventory
from rankless.state.model import model_traversal as models
from rankless.state.model.hf_config import pretrained_files
from rankless.state.model.model_view import ModelView, check_duplicate_tensors
from rankless.state.model.peft_adapters import (
    adapted_modules,
    adapter_files,
    adapter_names,
    adapter_tensors,
    check_unmerged,
)
from rankless.state.optimizer import adapters
from rankless.state.optimizer import optimizer_view as optimizers
from rankless.state.optimizer.own_state import add_blank_entries, merge_own
from rankless.state.optimizer.param_groups import merge_groups
from rankless.state.schedulers_by_params import merge_entries
from rankless.state.split_parameters import split_group, split_refs, split_state
from rankless.state.tensor_views import DTYPES, TensorView, check_present, view_of
from rankless.state.training import TrainingObjects

#: The kind of the slots of schedulers.
SCHEDULER = "scheduler"

#: Prefixes of values that are merged from several ranks.
_MERGED = (MODEL, OPTIMIZER, SCHEDULER)


class Capture(msgspec.Struct):
    """The contribution of one rank to a save.

    ``tensors`` are in memory, by group and stored name; a split tensor appears under the name of each split, too.
    ``frozen`` are the keys of those that are parameters without gradients.
    ``small_files`` are written by rank 0. ``rank_values`` are this rank's values, as JSON; ``merged_values`` are
    encoded and are merged with other ranks'; ``shared_values`` are those that rank 0 has for all ranks, by name, as
    JSON. ``compared`` are values that only rank 0 stores, by name: the ranks that have a name compare them.
    ``warnings`` are for the caller.
    """

    inventory: Inventory = msgspec.field(default_factory=Inventory)
    tensors: dict[tuple[str, str], TensorBytes] = msgspec.field(default_factory=dict)
    frozen: set[tuple[str, str]] = msgspec.field(default_factory=set)
    small_files: dict[str, bytes] = msgspec.field(default_factory=dict)
    rank_values: bytes = b"{}"
    merged_values: dict[str, Any] = msgspec.field(default_factory=dict)
    shared_values: dict[str, bytes] = msgspec.field(default_factory=dict)
    compared: dict[str, ComparedValue] = msgspec.field(default_factory=dict)
    warnings: list[str] = msgspec.field(default_factory=list)

    def add_tensor(
        self,
        group: str,
        name: str,
        tensor: TensorView,
        *,
        shared: bool = True,
        splits: Splits = (),
        apart: bool = False,
        dtype: str | None = None,
    ) -> set[tuple[str, str]]:
        """Add one tensor, which is stored as ``splits`` describe or, without them, under its name.

        If it is a floating one without a scale, it is cast to ``dtype``.

        Return its keys in ``tensors``.
        """
        names = {name, *(split.name for split in splits)}
        for stored_name in names:
            check_utf8(stored_name, "a name of a tensor")
        check_present(tensor, f"{group} tensor {name!r}")
        cast = dtype if dtype is not None and tensor.dtype in UNSCALED_FLOATS else None
        self.inventory.add_tensor(group, name, tensor, dtype=cast, shared=shared, splits=splits, apart=apart)
        keys = {(group, stored_name) for stored_name in names}
        self.tensors |= dict.fromkeys(keys, TensorBytes(tensor.local, None if cast is None else DTYPES[cast]))
        return keys


@traced("capture", "plan")
def capture_training(training: TrainingObjects, rank: int, leader: int = 0, differing: bytes = b"") -> Capture:
    """Capture the training objects, without changing them.

    Values that are equal on all ranks are taken from rank ``leader``. ``differing`` are the encoded names of those that
    are known to differ: they are among the values of each rank, too. Raises ``UnsupportedValueError``,
    ``UnsupportedTensorError``, ``StateError`` or ``InvalidArgumentError``.
    """
    captured = Capture()
    captured.small_files.update(training.files)
    tree: dict[str, Any] = {}
    own_entries: dict[str, list[dict[str, Any]]] = {}
    views = {}
    for slot, parts in models.model_components(training.model).items():
        check_unmerged(parts)
        views[slot] = models.build_view(parts, hooks=training.state_dict_hooks)
        if training.adapters != ONLY_ADAPTERS:
            _add_model(captured, slot, views[slot], training)
            tree[slot] = views[slot].extra | views[slot].wrappers
            captured.small_files.update((f"{slot}/{name}", data) for name, data in pretrained_files(parts))
        if training.adapters != NO_ADAPTERS:
            _add_adapters(captured, slot, parts, views[slot], is_required=training.adapters == ONLY_ADAPTERS)
    for slot, parts in adapters.optimizer_components(training.optimizer).items():
        groups = optimizers.view_groups(parts, optimizers.refs_for(slot, views or _view_naming_models(training)))
        refs = split_refs(groups)
        state_tensors = dict(optimizers.optimizer_tensors(groups))
        for name, tensor in state_tensors.items():
            captured.add_tensor(slot, name, tensor, splits=split_state(name, tensor, refs))
        state_values = optimizers.optimizer_values(groups)
        own_entries[slot] = optimizers.own_entries(groups)
        tree[slot] = {
            "groups": _split_by_optimizer([split_group(group, refs) for group in state_values]),
            OWN_STATE: own_entries[slot],
        }
        captured.compared |= compare_state_names(slot, optimizers.owned_names(groups), state_tensors, state_values)
    refs_of_all = optimizers.refs_for(OPTIMIZER, views or _view_naming_models(training)) or {}
    names = {identity: [ref.name for ref in refs] for identity, refs in refs_of_all.items()}
    for slot, parts in schedulers.scheduler_components(training.scheduler).items():
        tree[slot] = schedulers.scheduler_entries(parts, names)
    shared = _shared_values(training)
    arrays = ArrayEncoder(_MERGED, partial(name_merged, own_entries))
    encoded = values.encode_value({**tree, **shared}, arrays)
    captured.merged_values = {slot: _mergeable_values(slot, encoded[slot]) for slot in tree}
    captured.compared |= _list_compared(shared, encoded, arrays)
    for slot, view in views.items() if training.adapters != ONLY_ADAPTERS else ():
        captured.compared |= _list_compared_in_model(slot, view, encoded[slot], arrays)
    if rank == leader:
        captured.shared_values = {name: values.to_json(encoded[name]) for name in shared}
    _add_state_arrays(captured, arrays, is_leader=rank == leader)
    rank_arrays = ArrayEncoder()
    rank_values = rank_states.capture_rank_state(
        training.dataloader, training.per_rank_content, generators=training.rng
    )
    own = {name: captured.compared[name].value for name in sorted(select_differing(captured.compared, differing))}
    if own:
        rank_values |= {DIFFERING: own, LAYOUT: digest_layout(views)}
    captured.rank_values = values.check_size(
        values.dump_values(rank_values, rank_arrays, f"{rank}/"), values.RANKS_FILE
    )
    _add_rank_arrays(captured, rank_arrays, f"{rank}/")
    return captured


def _view_naming_models(training: TrainingObjects) -> dict[str, ModelView]:
    """Return views of the models that only provide parameter names, by slot."""
    components = models.model_components(training.naming_model).items()
    return {slot: models.build_view(parts, hooks=training.state_dict_hooks) for slot, parts in components}


def _add_model(captured: Capture, slot: str, view: ModelView, training: TrainingObjects) -> None:
    for name in view.extra:
        check_utf8(name, "a name of a value of a model")
    check_duplicate_tensors(view)
    _check_duplicate_values(view)
    for name, tensor in view.tensors.items():
        is_frozen, splits = name in view.frozen, view.splits.get(name, ())
        is_apart = is_frozen and training.frozen_apart
        is_compared = name not in view.buffers or tensor.layout is not None  # else by its digest
        keys = captured.add_tensor(
            slot, name, tensor, shared=is_compared, splits=splits, apart=is_apart, dtype=training.dtype
        )
        captured.frozen |= keys if is_frozen else set()
    if view.tied:
        captured.inventory.tied[slot] = view.tied
    trained = [name for name, tensor in view.left_out.items() if tensor.requires_grad]
    if trained:
        captured.warnings.append(
            f"the state_dict() of {slot} leaves out {format_count(len(trained), 'trained parameter')}, such as "
            f"{trained[0]!r}: not in the checkpoint. Pass state_dict_hooks=False to save all parameters and buffers"
        )


def _check_duplicate_values(view: ModelView) -> None:
    """Raise ``StateError`` if parts of a model hold different extra state under one name."""
    for name, owners in view.owners.items():
        first, *others = [_encode_by_content(name, owner.value) for owner in owners] if len(owners) > 1 else [None]
        if not all(values.are_same(other, first) for other in others):
            raise StateError(f"two parts of the model hold different values of {name!r}; give them different names")


def _encode_by_content(name: str, value: Any) -> Any:
    return values.encode_value({name: value}, ArrayEncoder(("",), lambda *key: digest_tensor(key[2]) + key[3]))


def _add_adapters(captured: Capture, slot: str, parts: Sequence[object], view: ModelView, *, is_required: bool) -> None:
    """Add the PEFT adapters of a model as groups of their own.

    If an adapter cannot be stored as PEFT does, it raises the error of PEFT, or ``StateError``, if it ``is_required``.
    Else it is left out with a warning, because the tensors of the model have it already.
    """
    modules = adapted_modules(parts) if slot == MODEL else []
    if is_required and not modules:
        raise InvalidArgumentError(
            f"the {slot} has no PEFT adapters: pass the model that peft.get_peft_model() returns, or save the whole "
            "model"
            if slot == MODEL
            else "adapters alone are saved of one model only: save the whole models"
        )
    left_out = dict.fromkeys(name for name in view.tensors if name not in view.frozen and name not in view.buffers)
    for module in modules:
        for adapter in adapter_names(module):
            try:
                adapter_view = adapter_tensors(module, adapter, view)
                tensors = adapter_view.select(view)
                files = dict(adapter_files(module, adapter))
            except Exception as error:
                if is_required:
                    raise
                captured.warnings.append(
                    f"the checkpoint is complete, but has no copy of the adapter {adapter!r} for PEFT: {error}"
                )
                continue
            for name in adapter_view.sources.values():
                left_out.pop(name, None)
            group = adapter_group(adapter)
            for name, tensor in tensors.items():
                captured.add_tensor(group, name, tensor)
            captured.small_files.update((f"{group}/{name}", data) for name, data in files.items())
    if is_required and left_out:
        captured.warnings.append(
            f"PEFT does not store all parameters that are trained with the adapters as they are: {len(left_out)} of "
            f"them, such as {next(iter(left_out))!r}, are left out; to resume the training, save the whole model"
        )


def _split_by_optimizer(groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the groups of each part of an optimizer. The groups of a part begin with number 0."""
    parts: list[list[dict[str, Any]]] = []
    for group in groups:
        if group["number"] == 0:
            parts.append([])
        parts[-1].append(group)
    return parts


def _mergeable_values(slot: str, encoded: Any) -> Any:
    """Return the values of one slot as the file stores them, in an order that does not depend on parts or ranks."""
    if slot.startswith(SCHEDULER):
        return encoded
    return (
        _merge_optimizer(encoded["groups"], encoded[OWN_STATE])
        if slot.startswith(OPTIMIZER)
        else values.as_table(values.iterate_members(encoded))
    )


def _merge_optimizer(groups: Sequence[Any], own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the stored values of an optimizer, given the groups of its parts or ranks, and their own states."""
    return {"groups": merge_groups(groups), **({OWN_STATE: merge_own(own)} if own else {})}


def merge_values(contributions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the merged values of several ranks: every entry of a model, every parameter of an optimizer.

    Rank 0 calls it in its decision in the vote "exchanging tensor specs". The result must not depend on the number of
    ranks: it is in ``state.json``.
    """
    merged: dict[str, Any] = {}
    for slot in contributions[0]:
        if slot.startswith(OPTIMIZER):
            parts = [contribution[slot] for contribution in contributions]
            names = [{name for group in part["groups"] for name in group["params"]} for part in parts]
            own = add_blank_entries([part.get(OWN_STATE, ()) for part in parts], names)
            merged[slot] = _merge_optimizer([part["groups"] for part in parts], own)
        elif slot.startswith(SCHEDULER):
            merged[slot] = merge_entries([contribution[slot] for contribution in contributions])
        else:
            merged[slot] = values.as_table(
                member for contribution in contributions for member in values.iterate_members(contribution[slot])
            )
    return merged


def _find_references(encoded: Any) -> set[str]:
    """Return the keys of the tensors that encoded values refer to."""
    if isinstance(encoded, list):
        return {key for child in encoded for key in _find_references(child)}
    if isinstance(encoded, dict):
        keys = {encoded[tag] for tag in ("$tensor", "$array") if tag in encoded}
        return keys or {key for child in encoded.values() for key in _find_references(child)}
    return set()


def check_rank_state(captured: Capture, merged: bytes) -> None:
    """Raise ``UnsupportedValueError`` if the values of this rank alone are too large for the file of shared values.

    ``merged`` is the result of :func:`encode_merged_values`.
    """
    if len(merged) + sum(map(len, captured.shared_values.values())) > values.VALUES_LIMIT:
        build_state_file(captured.merged_values, captured.shared_values)


def check_rank_states(sizes: Sequence[int]) -> None:
    """Raise ``UnsupportedValueError`` if the values of all ranks, of ``sizes`` bytes, are too large for their file.

    Rank 0 calls it in its decision in the first vote.
    """
    if sum(sizes) > values.VALUES_LIMIT:
        raise UnsupportedValueError(
            f"{values.RANKS_FILE} would have {sum(sizes):,} bytes, and readers accept {values.VALUES_LIMIT:,} at most; "
            f"rank {sizes.index(max(sizes))} contributes the most, {max(sizes):,}. Store bytes in per_rank_content, "
            "and in states of data loaders, as tensors"
        )


def encode_merged_values(captured: Capture) -> bytes:
    """Return the values that a rank contributes to the merged values, as JSON. Ranks compare its digest first."""
    return json.dumps(captured.merged_values, separators=(",", ":")).encode()


def _shared_values(training: TrainingObjects) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    if training.stateful is not None:
        shared["stateful"] = {
            name: user_objects.read_state(stateful_object)
            for name, stateful_object in user_objects.check_stateful(training.stateful).items()
        }
    if training.user_content is not None:
        shared["user_content"] = training.user_content
    return shared


def _list_compared(
    shared: Mapping[str, Any], encoded: Mapping[str, Any], arrays: ArrayEncoder
) -> dict[str, ComparedValue]:
    """Return :func:`_shared_values` by name: each stateful object is one."""
    named = {name: (value, encoded[name]) for name, value in shared.items() if name != "stateful"}
    stateful_objects = dict(values.iterate_members(encoded.get("stateful", {})))
    named |= {
        f"stateful/{name}": (state, stateful_objects[name])
        for name, state in shared.get("stateful", {}).items()
        if name in stateful_objects
    }
    return {name: _compare_encoded(value, part, arrays) for name, (value, part) in named.items()}


def _list_compared_in_model(slot: str, view: ModelView, encoded: Any, arrays: ArrayEncoder) -> dict[str, ComparedValue]:
    """Return the buffers and the extra state of a model: every rank has them whole."""
    compared = {
        f"{slot}/{name}": compare_buffer(view.tensors[name].local, is_posted=name not in view.overwritten)
        for name in view.buffers
        if name in view.tensors and view.tensors[name].layout is None
    }
    members = dict(values.iterate_members(encoded))
    return compared | {
        f"{slot}/{name}": _compare_encoded(value, members[name], arrays) for name, value in view.extra.items()
    }


def _compare_encoded(value: Any, encoded: Any, arrays: ArrayEncoder) -> ComparedValue:
    return ComparedValue(value, encoded, {key: arrays.tensors[key] for key in _find_references(encoded)})


def _add_state_arrays(captured: Capture, arrays: ArrayEncoder, *, is_leader: bool) -> None:
    """Add the tensors of merged values, where the lowest rank's are saved, and on the leader of shared values."""
    for name, tensor in arrays.tensors.items():
        is_merged = name.startswith(_MERGED)
        if is_merged or is_leader:
            view = view_of(tensor, f"{STATE} tensor {name!r}")
            captured.inventory.add_tensor(STATE, name, view, shared=not is_merged)
            captured.tensors[STATE, name] = TensorBytes(tensor)


def _add_rank_arrays(captured: Capture, arrays: ArrayEncoder, prefix: str) -> None:
    """Add the tensors of this rank's own values, to the spec under names without the rank."""
    for name, tensor in arrays.tensors.items():
        captured.inventory.add_tensor(OWN, name.removeprefix(prefix), view_of(tensor, f"{PER_RANK} tensor {name!r}"))
        captured.tensors[PER_RANK, name] = TensorBytes(tensor)
