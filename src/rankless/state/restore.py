"""A restore of training objects on this rank: everything is matched and allocated first, and applied last.

:mod:`rankless.load.load_operation` and :mod:`rankless.live_copy.copy_targets` have one :class:`LoadTargets` on each
rank, in the thread of the caller. The order must stay: match (vote "reading the metadata"), check (vote "matching …"),
then give memory and fill (vote "reading"), then :meth:`LoadTargets.apply` (vote "putting values in place"). Nothing of
the caller's may change before the fill.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rankless.engine.plan.tensor_specs import OWN, PER_RANK, STATE
from rankless.errors import MismatchError, OptimizerMismatchError
from rankless.observe.spans import traced
from rankless.ondisk.data_files import ADAPTER_CONFIG, TensorInfo, is_adapter_group
from rankless.ondisk.dtypes import FLOATING
from rankless.ondisk.value_files import BY_NUMBER, MAY_SKIP_FROZEN, OWN_STATE
from rankless.state import scheduler as schedulers
from rankless.state import user_objects
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.differing_values import components_of, digest_layout, own_model_values, replace_shared
from rankless.state.inventory import MODEL, OPTIMIZER, Inventory
from rankless.state.meta_models import MetaModels
from rankless.state.mismatches import MismatchReport, RestorePolicy
from rankless.state.model import fsdp1
from rankless.state.model import model_traversal as models
from rankless.state.model.hf_optional_tensors import optional_names
from rankless.state.model.model_view import ModelView, is_extra
from rankless.state.model.peft_adapters import check_unmerged, explain_config_differences, loadable_views
from rankless.state.optimizer import adapters
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
from rankless.state.rank_states import LOADER, PER_RANK_CONTENT, RNG, RankState
from rankless.state.repeated_objects import SavedPlace, find_repetitions
from rankless.state.schedulers_by_params import find_entries, scheduled_params
from rankless.state.split_parameters import split_refs, stored_names
from rankless.state.tensor_subclasses import explain_difference, is_alike, is_description
from rankless.state.tensor_views import TensorView, find_shared_memory, local_tensor, shares_elements, view_of
from rankless.state.training import TrainingObjects
from rankless.state.user_objects import loading_code

#: ``{group: {name: dtype and shape}}``.
Groups = Mapping[str, Mapping[str, TensorInfo]]

#: Kinds of names that ranks exchange besides the tensors they request, by slot: values of models, parameters of
#: optimizers, and stored tensors that a model has but that cannot be loaded into it.
_VALUES, _TRAINED, _KNOWN = "values", "trained", "known"

#: The kind of the names of stored tensors that are one tensor here, in pairs: as JSON, the group and name of both.
_MERGED = "merged"

#: The group and name of a stored tensor that is loaded, and of one that is dropped, because both are one tensor here.
Merged = tuple[tuple[str, str], tuple[str, str]]

#: The component of the content that the user saved for all ranks.
CONTENT = "user_content"


class LoadTargets:
    """The targets of one load on this rank, before any byte of tensor data is read.

    :attr:`targets` are the tensors to fill, live or just allocated, by group and stored name. :attr:`aliased_targets`
    are further targets of the same stored tensors. :attr:`filled` are the names here of the targets of models and
    optimizers, by slot. :attr:`inventory` has the tensors that this rank requests, to be sent to the other ranks.
    """

    def __init__(
        self,
        training: TrainingObjects,
        groups: Groups,
        tied: Mapping[str, Mapping[str, str]],
        policy: RestorePolicy,
        joined: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Set up a load. ``joined`` are stored tensors, by group, that this rank sees as parts of others."""
        self._training, self._groups, self._tied, self._policy = training, groups, tied, policy
        self._joined_names = joined
        self.shared = ArrayDecoder(groups.get(STATE, {}))
        self.targets: dict[tuple[str, str], TensorView] = {}
        self.aliased_targets: list[tuple[tuple[str, str], TensorView]] = []
        self.filled: set[tuple[str, str]] = set()
        self._merged: set[Merged] = set()
        self._meta_models = MetaModels(training)
        self.report = MismatchReport()
        #: How the parameters of each optimizer were matched: by ``"model"``, ``"names"`` or ``"places"``.
        self.matched_by: dict[str, str] = {}
        self.inventory = Inventory()
        self._views: dict[str, ModelView] = {}
        self._optimizer_restores: dict[str, OptimizerRestore] = {}
        #: New buffers with the checkpoint's shapes, for modules that resize theirs, by slot and name.
        self._resized_buffers: dict[str, dict[str, Tensor]] = {}
        #: Buffers that this rank had, if they differed between ranks, by slot and name.
        self._own_buffers: dict[str, Mapping[str, Tensor]] = {}
        self._values: Mapping[str, Any] = {}
        self._rank_state = RankState()
        #: The saved states of schedulers, by slot.
        self._scheduler_entries: dict[str, Any] = {}

    def match_targets(self, shared: Mapping[str, Any], rank_state: RankState, rank_arrays: ArrayDecoder) -> None:
        """Find a target for everything requested. Raises ``OptimizerMismatchError``.

        Each rank calls it in the vote "reading the metadata".
        """
        self._values, self._rank_state = replace_shared(shared, rank_state.own), rank_state
        model_parts = models.model_components(self._training.model)
        for slot, parts in model_parts.items():
            self._match_model(slot, parts)
        self._match_differing()
        optimizer_parts = adapters.optimizer_components(self._training.optimizer)
        for slot, parts in optimizer_parts.items():
            self._match_optimizer(slot, parts)
        scheduler_parts = schedulers.scheduler_components(self._training.scheduler)
        for slot, parts in scheduler_parts.items():
            if slot in shared:
                self._match_schedulers(slot, parts)
            else:
                self.report.add_missing(slot, slot)
        self._match_stateful()
        settings = [live for restore in self._optimizer_restores.values() for live, _ in restore.pair_settings()]
        single = [part for parts in (model_parts | optimizer_parts | scheduler_parts).values() for part in parts]
        single += [*(self._training.stateful or {}).values(), *settings]
        if len(set(map(id, single))) < len(single) or any(view.extra for view in self._views.values()):
            self._compare_repeated()
        if any(isinstance(value, Tensor) for live in settings for value in live.values()):
            self._note_shared_settings()
        self._match_rank_state()
        for group, arrays in ((STATE, self.shared), (PER_RANK, rank_arrays)):
            for name, tensor in arrays.tensors.items():
                self._add_target((group, name), view_of(tensor, f"{group} tensor {name!r}"))
        self._find_shared()

    def _match_schedulers(self, slot: str, parts: Sequence[Any]) -> None:
        """Find the saved state of each scheduler: the state of its stage, if stages had different ones."""
        refs = optimizers.refs_for(OPTIMIZER, self._views or self._view_models()) or {}
        names = {identity: [ref.name for ref in param_refs] for identity, param_refs in refs.items()}
        params = [scheduled_params(part, names) for part in parts]
        entries, is_uncertain = find_entries(self._values[slot], params)
        if isinstance(entries, list) and None in entries:
            self.report.different.append(
                f"{slot}: the checkpoint has no state of a scheduler of these parameter groups, or states of several "
                "that differ: leave the scheduler out, and make a new one"
            )
            return
        self._scheduler_entries[slot] = entries
        self.report.different += schedulers.compare_schedulers(parts, entries)
        if is_uncertain or schedulers.have_other_keys(parts, entries):
            self.report.cast.add(slot)

    def _match_differing(self) -> None:
        """Find the values that differed between the ranks that saved, and that this rank had."""
        state = self._rank_state
        restored = {name for name in state.own if not name.startswith((MODEL, OPTIMIZER))}
        for slot, view in self._views.items() if digest_layout(self._views) == state.layout else ():
            own = own_model_values(slot, view, state.own)
            self._own_buffers[slot] = {name: own[name] for name in own if name in view.buffers}
            self._values = {**self._values, slot: {**self._values.get(slot, {}), **_without(own, view.buffers)}}
            restored.update(f"{slot}/{name}" for name in own)
        for component, name in components_of(self._training, state.differing - restored):
            self.report.add_differing(component, name)

    def _match_stateful(self) -> None:
        """Match stateful objects by name."""
        saved = self._values.get("stateful", {})
        requested = () if self._training.stateful is None else user_objects.check_stateful(self._training.stateful)
        for name in requested:
            if name not in saved:
                self.report.add_missing(f"stateful/{name}", f"stateful object {name!r}")
                self.report.incomplete.add("stateful")

    def _match_rank_state(self) -> None:
        """Match the state that belongs to this rank alone."""
        state, training, report = self._rank_state, self._training, self.report
        if training.dataloader is not None and not state.loader:
            report.add_missing(LOADER, LOADER, state.lost.get(LOADER, ""))
        check_states = getattr(training.dataloader, "check_states", None)
        if state.loader and callable(check_states):
            try:
                check_states(state.loader)
            except MismatchError as error:
                report.different.append(str(error))
        if self._policy.rng and not state.has_generators():
            report.add_missing(RNG, RNG)
        if PER_RANK_CONTENT in state.lost and self._policy.per_rank_content:
            report.add_missing(PER_RANK_CONTENT, PER_RANK_CONTENT, state.lost[PER_RANK_CONTENT])
        elif PER_RANK_CONTENT in state.lost:
            report.missing.append(PER_RANK_CONTENT)

    def _note_shared_settings(self) -> None:
        """Note components as not exact if a setting is in the memory of a tensor that is loaded, and is filled later.

        Called only if a setting is a tensor.
        """
        for slot, optimizer_restore in self._optimizer_restores.items():
            values = [value for live, _ in optimizer_restore.pair_settings() for value in live.values()]
            for value in (local_tensor(value) for value in values if isinstance(value, Tensor)):
                start, stop = value.data_ptr(), value.data_ptr() + value.nbytes
                self.report.cast |= {
                    component
                    for (group, *_), target in self._list_filled()
                    if target.local.device == value.device
                    and target.local.data_ptr() < stop
                    and start < target.local.data_ptr() + target.local.nbytes
                    for component in (slot, _component_of(group))
                }

    def _compare_repeated(self) -> None:
        """Compare the saved values that one object gets here. Called only if there may be such an object."""
        for repetition in find_repetitions([*self._list_places()], self.shared.tensors):
            first, second, tensors = repetition
            components = {first.component, second.component}
            if not repetition.is_comparable() or not all(map(self._policy.is_strict, components)):
                self.report.cast |= set() if tensors == [] else components
            elif tensors is None:
                self.report.different.append(
                    f"{second.subject}: the same object as {first.subject} here, and another state in the checkpoint: "
                    "only one of them can be loaded; pass separate objects"
                )
            else:
                self._merged |= {((*one,), (*other,)) for one, other in tensors if one != other}

    def _list_places(self) -> Iterator[SavedPlace]:
        """Yield each object that a value is loaded into, with the saved value."""
        for slot, view in self._views.items():
            saved = self._values.get(slot, {})
            for name in sorted(view.extra.keys() & saved.keys()):
                for owner in view.owners[name]:
                    yield SavedPlace(
                        ("extra", *owner.find_identity()), _component_of(slot), f"{slot}/{name}", saved[name]
                    )
        for slot, optimizer_restore in self._optimizer_restores.items():
            yield from optimizer_restore.list_places(slot)
        kinds = (models.model_components(self._training.model), adapters.optimizer_components(self._training.optimizer))
        for slot, parts in (item for components in kinds for item in components.items()):
            yield from (SavedPlace(id(part), slot, slot, None) for part in parts)
        for slot, parts in schedulers.scheduler_components(self._training.scheduler).items():
            entries = schedulers.entry_per_scheduler(self._scheduler_entries.get(slot, []), len(parts))
            for number, (part, entry) in enumerate(zip(parts, entries, strict=False)):
                subject = slot if len(parts) == 1 else f"{slot}, part {number}"
                yield SavedPlace(id(part), slot, subject, entry["state"])
        saved = self._values.get("stateful", {})
        for name, stateful_object in (self._training.stateful or {}).items():
            if name in saved:
                yield SavedPlace(id(stateful_object), "stateful", f"stateful/{name}", saved[name])

    def fill_inventory(self, rank: int) -> None:
        """Add to :attr:`inventory` the tensors that this rank requests, and the names that it knows."""
        for (group, name), tensor in self.targets.items():
            is_own = group == PER_RANK and not self._rank_state.split and name.startswith(f"{rank}/")
            key = (OWN, name.removeprefix(f"{rank}/")) if is_own else (group, name)
            self.inventory.add_tensor(*key, tensor, dtype=self._groups[group][name].dtype)
        for slot, view in self._views.items():
            self.inventory.names[f"{_VALUES} {slot}"] = [*view.extra, *view.wrappers]
        if self._merged:
            self.inventory.names[_MERGED] = [msgspec.json.encode(pair).decode() for pair in sorted(self._merged)]

    def check_matches(
        self,
        requested: set[tuple[str, str]],
        known: Mapping[str, set[str]],
        source: str,
        *,
        is_part: bool = False,
        advice: str = "",
    ) -> None:
        """Raise ``MismatchError`` with all mismatches, once the requests of all ranks are known.

        ``requested`` are the stored tensors that any rank requests, ``known`` the other names that any rank knows. If
        all ranks together request only a part (``is_part``), names that no rank knows are not unexpected. ``advice``
        says what to do if shapes differ.

        Each rank calls it in the last vote before anything changes.
        """
        for slot, view in self._views.items():
            known_names = known.get(f"{_KNOWN} {slot}", set())
            stored = self._groups.get(slot, {})
            extra, known_extra = self._values.get(slot, {}), known.get(f"{_VALUES} {slot}", set())
            unexpected = [name for name in stored if (slot, name) not in requested and name not in known_names]
            unexpected += [name for name in extra if name not in known_extra]
            for name in () if is_part else unexpected:
                self.report.add_unexpected(_component_of(slot), name)
            for name in (*view.extra, *view.wrappers):
                if name not in extra:
                    self.report.add_missing(slot, name)
        for slot, optimizer_restore in () if is_part else self._optimizer_restores.items():
            with self._note_mismatch():
                for name in optimizer_restore.check_trained(known.get(f"{_TRAINED} {slot}", set())):
                    self.report.add_unexpected(slot, f"{slot}/{name}")
        targeted = {id(target.local) for target in self._iterate_targets()}
        self.report.different += self._meta_models.find_uninitialized(targeted)
        self._suggest_keys()
        self.report.raise_if_any(self._policy, source, advice)

    @property
    def user_content(self) -> Any:
        """The content that the user saved for all ranks."""
        return self._values.get("user_content")

    @property
    def per_rank_content(self) -> Any:
        """The content that the user saved for this rank."""
        return self._rank_state.content

    def count_changes(self) -> None:
        """Make torch count a change of each tensor that is filled: their bytes are not written through torch.

        A load calls it in the vote "reading", right before the reads.
        """
        increment_version([target.local for target in self.targets.values() if not target.local.is_inference()])

    def explain_adapters(self, files: Mapping[str, bytes]) -> Iterator[str]:
        """Yield how the model's PEFT adapters are configured in another way than in the checkpoint.

        ``files`` are the small files of the stored adapters.
        """
        suffix = f"/{ADAPTER_CONFIG}"
        configs = {name.removesuffix(suffix): data for name, data in files.items() if name.endswith(suffix)}
        parts = models.model_components(self._training.model).get(MODEL, ())
        yield from explain_config_differences(parts, configs) if configs else ()

    def classify_components(self) -> tuple[list[str], list[str]]:
        """Return the components that are restored exactly, and the components that are reconstructed from saved values.

        Reconstructed components differ: they are cast, split for another number of ranks, seeded, or rank 0's for all.
        """
        state, report = self._rank_state, self.report
        loaded = [
            component
            for component in self._training.component_names()
            if component != LOADER and component not in report.incomplete
        ]
        differing = {component for component, _ in report.differing}
        inexact = report.cast | differing
        exact = [component for component in loaded if component not in inexact]
        reconstructed = [component for component in loaded if component in inexact]
        if state.has_generators():
            (reconstructed if state.seeds else exact).append(RNG)
        if state.loader:
            (reconstructed if state.split else exact).append(LOADER)
        if CONTENT in self._values:
            (reconstructed if CONTENT in differing else exact).append(CONTENT)
        exact += [PER_RANK_CONTENT] if state.content is not None else []
        return exact, reconstructed

    def components_not_requested(self) -> list[str]:
        """Return the checkpoint's components without a passed object: the same on ranks that pass the same.

        They also have the objects that only other ranks had.
        """
        stored = [group for group in self._groups if group == MODEL or group.startswith(f"{MODEL}/")]
        stored += [slot for slot in self._values if slot.partition("/")[0] in {OPTIMIZER, "scheduler"}]
        stateful = {f"stateful/{name}" for name in self._values.get("stateful", {})}
        stored += sorted(stateful.union(name for name in self._rank_state.differing if name.startswith("stateful/")))
        requested = {*self._training.component_names(), *self._training.stateful_names()}
        return [name for name in stored if name not in requested]

    def _suggest_keys(self) -> None:
        """Report which keys to pass if a checkpoint of another system has several models, not the one requested."""
        for slot in self._views:
            others = sorted(name for name in self._groups if name.startswith(f"{slot}/"))
            if slot not in self._groups and others:
                self.report.different.insert(0, _describe_alternatives(slot, others))

    @contextmanager
    def _note_mismatch(self) -> Iterator[None]:
        """Report an optimizer's mismatch together with the model's mismatches, if there are any: they are its cause."""
        try:
            yield
        except OptimizerMismatchError as error:
            if not self._has_mismatches():
                raise
            self.report.different.append(str(error))

    def _has_mismatches(self) -> bool:
        report, policy = self.report, self._policy
        return bool(report.different or report.refused_names(policy) or report.refused_components(policy))

    def _match_model(self, slot: str, parts: Sequence[object]) -> None:
        for part in parts:
            if isinstance(part, nn.Module):
                fsdp1.reshard(part)
        check_unmerged(parts)
        adapter_groups = [group for group in self._groups if is_adapter_group(group)]
        if slot == MODEL and slot not in self._groups and adapter_groups:
            self._match_adapters(slot, parts, adapter_groups)
            return
        names = self._groups.get(slot, {}).keys() | self._tied.get(slot, {}).keys()
        optional = [optional_names(part) for part in parts]
        self._match_view(slot, models.build_load_view(parts, names), lambda name: any(test(name) for test in optional))

    def _match_adapters(self, slot: str, parts: Sequence[object], groups: Sequence[str]) -> None:
        """Match the PEFT adapters of a model with a checkpoint that contains only adapters."""
        model_view = models.build_view(parts)
        views = loadable_views(parts, model_view, groups)
        # The optimizer needs the model's names of parameters, and the model its load hooks.
        self._views[slot] = ModelView(refs=model_view.refs, loaders=model_view.loaders)
        if not views:
            self.report.different.append(
                "the checkpoint has only PEFT adapters, and the model here has none: pass the model that "
                "peft.get_peft_model() returns"
            )
        for group, view in views.items():
            self._match_view(group, view)
        for group in (group for group in groups if group not in views):
            for name in self._groups[group]:
                self.report.add_unexpected(slot, f"{group}/{name}")

    def _match_view(self, slot: str, view: ModelView, is_optional: Callable[[str], bool] = lambda _: False) -> None:
        """Match the tensors of a model or an adapter with the group ``slot``. Optional ones may be missing."""
        stored, tied = self._groups.get(slot, {}), self._tied.get(slot, {})
        self._views[slot] = view
        aliases: dict[str, list[str]] = {}
        loaded: set[str] = set()
        for alias, name in view.tied.items():
            aliases.setdefault(name, []).append(alias)
        for name, tensor in [*view.tensors.items(), *view.duplicates]:
            source: str | None = tied.get(name, name)
            if source not in stored:
                candidates = (tied.get(alias, alias) for alias in aliases.get(name, ()))
                source = next((candidate for candidate in candidates if candidate in stored), None)
            if source is None:
                self.report.add_missing(_component_of(slot), name, is_optional=is_optional(name))
                continue
            target, info = tensor, stored[source]
            if tensor.shape != info.shape:
                target = self._resize_buffer(slot, name, tensor, info) or tensor
            if self._check_tensor(slot, name, target, info):
                self._add_target((slot, source), target)
                self.filled.add((slot, name))
                loaded.add(source)
        if view.tensors and stored and not loaded and not self.report.different:
            self.report.reasons.insert(0, (_component_of(slot), _describe_strangers(slot, view.tensors, stored)))
        for name in view.left_out:
            if name not in stored:  # else it is unexpected
                self.report.add_missing(_component_of(slot), name, is_optional=True)
        self._note_merged(slot, view)
        self._check_wrappers(slot, view)
        known_names = {tied.get(name, name) for name in (*view.tensors, *view.tied)}
        not_loaded = sorted(known_names & (stored.keys() - loaded))
        self._check_load_hooks(slot, view)
        self.inventory.names[f"{_KNOWN} {slot}"] = not_loaded + sorted(self._joined_names.get(slot, ()))

    def _note_merged(self, slot: str, view: ModelView) -> None:
        """Note the stored tensors under names that are tied here: all but one of them are dropped if they are equal."""
        stored, tied = self._groups.get(slot, {}), self._tied.get(slot, {})
        names: dict[str, list[str]] = {}
        for alias, name in view.tied.items():
            sources = names.setdefault(name, [source for source in [tied.get(name, name)] if source in stored])
            source = tied.get(alias, alias)
            if source in stored and source not in sources:
                sources.append(source)
        for kept, *dropped in filter(None, names.values()):
            self._merged |= {((slot, kept), (slot, source)) for source in dropped}

    def _find_shared(self) -> None:
        """Note which stored tensors fill the same memory here, of whatever components.

        Note the components as not exact if memory is shared in part: one value may replace a part of the other.
        """
        alike, partial = find_shared_memory(dict(self._list_filled()))
        self._merged |= {(kept[:2], dropped[:2]) for kept, dropped in alike if kept[:2] != dropped[:2]}
        self.report.cast |= {_component_of(group) for group, *_ in partial}

    def _list_filled(self) -> list[tuple[tuple[str, str, str], TensorView]]:
        """Return all targets, each with its group, its name and its number."""
        filled = [*self.targets.items(), *self.aliased_targets]
        return [((*key, str(number)), target) for number, (key, target) in enumerate(filled)]

    def add_dropped(
        self, kept: tuple[str, str], dropped: tuple[str, str], there: str = "another one in the checkpoint"
    ) -> None:
        """Report a stored tensor that is dropped although it is not known to equal the one that is loaded.

        ``there`` says how it differs in the checkpoint.
        """
        components = [_component_of(group) for group, _ in (kept, dropped)]
        names = [key[1] if kept[0] == dropped[0] else "/".join(key) for key in (kept, dropped)]
        if any(map(self._policy.is_strict, components)):
            self.report.different.append(
                f"{names[1]}: the same tensor as {names[0]} here, and {there}, which would be dropped: untie them, or "
                f"pass strict=False to load {names[0]} for both"
            )
            return
        is_state = components[1].partition("/")[0] == OPTIMIZER
        self.report.add_unexpected(components[1], "/".join(dropped) if is_state else names[1])
        self._set_aside(kept, dropped)

    def _set_aside(self, kept: tuple[str, str], dropped: tuple[str, str]) -> None:
        """Give a tensor that is dropped memory of its own, so that it does not replace the one that is loaded."""
        alike, _ = find_shared_memory({key: view for key, view in self._list_filled() if key[:2] in {kept, dropped}})
        for group, name, number in (key for _, key in alike if key[:2] == dropped):
            at = int(number) - len(self.targets)
            view = self.targets[group, name] if at < 0 else self.aliased_targets[at][1]
            aside = msgspec.structs.replace(view, local=torch.empty_like(view.local, device="cpu"))
            if at < 0:
                self.targets[dropped] = aside
            else:
                self.aliased_targets[at] = dropped, aside

    def _check_wrappers(self, slot: str, view: ModelView) -> None:
        """Report tensors that belong to another tensor subclass here than in the checkpoint, or to one on one side."""
        saved, stored = self._values.get(slot, {}), self._groups.get(slot, {})
        for name, here in view.wrappers.items():
            if name in stored or not is_alike(saved.get(name, here), here):
                self.report.different.append(f"{name}: {explain_difference(saved.get(name), here)}")
        for name in view.tensors:
            if name not in stored and is_description(saved.get(name)):
                self.report.different.append(f"{name}: {explain_difference(saved[name], None)}")

    def _resize_buffer(self, slot: str, name: str, tensor: TensorView, info: TensorInfo) -> TensorView | None:
        """Return a new buffer of the checkpoint's shape, to be filled, if code of the module may resize the buffer.

        The buffer has another shape.
        """
        view = self._views[slot]
        is_plain = name in view.buffers and tensor.layout is None and not tensor.local.is_meta
        if not is_plain or not any(loader.may_resize(name) for loader in view.loaders):
            return None
        buffer = self._resized_buffers.setdefault(slot, {})[name] = tensor.local.new_empty(info.shape)
        return view_of(buffer, f"model tensor {name!r}")

    def _check_load_hooks(self, slot: str, view: ModelView) -> None:
        """Report load hooks that cannot run under FSDP1 as a difference or, if not strict, as missing."""
        for loader in view.loaders:
            problem = loader.explain_fsdp1_conflict() if fsdp1.uses_fsdp1(loader.module) else None
            if problem is not None and self._policy.is_strict(_component_of(slot)):
                self.report.different.append(problem)
            elif problem is not None:
                self.report.add_missing(slot, f"load hooks: {problem}")

    def _add_target(self, source: tuple[str, str], tensor: TensorView) -> None:
        """Add a target. One source has several targets if weights are tied in the checkpoint and separate here."""
        if self.targets.setdefault(source, tensor) is not tensor:
            self.aliased_targets.append((source, tensor))

    def _check_tensor(self, slot: str, name: str, tensor: TensorView, info: TensorInfo) -> bool:
        if tensor.shape != info.shape:
            self.report.different.append(
                f"{name}: shape {list(info.shape)} in the checkpoint, {list(tensor.shape)} here"
            )
        elif tensor.dtype != info.dtype and not (self._policy.cast_dtype and _may_cast(info.dtype, tensor.dtype)):
            hint = "cast_dtype=True casts" if _may_cast(info.dtype, tensor.dtype) else "no cast keeps these values"
            self.report.different.append(f"{name}: dtype {info.dtype} in the checkpoint, {tensor.dtype} here ({hint})")
        elif not tensor.local.is_meta and shares_elements(tensor.local):
            self.report.different.append(
                f"{name}: an expanded view here, whose elements share memory and cannot be filled: replace it by its "
                "clone()"
            )
        elif tensor.local.is_meta and not self._meta_models.can_materialize(_component_of(slot)):
            self.report.different.append(
                f"{name}: on the meta device here, without memory: load the model alone, before the optimizer is "
                "created; a state dict, or a model under FSDP1, needs memory first"
            )
        else:
            if tensor.dtype != info.dtype:
                self.report.cast.add(_component_of(slot))
            return True
        return False

    def _iterate_targets(self) -> Iterator[TensorView]:
        yield from self.targets.values()
        yield from (target for _, target in self.aliased_targets)

    @traced("allocate", "apply")
    def materialize_models(self) -> None:
        """Give tensors on the meta device memory, and initialize those that nothing is loaded into."""
        materialized = self._meta_models.materialize_models({id(target.local) for target in self._iterate_targets()})
        if materialized:
            self.targets = {key: _with_memory(target, materialized) for key, target in self.targets.items()}
            self.aliased_targets = [(key, _with_memory(target, materialized)) for key, target in self.aliased_targets]

    def _match_optimizer(self, slot: str, parts: Sequence[object]) -> None:
        if slot not in self._values:
            self.report.add_missing(slot, slot)
            return
        views = self._views or self._view_naming_models(slot)
        refs = optimizers.refs_for(slot, views)
        groups = optimizers.view_groups(parts, refs)
        self.matched_by[slot] = "model" if refs is not None else "names" if has_names(groups) else "places"
        if self._values[slot].get(BY_NUMBER) or has_only_numbers(groups, self._values[slot]["groups"]):
            groups = self._skip_frozen(slot, groups)
            groups = match_by_number(groups, self._values[slot]["groups"])
            check_order(groups, self._values[slot]["groups"], self._groups.get(slot, {}))
            self.matched_by[slot] = "places"
        elif self.matched_by[slot] == "places":
            groups = match_by_position(groups, self._values[slot]["groups"])
            check_order(groups, self._values[slot]["groups"], self._groups.get(slot, {}))
        stored = {name for ref in split_refs(groups).values() for name in stored_names(ref)}
        self.inventory.names[f"{_TRAINED} {slot}"] = sorted(stored.union(optimizers.parameter_names(groups)))
        with self._note_mismatch():
            infos = {} if self._has_mismatches() else self._groups.get(slot, {})
            by_name = self.matched_by[slot] != "places"
            tied = {alias: name for names in self._tied.values() for alias, name in names.items()}
            tolerance = MatchTolerance(
                by_name and self._policy.may_be_missing(slot),
                by_name,
                tied,
                unread=frozenset(tensor.data_ptr() for tensor in self.shared.tensors.values()),
                has_model=refs is not None,
            )
            optimizer_restore = self._optimizer_restores[slot] = OptimizerRestore(
                groups,
                self._values[slot]["groups"],
                infos,
                tolerance,
                saved_dtypes=self._saved_dtypes(slot),
                own=self._values[slot].get(OWN_STATE, ()),
            )
            self._match_own_state(slot, optimizer_restore)
            for name in optimizer_restore.missing:
                self.report.add_missing(slot, f"{slot}/{name}")
            if optimizer_restore.is_unsure:
                self.report.cast.add(slot)
            for number in optimizer_restore.regrouped:
                self.report.add_missing(slot, f"{slot}: settings of group {number}")
            for name, tensor in optimizer_restore.targets.items():
                if tensor.dtype != infos[name].dtype:
                    self.report.cast.add(slot)
                self._add_target((slot, name), tensor)
                self.filled.add((slot, name))
            self._note_tied_states(slot, optimizer_restore, infos, views)

    def _skip_frozen(self, slot: str, groups: list[ParamGroup]) -> list[ParamGroup]:
        """Leave frozen parameters without a number, if the checkpoint may be so: the optimizer is reconstructed."""
        if not self._values[slot].get(MAY_SKIP_FROZEN) and not self._policy.may_skip_frozen:
            return groups
        trained = skip_frozen(groups, self._values[slot]["groups"])
        if trained is not groups:
            self.report.cast.add(slot)
        return trained

    def _match_own_state(self, slot: str, optimizer_restore: OptimizerRestore) -> None:
        """Report values in optimizers' ``state_dict()``, besides states and settings, that are on one side only."""
        for name in optimizer_restore.missing_own():
            reason = (
                f"{name} keeps values in its state_dict() that the checkpoint lacks, or has for other parameters or "
                "in another order"
            )
            self.report.add_missing(slot, f"{slot}: own values", reason)
        for name in optimizer_restore.unexpected_own():
            self.report.add_unexpected(slot, f"{slot}: {name!r} of its state_dict()")
        if optimizer_restore.has_inexact_own():
            self.report.cast.add(slot)

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
                self._merged |= {((slot, first), (slot, second)) for first, second in pairs if first != second}

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
        prefix, saved_names = _prefix_in(slot, group), self._tied.get(group, {})
        trained = optimizer_restore.saved_names()
        for alias, name in tied.items():
            kept, dropped = [prefix + saved_names.get(known, known) for known in (name, alias)]
            if dropped == kept or dropped not in trained:
                continue
            self.inventory.names[f"{_TRAINED} {slot}"].append(dropped)
            states = optimizer_restore.pair_merged(infos, kept, dropped)
            if states is None:
                self._add_dropped_parameter(slot, prefix + alias, dropped, kept)
            yield from states or ()

    def _add_dropped_parameter(self, slot: str, alias: str, dropped: str, kept: str) -> None:
        """Report a parameter that is one tensor with another one here, and was trained in another way."""
        if not self._policy.is_strict(slot):
            self.report.add_unexpected(slot, f"{slot}/{dropped}")
            return
        origin = "" if alias == dropped else f" under the name {dropped}"
        self.report.different.append(
            f"{slot}: {alias} is one tensor with {kept} here, and the checkpoint has other settings or another state "
            f"of it{origin}, which would be dropped: untie them, or pass strict=False to load those of {kept} for both"
        )

    def _saved_dtypes(self, slot: str) -> dict[str, str]:
        """Return the dtypes in the checkpoint of the parameters of an optimizer, if its states are cast with them."""
        if not self._policy.cast_dtype:
            return {}
        dtypes: dict[str, str] = {}
        for group, infos in self._groups.items():
            if group == MODEL or group.startswith(f"{MODEL}/"):
                prefix = _prefix_in(slot, group)
                dtypes |= {prefix + name: info.dtype for name, info in infos.items()}
        return dtypes

    def _view_naming_models(self, slot: str) -> dict[str, ModelView]:
        """Return views of the models that only provide parameter names, by slot."""
        return self._view_models({name for group in self._values[slot]["groups"] for name in group["params"]})

    def _view_models(self, stored: Collection[str] = ()) -> dict[str, ModelView]:
        """Return views of the models that only provide parameter names. The checkpoint has the names in ``stored``."""
        components = models.model_components(self._training.naming_model).items()
        return {name: models.build_load_view(parts, set(stored)) for name, parts in components}

    @traced("apply", "apply")
    def apply(self) -> None:
        """Put the values in place, once all tensors are filled.

        Each rank calls it in the vote "putting values in place", where errors of user code become common.
        """
        for target in self._iterate_targets():
            if target.packed is not None:
                target.packed.unpack(target.local)
        for slot, view in self._views.items():
            self._apply_model(slot, view)
        optimizer_restores = self._optimizer_restores.values()
        rounded = put_settings(
            [pair for optimizer_restore in optimizer_restores for pair in optimizer_restore.pair_settings()]
        )
        for slot, optimizer_restore in self._optimizer_restores.items():
            optimizer_restore.apply()
            if optimizer_restore.has_changed_states or not rounded.isdisjoint(
                map(id, optimizer_restore.loaded_groups())
            ):
                self.report.cast.add(slot)
        loaded_groups = {id(group) for restore in optimizer_restores for group in restore.loaded_groups()}
        for slot, parts in schedulers.scheduler_components(self._training.scheduler).items():
            if slot in self._scheduler_entries:
                schedulers.load_scheduler(parts, self._scheduler_entries[slot], loaded_groups)
        for name, stateful_object in (self._training.stateful or {}).items():
            if name in self._values.get("stateful", {}):
                with loading_code(stateful_object, f"object {name!r}"):
                    stateful_object.load_state_dict(self._values["stateful"][name])
        self._rank_state.apply(self._training.dataloader)

    def _apply_model(self, slot: str, view: ModelView) -> None:
        """Give a model its values, then run its own load hooks."""
        with torch.no_grad():
            for name, buffer in self._own_buffers.get(slot, {}).items():
                view.tensors[name].local.copy_(buffer)
        extra = {name: value for name, value in self._values.get(slot, {}).items() if name in view.extra}
        for name, value in extra.items():
            view.set_extra(name, value)
        others = {name: value for name, value in extra.items() if not is_extra(name)}
        for loader in view.loaders:
            if not fsdp1.uses_fsdp1(loader.module) and loader.run_hooks(self._resized_buffers.get(slot, {}) | others):
                self.report.cast.add(slot)


