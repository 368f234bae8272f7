"""The models of a restore, matched with the checkpoint: each tensor gets its source, or is reported.

:class:`~rankless.state.restore.LoadTargets` matches the models first, on each rank, because parameters of optimizers
have the models' names. Nothing of the caller's changes before :meth:`ModelMatches.materialize`, which gives tensors on
the meta device memory, and :meth:`ModelMatches.apply`, which runs after all tensors are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankless.observe.spans import traced
from rankless.ondisk.data_files import ADAPTER_CONFIG, TensorInfo, is_adapter_group
from rankless.ondisk.dtypes import FLOATING
from rankless.state.differing_values import digest_layout, own_model_values
from rankless.state.inventory import MODEL
from rankless.state.meta_models import MetaModels
from rankless.state.model import fsdp1
from rankless.state.model import model_traversal as models
from rankless.state.model.hf_optional_tensors import optional_names
from rankless.state.model.model_view import ModelView, is_extra
from rankless.state.model.peft_adapters import check_unmerged, explain_config_differences, loadable_views
from rankless.state.rank_states import RankState
from rankless.state.repeated_objects import SavedPlace
from rankless.state.restore_context import KNOWN, RestoreContext, component_of
from rankless.state.tensor_subclasses import explain_difference, is_alike, is_description
from rankless.state.tensor_views import TensorView, shares_elements, view_of
from rankless.state.training import TrainingObjects

#: The kind of the names of the values of models, by slot, which ranks exchange.
_VALUES = "values"


class ModelMatches:
    """The models that a restore loads into, with the saved values of each. :attr:`views` are their tensors, by slot."""

    def __init__(self, context: RestoreContext, training: TrainingObjects) -> None:
        self._context, self._report = context, context.report
        self._saved: Mapping[str, Any] = {}
        self._parts = models.model_components(training.model)
        self._meta_models = MetaModels(training)
        self.views: dict[str, ModelView] = {}
        #: New buffers with the checkpoint's shapes, for modules that resize theirs, by slot and name.
        self._resized_buffers: dict[str, dict[str, Tensor]] = {}
        #: Buffers that this rank had, if they differed between ranks, by slot and name.
        self._own_buffers: dict[str, Mapping[str, Tensor]] = {}

    def match(self, saved: Mapping[str, Any]) -> None:
        """Find the source of each tensor, and report what does not match. ``saved`` are the saved values by slot."""
        self._saved = saved
        for slot, parts in self._parts.items():
            self._match_model(slot, parts)

    def use_own_values(self, state: RankState) -> set[str]:
        """Use the values that differed between the ranks that saved, and that this rank had. Return their names."""
        restored: set[str] = set()
        for slot, view in self.views.items() if digest_layout(self.views) == state.layout else ():
            own = own_model_values(slot, view, state.own)
            self._own_buffers[slot] = {name: own[name] for name in own if name in view.buffers}
            values = {name: value for name, value in own.items() if name not in view.buffers}
            self._saved = {**self._saved, slot: {**self._saved.get(slot, {}), **values}}
            restored.update(f"{slot}/{name}" for name in own)
        return restored

    def list_places(self) -> Iterator[SavedPlace]:
        """Yield each object that an extra value is loaded into, with the saved value."""
        for slot, view in self.views.items():
            saved = self._saved.get(slot, {})
            for name in sorted(view.extra.keys() & saved.keys()):
                for owner in view.owners[name]:
                    place = "extra", *owner.find_identity()
                    yield SavedPlace(place, component_of(slot), f"{slot}/{name}", saved[name])

    def list_names(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the names of values that each model has, with their kind and slot."""
        for slot, view in self.views.items():
            yield f"{_VALUES} {slot}", [*view.extra, *view.wrappers]

    def check_names(self, requested: set[tuple[str, str]], known: Mapping[str, set[str]], *, is_part: bool) -> None:
        """Report names that no rank knows, and values that are missing. See :meth:`LoadTargets.check_matches`."""
        for slot, view in self.views.items():
            known_names = known.get(f"{KNOWN} {slot}", set())
            stored = self._context.groups.get(slot, {})
            extra, known_extra = self._saved.get(slot, {}), known.get(f"{_VALUES} {slot}", set())
            unexpected = [name for name in stored if (slot, name) not in requested and name not in known_names]
            unexpected += [name for name in extra if name not in known_extra]
            for name in () if is_part else unexpected:
                self._report.add_unexpected(component_of(slot), name)
            for name in (*view.extra, *view.wrappers):
                if name not in extra:
                    self._report.add_missing(slot, name)

    def check_memory(self) -> None:
        """Report tensors on the meta device that would have no value."""
        targeted = {id(target.local) for target in self._context.tensors}
        self._report.different += self._meta_models.find_uninitialized(targeted)

    def suggest_keys(self) -> None:
        """Report which keys to pass if a checkpoint of another system has several models, not the one requested."""
        for slot in self.views:
            others = sorted(name for name in self._context.groups if name.startswith(f"{slot}/"))
            if slot not in self._context.groups and others:
                self._report.different.insert(0, _describe_alternatives(slot, others))

    def explain_adapters(self, files: Mapping[str, bytes]) -> Iterator[str]:
        """Yield how the model's PEFT adapters are configured in another way than in the checkpoint.

        ``files`` are the small files of the stored adapters.
        """
        suffix = f"/{ADAPTER_CONFIG}"
        configs = {name.removesuffix(suffix): data for name, data in files.items() if name.endswith(suffix)}
        yield from explain_config_differences(self._parts.get(MODEL, ()), configs) if configs else ()

    @traced("allocate", "apply")
    def materialize(self) -> None:
        """Give tensors on the meta device memory, and initialize those that nothing is loaded into."""
        tensors = self._context.tensors
        if materialized := self._meta_models.materialize_models({id(target.local) for target in tensors}):
            tensors.replace_memory(materialized)

    def apply(self) -> None:
        """Give the models their values, then run their own load hooks."""
        for slot, view in self.views.items():
            with torch.no_grad():
                for name, buffer in self._own_buffers.get(slot, {}).items():
                    view.tensors[name].local.copy_(buffer)
            extra = {name: value for name, value in self._saved.get(slot, {}).items() if name in view.extra}
            for name, value in extra.items():
                view.set_extra(name, value)
            others = {name: value for name, value in extra.items() if not is_extra(name)}
            for loader in view.loaders:
                if not fsdp1.uses_fsdp1(loader.module) and loader.run_hooks(
                    self._resized_buffers.get(slot, {}) | others
                ):
                    self._report.cast.add(slot)

    def _match_model(self, slot: str, parts: Sequence[object]) -> None:
        for part in parts:
            if isinstance(part, nn.Module):
                fsdp1.reshard(part)
        check_unmerged(parts)
        groups = self._context.groups
        adapter_groups = [group for group in groups if is_adapter_group(group)]
        if slot == MODEL and slot not in groups and adapter_groups:
            self._match_adapters(slot, parts, adapter_groups)
            return
        names = groups.get(slot, {}).keys() | self._context.tied.get(slot, {}).keys()
        optional = [optional_names(part) for part in parts]
        self._match_view(slot, models.build_load_view(parts, names), lambda name: any(test(name) for test in optional))

    def _match_adapters(self, slot: str, parts: Sequence[object], groups: Sequence[str]) -> None:
        """Match the PEFT adapters of a model with a checkpoint that contains only adapters."""
        model_view = models.build_view(parts)
        views = loadable_views(parts, model_view, groups)
        # The optimizer needs the model's names of parameters, and the model its load hooks.
        self.views[slot] = ModelView(refs=model_view.refs, loaders=model_view.loaders)
        if not views:
            self._report.different.append(
                "the checkpoint has only PEFT adapters, and the model here has none: pass the model that "
                "peft.get_peft_model() returns"
            )
        for group, view in views.items():
            self._match_view(group, view)
        for group in (group for group in groups if group not in views):
            for name in self._context.groups[group]:
                self._report.add_unexpected(slot, f"{group}/{name}")

    def _match_view(self, slot: str, view: ModelView, is_optional: Callable[[str], bool] = lambda _: False) -> None:
        """Match the tensors of a model or an adapter with the group ``slot``. Optional ones may be missing."""
        stored, tied = self._context.groups.get(slot, {}), self._context.tied.get(slot, {})
        self.views[slot] = view
        loaded = self._match_tensors(slot, view, is_optional)
        if view.tensors and stored and not loaded and not self._report.different:
            self._report.reasons.insert(0, (component_of(slot), _describe_strangers(slot, view.tensors, stored)))
        for name in view.left_out:
            if name not in stored:  # else it is unexpected
                self._report.add_missing(component_of(slot), name, is_optional=True)
        self._note_merged(slot, view)
        self._check_wrappers(slot, view)
        known_names = {tied.get(name, name) for name in (*view.tensors, *view.tied)}
        not_loaded = sorted(known_names & (stored.keys() - loaded))
        self._check_load_hooks(slot, view)
        self._context.inventory.names[f"{KNOWN} {slot}"] = not_loaded + sorted(self._context.joined.get(slot, ()))

    def _match_tensors(self, slot: str, view: ModelView, is_optional: Callable[[str], bool]) -> set[str]:
        """Add a target for each tensor, or report it. Return the names of the stored tensors that are loaded."""
        stored, tied = self._context.groups.get(slot, {}), self._context.tied.get(slot, {})
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
                self._report.add_missing(component_of(slot), name, is_optional=is_optional(name))
                continue
            target, info = tensor, stored[source]
            if tensor.shape != info.shape:
                target = self._resize_buffer(slot, name, tensor, info) or tensor
            if self._check_tensor(slot, name, target, info):
                self._context.tensors.add((slot, source), target)
                self._context.tensors.filled.add((slot, name))
                loaded.add(source)
        return loaded

    def _note_merged(self, slot: str, view: ModelView) -> None:
        """Note the stored tensors under names that are tied here: all but one of them are dropped if they are equal."""
        stored, tied = self._context.groups.get(slot, {}), self._context.tied.get(slot, {})
        names: dict[str, list[str]] = {}
        for alias, name in view.tied.items():
            sources = names.setdefault(name, [source for source in [tied.get(name, name)] if source in stored])
            source = tied.get(alias, alias)
            if source in stored and source not in sources:
                sources.append(source)
        for kept, *dropped in filter(None, names.values()):
            self._context.tensors.note_merged(((slot, kept), (slot, source)) for source in dropped)

    def _check_wrappers(self, slot: str, view: ModelView) -> None:
        """Report tensors that belong to another tensor subclass here than in the checkpoint, or to one on one side."""
        saved, stored = self._saved.get(slot, {}), self._context.groups.get(slot, {})
        for name, here in view.wrappers.items():
            if name in stored or not is_alike(saved.get(name, here), here):
                self._report.different.append(f"{name}: {explain_difference(saved.get(name), here)}")
        for name in view.tensors:
            if name not in stored and is_description(saved.get(name)):
                self._report.different.append(f"{name}: {explain_difference(saved[name], None)}")

    def _resize_buffer(self, slot: str, name: str, tensor: TensorView, info: TensorInfo) -> TensorView | None:
        """Return a new buffer of the checkpoint's shape, to be filled, if code of the module may resize the buffer.

        The buffer has another shape.
        """
        view = self.views[slot]
        is_plain = name in view.buffers and tensor.layout is None and not tensor.local.is_meta
        if not is_plain or not any(loader.may_resize(name) for loader in view.loaders):
            return None
        buffer = self._resized_buffers.setdefault(slot, {})[name] = tensor.local.new_empty(info.shape)
        return view_of(buffer, f"model tensor {name!r}")

    def _check_load_hooks(self, slot: str, view: ModelView) -> None:
        """Report load hooks that cannot run under FSDP1 as a difference or, if not strict, as missing."""
        for loader in view.loaders:
            problem = loader.explain_fsdp1_conflict() if fsdp1.uses_fsdp1(loader.module) else None
            if problem is not None and self._context.policy.is_strict(component_of(slot)):
                self._report.different.append(problem)
            elif problem is not None:
                self._report.add_missing(slot, f"load hooks: {problem}")

    def _check_tensor(self, slot: str, name: str, tensor: TensorView, info: TensorInfo) -> bool:
        """Return whether a stored tensor fits; if not, report it."""
        problem, may_cast = None, _may_cast(info.dtype, tensor.dtype)
        if tensor.shape != info.shape:
            problem = f"shape {list(info.shape)} in the checkpoint, {list(tensor.shape)} here"
        elif tensor.dtype != info.dtype and not (self._context.policy.cast_dtype and may_cast):
            hint = "cast_dtype=True casts" if may_cast else "no cast keeps these values"
            problem = f"dtype {info.dtype} in the checkpoint, {tensor.dtype} here ({hint})"
        elif not tensor.local.is_meta and shares_elements(tensor.local):
            problem = (
                "an expanded view here, whose elements share memory and cannot be filled: replace it by its clone()"
            )
        elif tensor.local.is_meta and not self._meta_models.can_materialize(component_of(slot)):
            problem = (
                "on the meta device here, without memory: load the model alone, before the optimizer is created; a "
                "state dict, or a model under FSDP1, needs memory first"
            )
        elif tensor.dtype != info.dtype:
            self._report.cast.add(component_of(slot))
        if problem is not None:
            self._report.different.append(f"{name}: {problem}")
        return problem is None


def _describe_strangers(slot: str, names: Collection[str], stored: Collection[str]) -> str:
    """Describe a model that has no tensor of the checkpoint, which ``strict=False`` hardly means."""
    here, there = (min(of_either) for of_either in (names, stored))
    return (
        f"{slot}: NOTHING is loaded: it has no tensor of the checkpoint; {here!r} is here, and {there!r} there. If "
        "only the names differ, pass edit=['rename PATTERN=NEW']"
    )


def _may_cast(stored: str, here: str) -> bool:
    """Return whether both dtypes are floating-point, so that a cast loses at most precision."""
    return {stored, here} <= FLOATING


def _describe_alternatives(slot: str, others: Sequence[str]) -> str:
    key = others[0].partition("/")[2]
    return f"no single {slot}, but {', '.join(others)}: pass keys={{{slot!r}: {key!r}}}, or a dict of {slot}s"
