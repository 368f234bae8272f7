"""The optimizers of a restore, matched with the checkpoint: parameters by name or number, then their states.

:class:`~rankless.state.restore.LoadTargets` matches them on each rank after the models. An optimizer's mismatch is an
error at once, unless a model does not match either: then it is reported with that, which is its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.value_files import BY_NUMBER, MAY_SKIP_FROZEN, OWN_STATE
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.inventory import MODEL, OPTIMIZER
from rankless.state.model.model_view import ModelView
from rankless.state.optimizer import optimizer_view as optimizers
from rankless.state.optimizer.numbered_parameters import (
    check_order,
    has_names,
    has_only_numbers,
    match_by_number,
    match_by_position,
    skip_frozen,
)
from rankless.state.optimizer.optimizer_restore import OptimizerRestore, put_settings
from rankless.state.optimizer.optimizer_view import ParamGroup
from rankless.state.optimizer.param_groups import MatchTolerance
from rankless.state.repeated_objects import SavedPlace
from rankless.state.restore_context import TRAINED, RestoreContext, component_of
from rankless.state.split_parameters import split_refs, stored_names
from rankless.state.tensor_views import local_tensor


class OptimizerMatches:
    """The optimizers that a restore loads into.

    :attr:`matched_by` says how the parameters of each were matched: by ``"model"``, ``"names"`` or ``"places"``.
    """

    def __init__(self, context: RestoreContext, arrays: ArrayDecoder) -> None:
        """Match nothing yet. ``arrays`` will fill the tensors among the saved values."""
        self._context, self._report, self._arrays = context, context.report, arrays
        self._restores: dict[str, OptimizerRestore] = {}
        self.matched_by: dict[str, str] = {}

    def match(
        self, slot: str, parts: Sequence[object], saved: Mapping[str, Any], views: Mapping[str, ModelView]
    ) -> None:
        """Match an optimizer with its ``saved`` values. ``views`` name the parameters."""
        refs = optimizers.refs_for(slot, views)
        groups = self._match_parameters(slot, optimizers.view_groups(parts, refs), saved, has_model=refs is not None)
        stored = {name for ref in split_refs(groups).values() for name in stored_names(ref)}
        self._context.inventory.names[f"{TRAINED} {slot}"] = sorted(stored.union(optimizers.parameter_names(groups)))
        with self._context.noting_mismatch():
            infos = {} if self._context.has_mismatches() else self._context.groups.get(slot, {})
            optimizer_restore = self._restores[slot] = OptimizerRestore(
                groups,
                saved["groups"],
                infos,
                self._tolerance(slot, has_model=refs is not None),
                saved_dtypes=self._saved_dtypes(slot),
                own=saved.get(OWN_STATE, ()),
            )
            self._match_own_state(slot, optimizer_restore)
            self._add_targets(slot, optimizer_restore, infos)
            self._note_tied_states(slot, optimizer_restore, infos, views)

    def _match_parameters(
        self, slot: str, groups: list[ParamGroup], saved: Mapping[str, Any], *, has_model: bool
    ) -> list[ParamGroup]:
        """Return the groups with the names that the checkpoint has for their parameters."""
        self.matched_by[slot] = "model" if has_model else "names" if has_names(groups) else "places"
        if saved.get(BY_NUMBER) or has_only_numbers(groups, saved["groups"]):
            groups = match_by_number(self._skip_frozen(slot, groups, saved), saved["groups"])
            self.matched_by[slot] = "places"
        elif self.matched_by[slot] == "places":
            groups = match_by_position(groups, saved["groups"])
        if self.matched_by[slot] == "places":
            check_order(groups, saved["groups"], self._context.groups.get(slot, {}))
        return groups

    def _skip_frozen(self, slot: str, groups: list[ParamGroup], saved: Mapping[str, Any]) -> list[ParamGroup]:
        """Leave frozen parameters without a number, if the checkpoint may be so: the optimizer is reconstructed."""
        if not saved.get(MAY_SKIP_FROZEN) and not self._context.policy.may_skip_frozen:
            return groups
        trained = skip_frozen(groups, saved["groups"])
        if trained is not groups:
            self._report.cast.add(slot)
        return trained

    def _tolerance(self, slot: str, *, has_model: bool) -> MatchTolerance:
        by_name = self.matched_by[slot] != "places"
        return MatchTolerance(
            by_name and self._context.policy.may_be_missing(slot),
            by_name,
            {alias: name for names in self._context.tied.values() for alias, name in names.items()},
            unread=frozenset(tensor.data_ptr() for tensor in self._arrays.tensors.values()),
            has_model=has_model,
        )

    def _saved_dtypes(self, slot: str) -> dict[str, str]:
        """Return the dtypes in the checkpoint of the parameters of an optimizer, if its states are cast with them."""
        if not self._context.policy.cast_dtype:
            return {}
        dtypes: dict[str, str] = {}
        for group, infos in self._context.groups.items():
            if group == MODEL or group.startswith(f"{MODEL}/"):
                prefix = _prefix_in(slot, group)
                dtypes |= {prefix + name: info.dtype for name, info in infos.items()}
        return dtypes

    def _match_own_state(self, slot: str, optimizer_restore: OptimizerRestore) -> None:
        """Report values in optimizers' ``state_dict()``, besides states and settings, that are on one side only."""
        for name in optimizer_restore.missing_own():
            reason = (
                f"{name} keeps values in its state_dict() that the checkpoint lacks, or has for other parameters or "
                "in another order"
            )
            self._report.add_missing(slot, f"{slot}: own values", reason)
        for name in optimizer_restore.unexpected_own():
            self._report.add_unexpected(slot, f"{slot}: {name!r} of its state_dict()")
        if optimizer_restore.has_inexact_own():
            self._report.cast.add(slot)

    def _add_targets(self, slot: str, optimizer_restore: OptimizerRestore, infos: Mapping[str, TensorInfo]) -> None:
        """Add the states to fill, and report states and settings that are missing or not exact."""
        for name in optimizer_restore.missing:
            self._report.add_missing(slot, f"{slot}/{name}")
        if optimizer_restore.is_unsure:
            self._report.cast.add(slot)
        for number in optimizer_restore.regrouped:
            self._report.add_missing(slot, f"{slot}: settings of group {number}")
        for name, tensor in optimizer_restore.targets.items():
            if tensor.dtype != infos[name].dtype:
                self._report.cast.add(slot)
            self._context.tensors.add((slot, name), tensor)
            self._context.tensors.filled.add((slot, name))

    def _note_tied_states(
        self,
        slot: str,
        optimizer_restore: OptimizerRestore,
        infos: Mapping[str, TensorInfo],
        views: Mapping[str, ModelView],
    ) -> None:
        """Note the stored states of one parameter here: all but one of them are dropped if they are equal."""
        for group, view in views.items():
            if view.tied:
                pairs = self._pair_tied(slot, group, optimizer_restore, infos, view.tied)
                self._context.tensors.note_merged(((slot, first), (slot, second)) for first, second in pairs)

    def _pair_tied(
        self,
        slot: str,
        group: str,
        optimizer_restore: OptimizerRestore,
        infos: Mapping[str, TensorInfo],
        tied: Mapping[str, str],
    ) -> Iterator[tuple[str, str]]:
        """Yield the stored states that must be equal because their parameters, trained apart, are one tensor here.

        Report parameters that had other settings, or other states than tensors.
        """
        prefix, saved_names = _prefix_in(slot, group), self._context.tied.get(group, {})
        trained = optimizer_restore.saved_names()
        for alias, name in tied.items():
            kept, dropped = [prefix + saved_names.get(known, known) for known in (name, alias)]
            if dropped == kept or dropped not in trained:
                continue
            self._context.inventory.names[f"{TRAINED} {slot}"].append(dropped)
            states = optimizer_restore.pair_merged(infos, kept, dropped)
            if states is None:
                self._add_dropped_parameter(slot, prefix + alias, dropped, kept)
            yield from states or ()

    def _add_dropped_parameter(self, slot: str, alias: str, dropped: str, kept: str) -> None:
        """Report a parameter that is one tensor with another one here, and was trained in another way."""
        if not self._context.policy.is_strict(slot):
            self._report.add_unexpected(slot, f"{slot}/{dropped}")
            return
        origin = "" if alias == dropped else f" under the name {dropped}"
        self._report.different.append(
            f"{slot}: {alias} is one tensor with {kept} here, and the checkpoint has other settings or another state "
            f"of it{origin}, which would be dropped: untie them, or pass strict=False to load those of {kept} for both"
        )

    def settings(self) -> list[dict[str, Any]]:
        """Return the settings of all groups here, which are filled in place."""
        return [live for restore in self._restores.values() for live, _ in restore.pair_settings()]

    def list_places(self) -> Iterator[SavedPlace]:
        """Yield each object that a value is loaded into, with the saved value."""
        for slot, optimizer_restore in self._restores.items():
            yield from optimizer_restore.list_places(slot)

    def note_shared_settings(self) -> None:
        """Note components as not exact if a setting is in the memory of a tensor that is loaded, and is filled later.

        Called only if a setting is a tensor.
        """
        for slot, optimizer_restore in self._restores.items():
            values = [value for live, _ in optimizer_restore.pair_settings() for value in live.values()]
            for value in (local_tensor(value) for value in values if isinstance(value, Tensor)):
                groups = self._context.tensors.find_overlapping(value)
                self._report.cast |= {slot, *map(component_of, groups)} if groups else set()

    def check_trained(self, known: Mapping[str, set[str]]) -> None:
        """Report saved parameters that no rank trains. See :meth:`LoadTargets.check_matches`."""
        for slot, optimizer_restore in self._restores.items():
            with self._context.noting_mismatch():
                for name in optimizer_restore.check_trained(known.get(f"{TRAINED} {slot}", set())):
                    self._report.add_unexpected(slot, f"{slot}/{name}")

    def apply(self) -> None:
        """Put settings and values in place, and give the optimizers their states."""
        rounded = put_settings([pair for restore in self._restores.values() for pair in restore.pair_settings()])
        for slot, optimizer_restore in self._restores.items():
            optimizer_restore.apply()
            is_rounded = not rounded.isdisjoint(map(id, optimizer_restore.loaded_groups()))
            if optimizer_restore.has_changed_states or is_rounded:
                self._report.cast.add(slot)

    def loaded_groups(self) -> Iterable[dict[str, Any]]:
        """Return the groups whose settings were loaded."""
        return [group for restore in self._restores.values() for group in restore.loaded_groups()]


def _prefix_in(slot: str, group: str) -> str:
    """Return the prefix of a model's parameter names in an optimizer of the component ``slot``.

    For example, the parameters of ``model/critic`` begin with ``critic/`` in ``optimizer``, and have no prefix in
    ``optimizer/critic``.
    """
    is_own = group in {MODEL, MODEL + slot.removeprefix(OPTIMIZER)}
    return "" if is_own else group.removeprefix(f"{MODEL}/") + "/"