def list_merged(known: Mapping[str, Collection[str]]) -> list[Merged]:
    """Return, given the names that any rank knows, which stored tensors are one tensor on some rank."""
    return [msgspec.json.decode(pair, type=Merged) for pair in sorted(known.get(_MERGED, ()))]


def _without(table: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in names}


def _describe_strangers(slot: str, names: Collection[str], stored: Collection[str]) -> str:
    """Describe a model that has no tensor of the checkpoint, which ``strict=False`` hardly means."""
    here, there = (min(of_either) for of_either in (names, stored))
    return (
        f"{slot}: NOTHING is loaded: it has no tensor of the checkpoint; {here!r} is here, and {there!r} there. If "
        "only the names differ, pass edit=['rename PATTERN=NEW']"
    )


def _component_of(group: str) -> str:
    """Return the component that a group of tensors belongs to: adapters belong to the model."""
    return MODEL if is_adapter_group(group) else group


def _prefix_in(slot: str, group: str) -> str:
    """Return the prefix of a model's parameter names in an optimizer of the component ``slot``.

    For example, the parameters of ``model/critic`` begin with ``critic/`` in ``optimizer``, and have no prefix in
    ``optimizer/critic``.
    """
    is_own = group in {MODEL, MODEL + slot.removeprefix(OPTIMIZER)}
    return "" if is_own else group.removeprefix(f"{MODEL}/") + "/"


def _may_cast(stored: str, here: str) -> bool:
    """Return whether both dtypes are floating-point, so that a cast loses at most precision."""
    return {stored, here} <= FLOATING


def _with_memory(target: TensorView, materialized: Mapping[int, Tensor]) -> TensorView:
    local = materialized.get(id(target.local))
    return target if local is None else msgspec.structs.replace(target, local=local)


def _describe_alternatives(slot: str, others: Sequence[str]) -> str:
    key = others[0].partition("/")[2]
    return f"no single {slot}, but {', '.join(others)}: pass keys={{{slot!r}: {key!r}}}, or a dict of {slot}s"
