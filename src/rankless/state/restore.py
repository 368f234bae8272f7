"""A restore of training objects on this rank: everything is matched and allocated first, and applied last.

:mod:`rankless.load.load_operation` and :mod:`rankless.live_copy.copy_targets` have one :class:`LoadTargets` on each
rank, in the thread of the caller. The order must stay: match (vote "reading the metadata"), check (vote "matching …"),
then give memory and fill (vote "reading"), then :meth:`LoadTargets.apply` (vote "putting values in place"). Nothing of
the caller's may change before the fill.

:mod:`rankless.state.model_matches` matches the models, :mod:`rankless.state.optimizer_matches` the optimizers; this
module matches everything else. They share a :class:`~rankless.state.restore_context.RestoreContext`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from rankless.engine.plan.tensor_specs import OWN, PER_RANK, STATE
from rankless.errors import MismatchError
from rankless.observe.spans import traced
from rankless.ondisk.data_files import TensorInfo
from rankless.state import scheduler as schedulers
from rankless.state import user_objects
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.differing_values import components_of, replace_shared
from rankless.state.inventory import MODEL, OPTIMIZER
from rankless.state.mismatches import RestorePolicy
from rankless.state.model import model_traversal as models
from rankless.state.model.model_view import ModelView
from rankless.state.model_matches import ModelMatches
from rankless.state.optimizer import adapters
from rankless.state.optimizer import optimizer_view as optimizers
from rankless.state.optimizer_matches import OptimizerMatches
from rankless.state.rank_states import LOADER, PER_RANK_CONTENT, RNG, RankState
from rankless.state.repeated_objects import SavedPlace, find_repetitions
from rankless.state.restore_context import RestoreContext, Source, component_of
from rankless.state.schedulers_by_params import find_entries, scheduled_params
from rankless.state.tensor_views import view_of
from rankless.state.training import TrainingObjects
from rankless.state.user_objects import loading_code

#: ``{group: {name: dtype and shape}}``.
Groups = Mapping[str, Mapping[str, TensorInfo]]

#: The component of the content that the user saved for all ranks.
CONTENT = "user_content"


class LoadTargets:
    """The targets of one load on this rank, before any byte of tensor data is read.

    :attr:`tensors` are the tensors to fill. :attr:`inventory` has the tensors that this rank requests, to be sent to
    the other ranks. :attr:`matched_by` says how the parameters of each optimizer were matched.
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
        self._training, self._policy = training, policy
        self._context = context = RestoreContext(groups, tied, joined, policy)
        self.tensors, self.report, self.inventory = context.tensors, context.report, context.inventory
        self.shared = ArrayDecoder(groups.get(STATE, {}))
        self._models = ModelMatches(context, training)
        self._optimizers = OptimizerMatches(context, self.shared)
        self.matched_by: Mapping[str, str] = self._optimizers.matched_by
        self._values: Mapping[str, Any] = {}
        self._rank_state = RankState()
        #: The saved states of schedulers, by slot.
        self._scheduler_entries: dict[str, Any] = {}

    def match_targets(self, shared: Mapping[str, Any], rank_state: RankState, rank_arrays: ArrayDecoder) -> None:
        """Find a target for everything requested. Raises ``OptimizerMismatchError``.

        Each rank calls it in the vote "reading the metadata".
        """
        self._values, self._rank_state = replace_shared(shared, rank_state.own), rank_state
        self._models.match(self._values)
        self._match_differing()
        optimizer_parts = adapters.optimizer_components(self._training.optimizer)
        for slot, parts in optimizer_parts.items():
            self._match_optimizer(slot, parts)
        for slot, parts in schedulers.scheduler_components(self._training.scheduler).items():
            if slot in shared:
                self._match_schedulers(slot, parts)
            else:
                self.report.add_missing(slot, slot)
        self._match_stateful()
        self._compare_repeated()
        if any(isinstance(value, Tensor) for live in self._optimizers.settings() for value in live.values()):
            self._optimizers.note_shared_settings()
        self._match_rank_state()
        for group, arrays in ((STATE, self.shared), (PER_RANK, rank_arrays)):
            for name, tensor in arrays.tensors.items():
                self.tensors.add((group, name), view_of(tensor, f"{group} tensor {name!r}"))
        # Memory may be shared in part: then one value may replace a part of the other.
        self.report.cast |= set(map(component_of, self.tensors.find_shared()))

    def _match_differing(self) -> None:
        """Find the values that differed between the ranks that saved, and that this rank had."""
        state = self._rank_state
        restored = {name for name in state.own if not name.startswith((MODEL, OPTIMIZER))}
        restored |= self._models.use_own_values(state)
        for component, name in components_of(self._training, state.differing - restored):
            self.report.add_differing(component, name)

    def _match_optimizer(self, slot: str, parts: Sequence[object]) -> None:
        saved = self._values.get(slot)
        if saved is None:
            self.report.add_missing(slot, slot)
            return
        names = {name for group in saved["groups"] for name in group["params"]}
        self._optimizers.match(slot, parts, saved, self._models.views or self._view_models(names))

    def _match_schedulers(self, slot: str, parts: Sequence[Any]) -> None:
        """Find the saved state of each scheduler: the state of its stage, if stages had different ones."""
        refs = optimizers.refs_for(OPTIMIZER, self._models.views or self._view_models()) or {}
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

    def _view_models(self, stored: Collection[str] = ()) -> dict[str, ModelView]:
        """Return views of the models that only provide parameter names. The checkpoint has the names in ``stored``."""
        components = models.model_components(self._training.naming_model).items()
        return {name: models.build_load_view(parts, set(stored)) for name, parts in components}

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
            except MismatchError as error:  # a load that may leave the position out begins the data anew
                report.add_missing(LOADER, LOADER, str(error))
                state.loader = ()
        if self._policy.rng and not state.has_generators():
            report.add_missing(RNG, RNG)
        if PER_RANK_CONTENT in state.lost and self._policy.per_rank_content:
            report.add_missing(PER_RANK_CONTENT, PER_RANK_CONTENT, state.lost[PER_RANK_CONTENT])
        elif PER_RANK_CONTENT in state.lost:
            report.missing.append(PER_RANK_CONTENT)

    def _compare_repeated(self) -> None:
        """Compare the saved values that one object gets here, if there may be such an object."""
        components = [
            models.model_components(self._training.model),
            adapters.optimizer_components(self._training.optimizer),
            schedulers.scheduler_components(self._training.scheduler),
        ]
        single: list[object] = [part for slots in components for parts in slots.values() for part in parts]
        single += [*(self._training.stateful or {}).values(), *self._optimizers.settings()]
        has_extra = any(view.extra for view in self._models.views.values())
        if len(set(map(id, single))) == len(single) and not has_extra:
            return
        for repetition in find_repetitions([*self._list_places()], self.shared.tensors):
            first, second, tensors = repetition
            names = {first.component, second.component}
            if not repetition.is_comparable() or not all(map(self._policy.is_strict, names)):
                self.report.cast |= set() if tensors == [] else names
            elif tensors is None:
                self.report.different.append(
                    f"{second.subject}: the same object as {first.subject} here, and another state in the checkpoint: "
                    "only one of them can be loaded; pass separate objects"
                )
            else:
                self.tensors.note_merged(((*one,), (*other,)) for one, other in tensors)

    def _list_places(self) -> Iterator[SavedPlace]:
        """Yield each object that a value is loaded into, with the saved value."""
        yield from self._models.list_places()
        yield from self._optimizers.list_places()
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
        for (group, name), tensor in self.tensors.by_source.items():
            is_own = group == PER_RANK and not self._rank_state.split and name.startswith(f"{rank}/")
            key = (OWN, name.removeprefix(f"{rank}/")) if is_own else (group, name)
            self.inventory.add_tensor(*key, tensor, dtype=self._context.groups[group][name].dtype)
        self.inventory.names.update(self._models.list_names())
        self.inventory.names.update(self.tensors.list_names())

    def check_matches(
        self,
        requested: set[Source],
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
        self._models.check_names(requested, known, is_part=is_part)
        if not is_part:
            self._optimizers.check_trained(known)
        self._models.check_memory()
        self._models.suggest_keys()
        self.report.raise_if_any(self._policy, source, advice)

    def add_dropped(self, kept: Source, dropped: Source, there: str = "another one in the checkpoint") -> None:
        """Report a stored tensor that is dropped although it is not known to equal the one that is loaded.

        ``there`` says how it differs in the checkpoint.
        """
        self._context.add_dropped(kept, dropped, there)

    def explain_adapters(self, files: Mapping[str, bytes]) -> Iterator[str]:
        """Yield how the model's PEFT adapters are configured in another way than in the checkpoint.

        ``files`` are the small files of the stored adapters.
        """
        yield from self._models.explain_adapters(files)

    def materialize_models(self) -> None:
        """Give tensors on the meta device memory, and initialize those that nothing is loaded into."""
        self._models.materialize()

    def count_changes(self) -> None:
        """Make torch count a change of each tensor that is filled: their bytes are not written through torch.

        A load calls it in the vote "reading", right before the reads.
        """
        targets = self.tensors.by_source.values()
        increment_version([target.local for target in targets if not target.local.is_inference()])

    @traced("apply", "apply")
    def apply(self) -> None:
        """Put the values in place, once all tensors are filled.

        Each rank calls it in the vote "putting values in place", where errors of user code become common.
        """
        for target in self.tensors:
            if target.packed is not None:
                target.packed.unpack(target.local)
        self._models.apply()
        self._optimizers.apply()
        loaded_groups = set(map(id, self._optimizers.loaded_groups()))
        for slot, parts in schedulers.scheduler_components(self._training.scheduler).items():
            if slot in self._scheduler_entries:
                schedulers.load_scheduler(parts, self._scheduler_entries[slot], loaded_groups)
        for name, stateful_object in (self._training.stateful or {}).items():
            if name in self._values.get("stateful", {}):
                with loading_code(stateful_object, f"object {name!r}"):
                    stateful_object.load_state_dict(self._values["stateful"][name])
        self._rank_state.apply(self._training.dataloader)

    @property
    def user_content(self) -> Any:
        """The content that the user saved for all ranks."""
        return self._values.get(CONTENT)

    @property
    def per_rank_content(self) -> Any:
        """The content that the user saved for this rank."""
        return self._rank_state.content

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
        stored = [group for group in self._context.groups if group == MODEL or group.startswith(f"{MODEL}/")]
        stored += [slot for slot in self._values if slot.partition("/")[0] in {OPTIMIZER, "scheduler"}]
        stateful = {f"stateful/{name}" for name in self._values.get("stateful", {})}
        stored += sorted(stateful.union(name for name in self._rank_state.differing if name.startswith("stateful/")))
        requested = {*self._training.component_names(), *self._training.stateful_names()}
        return [name for name in stored if name not in requested]
