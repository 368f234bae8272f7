"""A restore of an optimizer: states are checked and allocated first, and applied when all bytes are read.

:mod:`rankless.state.restore` makes one for each optimizer on each rank, in the vote "reading the metadata";
:meth:`OptimizerRestore.apply` runs in the vote "putting values in place", after :func:`put_settings` for all optimizers
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rankless.errors import OptimizerMismatchError
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.validation import split_state_key, state_key
from rankless.state.model.model_view import ParamRef
from rankless.state.optimizer.adapters import StateDictOptimizer, TorchOptimizer, ZeroOptimizer
from rankless.state.optimizer.foreign_states import as_native_states, check_collections, check_state_names
from rankless.state.optimizer.object_states import build_objects, join_states
from rankless.state.optimizer.optimizer_view import GroupMember, ParamGroup, iterate_own, place_wrapper
from rankless.state.optimizer.own_restore import OwnRestore
from rankless.state.optimizer.param_groups import (
    EncodedGroups,
    MatchTolerance,
    check_trained,
    match_groups,
    pair_merged_states,
)
from rankless.state.optimizer.probe import ProbedState, probe_states
from rankless.state.optimizer.state_buffers import addresses_of, cast_with_parameter, provide_state_buffer, view_target
from rankless.state.optimizer.state_strides import is_order
from rankless.state.repeated_objects import SavedPlace, Stored
from rankless.state.tensor_subclasses import explain_difference, is_description, is_wrapper
from rankless.state.tensor_views import TensorView, local_tensor, view_of

if TYPE_CHECKING:
    from rankless.state.optimizer.own_of_state_dicts import StateDictOwnRestore


class OptimizerRestore:
    """The states and settings that the groups of an optimizer get. :attr:`targets` are the tensors to fill.

    Parameters that have no state in the checkpoint, :attr:`missing`, are left unchanged.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        saved: EncodedGroups,
        infos: Mapping[str, TensorInfo],
        tolerance: MatchTolerance,
        *,
        saved_dtypes: Mapping[str, str] = MappingProxyType({}),
        own: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Match, check and allocate. ``saved`` and ``infos`` are the checkpoint's groups and states, of all ranks.

        ``saved_dtypes`` are the dtypes of the parameters in the checkpoint, if states are cast with them. ``own`` has
        the values that the optimizers kept besides states and settings.

        Raises ``OptimizerMismatchError`` if the optimizer's class differs or, unless tolerated, its parameters or
        groups.
        """
        self._groups, self._saved, self._tolerance = groups, saved, tolerance
        self._saved_dtypes = saved_dtypes
        matching = match_groups(groups, saved, tolerance)
        self._matched, self.missing, self.regrouped = matching.settings, matching.missing, matching.regrouped
        #: Whether a group without parameters keeps its settings because the checkpoint has several of its number, or
        #: whether the saved states are of another class of this name, or of an unknown one, and differ from this
        #: class's.
        self.is_unsure = matching.is_unsure
        self._states: list[tuple[ParamGroup, GroupMember, dict[str, torch.Tensor]]] = []
        self._must_be_equal: list[tuple[str, list[torch.Tensor]]] = []
        self._saved_states = {name: state for saved_group in saved for name, state in saved_group["state"].items()}
        #: The parameters with states that another system saved.
        self._unclassed = {
            name for saved_group in saved if saved_group["class"] is None for name in saved_group["params"]
        }
        self._occupied = addresses_of(groups)
        self._probed: dict[object, Mapping[str, ProbedState | None]] = {}
        self._own = [
            OwnRestore(adapter.optimizer, names, own, is_unclassed=not self._unclassed.isdisjoint(names))
            if isinstance(adapter, TorchOptimizer)
            else _restore_state_dict(adapter, names, own)
            for adapter, names in iterate_own(groups)
        ]
        #: Whether code of an optimizer changed states or settings while it loaded them. Known after :meth:`apply`.
        self.has_changed_states = False
        self.targets: dict[str, TensorView] = {}
        by_name: dict[str, dict[str, TensorInfo]] = {}
        for name, info in infos.items():
            fqn, state = split_state_key(name)
            by_name.setdefault(fqn, {})[state] = info
        self._tensor_names = {state for states in by_name.values() for state in states}
        missing = set(self.missing)
        for group, saved_group in zip(groups, self._matched, strict=True):
            if check_state_names(group, saved_group, by_name):
                self.is_unsure = True
            for member in group.members:
                has_state = not member.refs or any(ref.name not in missing for ref in member.refs)
                if has_state and group.adapter.owns_state(member.key):
                    self._states.append((group, member, self._allocate_states(group, member, by_name)))

    def missing_own(self) -> list[str]:
        """Return the classes of the optimizers that lack some of the values they keep besides states and settings."""
        settings = {name for group in self._saved for name in group["settings"]}
        states = {name for states in self._saved_states.values() for name in states} | self._tensor_names
        return [own.class_name for own in self._own if own.lacks_values(settings, states)]

    def unexpected_own(self) -> list[str]:
        """Return the saved keys that an optimizer has no code of its own to load."""
        return [key for own in self._own if not own.is_unclassed for key in own.unused_keys()]

    def has_inexact_own(self) -> bool:
        """Return whether ranks had different values, or nothing loads another system's values besides the states."""
        return any(own.has_differed or (own.is_unclassed and own.unused_keys()) for own in self._own) or any(
            isinstance(group.adapter, ZeroOptimizer) and group.adapter.explain_unread() for group in self._groups
        )

    def check_trained(self, trained: set[str]) -> list[str]:
        """Return the parameters of the checkpoint that no rank trains; see :func:`check_trained`."""
        return check_trained(self._saved, trained, self._tolerance)

    def saved_names(self) -> set[str]:
        """Return the names of the parameters of the checkpoint."""
        return {name for group in self._saved for name in group["params"]}

    def pair_merged(self, infos: Mapping[str, TensorInfo], kept: str, dropped: str) -> list[tuple[str, str]] | None:
        """Return which states of two parameters that are one tensor here must be equal: :func:`pair_merged_states`."""
        return pair_merged_states(self._saved, infos, kept, dropped, self._tolerance)

    def _allocate_states(
        self, group: ParamGroup, member: GroupMember, infos: Mapping[str, Mapping[str, TensorInfo]]
    ) -> dict[str, torch.Tensor]:
        allocated: dict[str, torch.Tensor] = {}
        if all(ref.flat is not None and not ref.flat.parameter.numel() for ref in member.refs):
            return allocated  # no gradient under FSDP1, so the optimizer has no state of it
        _check_equal_keys(member, infos)
        for ref in member.refs:
            stored, saved_plain = dict(infos.get(ref.name, {})), self._saved_states.get(ref.name, {})
            check_collections(ref, saved_plain)
            for state, saved in saved_wrappers(saved_plain, stored).items():
                allocated[state] = self._allocate_wrapper(group, member, ref, state, saved)
                for inner, target in place_wrapper(ref, state, allocated[state]).inner.items():
                    info = stored.pop(f"{state}.{inner}")
                    if (target.shape, target.dtype) != (info.shape, info.dtype):
                        raise _different_wrapper(ref, f"{state}.{inner}", f"{info} in the checkpoint, {target} here")
                    self.targets[state_key(ref.name, f"{state}.{inner}")] = target
            for state, stored_info in stored.items():
                name = state_key(ref.name, state)
                info = cast_with_parameter(ref, stored_info, self._saved_dtypes.get(ref.name))
                buffer = allocated.get(state)
                if buffer is not None and info.shape == ():
                    self.targets[name] = self._add_shared_scalar(member, state, buffer)
                    continue
                if buffer is None:
                    buffer = allocated[state] = provide_state_buffer(
                        group,
                        member,
                        ref,
                        state,
                        info,
                        occupied=self._occupied,
                        described=saved_plain.get(state),
                    )
                self.targets[name] = view_target(ref, state, buffer, info)
        return allocated

    def _allocate_wrapper(
        self, group: ParamGroup, member: GroupMember, ref: ParamRef, state: str, saved: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the tensor of a wrapper subclass that a state is kept in: the existing one if it fits, else a new one.

        Raises ``OptimizerMismatchError`` if the optimizer creates another kind of tensor here.
        """
        existing = group.adapter.get_states(member.key).get(state)
        if not isinstance(existing, torch.Tensor) or not is_wrapper(existing):
            existing = None
        if existing is not None and place_wrapper(ref, state, existing).description == saved:
            return existing
        probed = self._probe_states(group, member).get(state)
        created = None if probed is None else probed.make_empty()
        here = None if created is None or not is_wrapper(created) else place_wrapper(ref, state, created).description
        if created is None or here != saved:
            raise _different_wrapper(ref, state, explain_difference(saved, here))
        return created

    def _probe_states(self, group: ParamGroup, member: GroupMember) -> Mapping[str, ProbedState | None]:
        """Return the states that an optimizer creates for a parameter. Parameters that are alike are probed once."""
        parameter = member.key
        if not isinstance(group.adapter, TorchOptimizer) or not isinstance(parameter, torch.Tensor):
            return {}
        local, layout = local_tensor(parameter), getattr(parameter, "placements", None)
        mesh = getattr(parameter, "device_mesh", None)
        key = id(group), parameter.shape, parameter.dtype, local.shape, local.device, layout, mesh
        if key not in self._probed:
            self._probed[key] = probe_states(group.adapter.optimizer, parameter)
        return self._probed[key]

    def _add_shared_scalar(self, member: GroupMember, state: str, first: torch.Tensor) -> TensorView:
        """Add a target for a scalar that must be equal for all parameters that share a flat parameter."""
        scalar = torch.empty_like(first)
        scalars = next((tensors for _, tensors in self._must_be_equal if tensors[0] is first), None)
        if scalars is None:
            scalars = [first]
            self._must_be_equal.append((f"{state!r} of {member.refs[0].name!r}", scalars))
        scalars.append(scalar)
        return view_of(scalar, state)

    def pair_settings(self) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Yield the settings of each group, live, with the saved ones that it gets; empty if it keeps its own."""
        for group, saved in zip(self._groups, self._matched, strict=True):
            yield group.settings, saved["settings"] if saved is not None else {}

    def list_places(self, slot: str) -> Iterator[SavedPlace]:
        """Yield the values of each group and parameter here. Called if the optimizer may be in another slot, too."""
        for group, saved in zip(self._groups, self._matched, strict=True):
            if saved is not None:
                subject = f"{slot}: settings of group {group.number}"
                yield SavedPlace(("settings", id(group.settings)), slot, subject, saved["settings"])
        tensors: dict[str, dict[str, Stored]] = {}
        for name in self.targets:
            parameter, state = split_state_key(name)
            tensors.setdefault(parameter, {})[state] = Stored(slot, name)
        for group, member, _ in self._states:
            key = id(member.key) if isinstance(member.key, torch.Tensor) else member.key
            # Optimizers that share their groups may keep states of their own.
            table = getattr(getattr(group.adapter, "optimizer", None), "state", group.settings)
            states = [{**self._saved_states.get(ref.name, {}), **tensors.get(ref.name, {})} for ref in member.refs]
            subject = f"{slot}: state of {', '.join(ref.name for ref in member.refs)}"
            yield SavedPlace(("state", id(table), key), slot, subject, states)
        for identity, values in (saved for own in self._own for saved in own.list_saved()):
            yield SavedPlace(("own", identity), slot, f"{slot}: own values", values)

    def loaded_groups(self) -> list[dict[str, Any]]:
        """Return the settings, live, of the groups that get saved ones."""
        return [group.settings for group, saved in zip(self._groups, self._matched, strict=True) if saved is not None]

    def apply(self) -> None:
        """Put the states into the optimizer, after :func:`put_settings`."""
        for subject, scalars in self._must_be_equal:
            if not all(torch.equal(scalars[0], scalar) for scalar in scalars[1:]):
                raise OptimizerMismatchError(
                    f"{subject} and of parameters that share its flat parameter differ in the checkpoint; FSDP1 keeps "
                    "one value for all of them: wrap with use_orig_params=True"
                )
        for group, member, tensors in self._states:
            plain = {name: value for ref in member.refs for name, value in self._saved_states.get(ref.name, {}).items()}
            plain = {name: value for name, value in plain.items() if not is_order(value)}
            if not self._unclassed.isdisjoint(ref.name for ref in member.refs):
                plain = as_native_states(group, member, plain, self._tensor_names)
            if isinstance(group.adapter, TorchOptimizer) and isinstance(member.key, torch.Tensor):
                optimizer, device = group.adapter.optimizer, member.key.device
                plain = {name: build_objects(value, optimizer, device) for name, value in plain.items()}
            states = {**plain, **tensors}
            group.adapter.set_states(member.key, (join_states(states) if plain else states) or None)
        for group in self._groups:
            group.adapter.on_replaced()
        for own in self._own:
            self.has_changed_states |= own.apply()


def _restore_state_dict(
    adapter: StateDictOptimizer, names: Sequence[str], own: Sequence[Mapping[str, Any]]
) -> StateDictOwnRestore:
    """Return the restore of the values that a state dict has besides states and settings."""
    from rankless.state.optimizer.own_of_state_dicts import (  # noqa: PLC0415 - few optimizers are state dicts
        StateDictOwnRestore,
    )

    return StateDictOwnRestore(adapter.state_dict, names, own)


def saved_wrappers(plain: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Mapping[str, Any]]:
    """Return the descriptions of a parameter's states of wrapper subclasses, if all their inner tensors are stored."""
    return {
        state: value
        for state, value in plain.items()
        if is_description(value) and all(f"{state}.{inner}" in infos for inner in value["inner"])
    }


def _different_wrapper(ref: ParamRef, state: str, difference: str) -> OptimizerMismatchError:
    return OptimizerMismatchError(
        f"optimizer state {state_key(ref.name, state)!r}: {difference}; create the optimizer with the settings that it "
        "was saved with, and shard its parameter such that every rank keeps whole blocks of its states"
    )


def _check_equal_keys(member: GroupMember, infos: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Raise ``OptimizerMismatchError`` if the parameters in a flat parameter do not have the same states."""
    first = member.refs[0] if member.refs else None
    for ref in member.refs[1:]:
        if first is not None and infos.get(ref.name, {}).keys() != infos.get(first.name, {}).keys():
            raise OptimizerMismatchError(
                f"the checkpoint has different optimizer states of {first.name!r} and {ref.name!r}, which FSDP1 "
                "keeps as one here: wrap with use_orig_params=True"
            )


def put_settings(pairs: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]) -> set[int]:
    """Put saved settings into the groups of all optimizers that are loaded together.

    A tensor, such as a learning rate that a captured step reads, is filled in place, also if several groups share it
    and get the same value. Else they get separate tensors. A value that does not fit into the tensor replaces it, as
    ``Optimizer.load_state_dict`` does. Return the ids of the groups with a rounded value.
    """
    use_counts = Counter(id(value) for group, _ in pairs for value in group.values() if isinstance(value, torch.Tensor))
    shared: dict[int, list[_Place]] = {}
    for group, saved in pairs:
        for name, value in saved.items():
            current = group.get(name)
            if isinstance(current, Enum):
                group[name] = type(current)(value)
            elif isinstance(current, torch.Tensor):
                shared.setdefault(id(current), []).append(_Place(group, name, value))
            else:
                group[name] = value
    rounded: set[int] = set()
    for key, places in shared.items():
        rounded.update(map(id, _put_into_tensor(places, is_all=len(places) == use_counts[key])))
    return rounded


class _Place(NamedTuple):
    """A setting that is a tensor, and its saved value."""

    group: dict[str, Any]
    name: str
    value: Any


def _put_into_tensor(places: Sequence[_Place], *, is_all: bool) -> list[dict[str, Any]]:
    """Put the saved values of settings that are one tensor. ``is_all``: no other group has it.

    Return the groups with a rounded value.
    """
    current = places[0].group[places[0].name]
    fits = [_fit(place.value, current) for place in places]
    first = fits[0]
    is_one = first is not None and all(fit is not None and _is_equal(fit, first) for fit in fits)
    if first is not None and is_one and is_all and _is_writable(current):
        with torch.no_grad():
            current.copy_(first)
    else:
        for place, fit in zip(places, fits, strict=True):
            value = place.value if fit is None else fit
            place.group[place.name] = value.to(current.device) if isinstance(value, torch.Tensor) else value
    return [
        place.group
        for place, fit in zip(places, fits, strict=True)
        if fit is not None and not _is_equal(fit, _as_tensor(place.value))
    ]


def _fit(value: object, current: torch.Tensor) -> torch.Tensor | None:
    """Return a saved value with the form of a tensor; ``None`` if it would be another value, except for rounding."""
    if type(current) not in {torch.Tensor, torch.nn.Parameter} or not isinstance(
        value, torch.Tensor | np.generic | int | float
    ):
        return None
    try:
        saved = _as_tensor(value)
    except TypeError:  # an integer of more than 64 bits
        return None
    if tuple(saved.shape) != tuple(current.shape) and (isinstance(value, torch.Tensor) or current.numel() != 1):
        return None
    fit = saved.reshape(current.shape).to(current.device, current.dtype, copy=True)
    is_float = saved.is_floating_point() and current.is_floating_point()
    return fit if is_float or _is_equal(fit, saved) else None


def _as_tensor(value: Any) -> torch.Tensor:
    """Return a saved setting as a tensor, without rounding: torch would make a number single precision."""
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))


def _is_equal(fit: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return whether a cast has kept all values."""
    if not saved.is_floating_point():
        if fit.dtype == saved.dtype:
            return torch.equal(fit.reshape(saved.shape), saved.to(fit.device))
        return bool(saved.numel() == 1 and fit.item() == saved.item())
    wide, back = saved.double(), fit.reshape(saved.shape).to(saved.device, torch.float64)
    return torch.equal(back.isnan(), wide.isnan()) and torch.equal(back.nan_to_num(), wide.nan_to_num())


def _is_writable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be filled in place: an expanded one has one element in several places."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not is_expanded and not tensor.is_inference()
