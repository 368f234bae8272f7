"""Everything that one load puts into this rank's training objects: matched and allocated first, applied last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from torch import Tensor, nn

from holdfast.engine.plan.spec import OWN, PER_RANK
from holdfast.errors import MismatchError, OptimizerMismatchError
from holdfast.ondisk.dtypes import FLOATING
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.param_order import BY_NUMBER
from holdfast.state import scheduler as schedulers
from holdfast.state import stateful
from holdfast.state.arrays import ArrayDecoder
from holdfast.state.capture import STATE, Inventory
from holdfast.state.meta_models import MetaModels
from holdfast.state.model import fsdp1
from holdfast.state.model import traversal as models
from holdfast.state.model.view import ModelView, is_extra
from holdfast.state.optimizer import adapters
from holdfast.state.optimizer import view as optimizers
from holdfast.state.optimizer.param_groups import MatchLeeway
from holdfast.state.optimizer.param_index import check_order, has_names, match_by_number, match_by_position
from holdfast.state.optimizer.restore import OptimizerRestore, put_settings
from holdfast.state.per_rank import LOADER, PER_RANK_CONTENT, RNG, RankState
from holdfast.state.split_parameters import split_refs, stored_names
from holdfast.state.tensors import TensorView, shares_elements, view_of
from holdfast.state.training import TrainingObjects

#: ``{group: {name: dtype and shape}}``.
Groups = Mapping[str, Mapping[str, TensorInfo]]

#: What ranks tell each other beside the tensors they want, by slot: values of models, parameters of optimizers, and
#: stored tensors that a model has but cannot take in.
_VALUES, _TRAINED, _KNOWN = "values", "trained", "known"

_SHOWN = 20

#: The kinds of parts that a checkpoint may lack.
COMPONENTS = ("model", "optimizer", "scheduler", "stateful", "dataloader", "rng", "per_rank_content")


@dataclass(frozen=True, slots=True)
class RestorePolicy:
    """What must match: names if ``strict``, dtypes unless ``cast_dtype``; and whether ``rng`` is put back.

    ``per_rank_content``: whether each rank is to get back what it had of its own. ``allow_missing`` are the kinds of parts,
    of :data:`COMPONENTS`, that may be missing, wholly or partly, however strict.
    """

    strict: bool
    cast_dtype: bool
    rng: bool
    per_rank_content: bool = False
    allow_missing: frozenset[str] = frozenset()

    def may_lack(self, part: str) -> bool:
        """Whether something of a part, such as ``"model"`` or ``"model/generator"``, may be missing."""
        return not self.strict or part.partition("/")[0] in self.allow_missing


@dataclass
class MismatchReport:
    """What did not match: names on one side only, and what is of another shape or dtype.

    ``reasons`` are the part of each thing that was asked for and is missing, and why, in words. ``incomplete`` are the
    parts (``"model"``, …) that have such names, ``cast`` those with tensors of another dtype.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)
    incomplete: set[str] = field(default_factory=set)
    cast: set[str] = field(default_factory=set)

    def lack(self, part: str, name: str, reason: str = "") -> None:
        """Something of a part is not in the checkpoint, or cannot be given back for a ``reason``."""
        self.missing.append(name)
        self.reasons.append((part, f"{name}: {reason}" if reason else f"missing in the checkpoint: {name}"))
        self.incomplete.add(part)

    def exceed(self, part: str, name: str) -> None:
        """Something of a part is only in the checkpoint."""
        self.unexpected.append(name)
        self.incomplete.add(part)

    def refused(self, policy: RestorePolicy) -> list[str]:
        """The parts that lack something, and may not."""
        parts = (part for part, _ in self.reasons if not policy.may_lack(part))
        return list(dict.fromkeys(part.partition("/")[0] for part in parts))

    def tolerated(self, policy: RestorePolicy) -> list[str]:
        """What was asked for and is missing where it may be, in words: as much of it as is told."""
        return [reason for part, reason in self.reasons if policy.may_lack(part)][: _SHOWN + 1]

    def check(self, policy: RestorePolicy, source: str) -> None:
        """Raise ``MismatchError`` that names everything at once."""
        refused = self.refused(policy)
        lines = self.different + [reason for part, reason in self.reasons if not policy.may_lack(part)]
        if policy.strict:
            lines += [f"only in the checkpoint: {name}" for name in self.unexpected]
        if lines:
            advice = "" if self.different or not policy.strict else f"\nPass {_ways_out(refused, self.unexpected)}."
            raise MismatchError(
                f"{source} does not match what it is loaded into; nothing was changed:\n{format_names(lines)}{advice}"
            )


def _ways_out(refused: Sequence[str], unexpected: Sequence[str]) -> str:
    """The arguments that let the rest be loaded; the narrow one if no names of tensors are concerned."""
    strict = "strict=False to load what matches"
    if unexpected or {*refused} & {"model", "optimizer"}:
        return strict
    return f"allow_missing={tuple(refused)!r} to load the rest without, or {strict}"


def format_names(lines: Sequence[str]) -> str:
    """The first of some lines, and how many more there are."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *more])


class LoadTargets:
    """One load, before any byte of tensor data is read.

    :attr:`targets` are the tensors to fill, live or just allocated, by group and stored name; :attr:`more` are further
    ones for the same stored tensors; :attr:`filled` are the names here of those of models and optimizers, by slot.
    :attr:`inventory` is what this rank wants, to be told to the others.
    """

    def __init__(
        self,
        training: TrainingObjects,
        groups: Groups,
        tied: Mapping[str, Mapping[str, str]],
        policy: RestorePolicy,
        joined: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """``joined`` are stored tensors, by group, that are seen as parts of others here, and maybe only here."""
        self._training, self._groups, self._tied, self._policy = training, groups, tied, policy
        self._joined = joined
        self.shared = ArrayDecoder(groups.get(STATE, {}))
        self.targets: dict[tuple[str, str], TensorView] = {}
        self.more: list[tuple[tuple[str, str], TensorView]] = []
        self.filled: set[tuple[str, str]] = set()
        self._lazy = MetaModels(training)
        self.findings = MismatchReport()
        #: What the parameters of each optimizer were found by: ``"model"``, ``"names"`` or ``"places"``.
        self.named_by: dict[str, str] = {}
        self.inventory = Inventory()
        self._views: dict[str, ModelView] = {}
        self._restorations: dict[str, OptimizerRestore] = {}
        #: What buffers are to become that their modules resize, by slot and name.
        self._made: dict[str, dict[str, Tensor]] = {}
        self._values: Mapping[str, Any] = {}
        self._own = RankState()

    def match(self, shared: Mapping[str, Any], own: RankState, own_arrays: ArrayDecoder) -> None:
        """Find a target for everything asked for. Raises ``OptimizerMismatchError``."""
        self._values, self._own = shared, own
        for slot, parts in models.model_components(self._training.model).items():
            self._match_model(slot, parts)
        for slot, parts in adapters.optimizer_components(self._training.optimizer).items():
            self._match_optimizer(slot, parts)
        for slot, parts in schedulers.scheduler_components(self._training.scheduler).items():
            if slot in shared:
                self.findings.different += schedulers.compare_schedulers(parts, shared[slot])
            else:
                self.findings.lack(slot, slot)
        self._match_stateful()
        self._match_own()
        for group, arrays in ((STATE, self.shared), (PER_RANK, own_arrays)):
            for name, tensor in arrays.tensors.items():
                self._aim((group, name), view_of(tensor, f"{group} tensor {name!r}"))

    def _match_stateful(self) -> None:
        """Objects by name."""
        saved = self._values.get("stateful", {})
        wanted = () if self._training.stateful is None else stateful.check_stateful(self._training.stateful)
        for name in wanted:
            if name not in saved:
                self.findings.lack("stateful", f"stateful object {name!r}")

    def _match_own(self) -> None:
        """What belongs to this rank alone."""
        own, training, findings = self._own, self._training, self.findings
        if training.dataloader is not None and not own.loader:
            findings.lack(LOADER, LOADER, own.lost.get(LOADER, ""))
        check = getattr(training.dataloader, "check_states", None)
        if own.loader and callable(check):
            try:
                check(own.loader)
            except MismatchError as error:
                findings.different.append(str(error))
        if self._policy.rng and not own.has_generators():
            findings.lack(RNG, RNG)
        if PER_RANK_CONTENT in own.lost and self._policy.per_rank_content:
            findings.lack(PER_RANK_CONTENT, PER_RANK_CONTENT, own.lost[PER_RANK_CONTENT])
        elif PER_RANK_CONTENT in own.lost:
            findings.missing.append(PER_RANK_CONTENT)

    def take_stock(self, rank: int) -> None:
        """Note in :attr:`inventory` what this rank wants, and knows the names of."""
        for (group, name), tensor in self.targets.items():
            mine = group == PER_RANK and not self._own.split and name.startswith(f"{rank}/")
            known = (OWN, name.removeprefix(f"{rank}/")) if mine else (group, name)
            self.inventory.add(*known, tensor, dtype=self._groups[group][name].dtype)
        for slot, view in self._views.items():
            self.inventory.names[f"{_VALUES} {slot}"] = list(view.extra)

    def check(self, wanted: set[tuple[str, str]], known: Mapping[str, set[str]], source: str) -> None:
        """Look at the whole, when it is known what all ranks want: raise ``MismatchError`` with all that does not fit.

        ``wanted`` are the stored tensors that any rank wants, ``known`` the other names that any rank knows.
        """
        for slot, view in self._views.items():
            also = known.get(f"{_KNOWN} {slot}", set())
            stored = self._groups.get(slot, {})
            extra, known_extra = self._values.get(slot, {}), known.get(f"{_VALUES} {slot}", set())
            beyond = [name for name in stored if (slot, name) not in wanted and name not in also]
            for name in (*beyond, *(name for name in extra if name not in known_extra)):
                self.findings.exceed(slot, name)
            for name in view.extra:
                if name not in extra:
                    self.findings.lack(slot, name)
        for slot, restoration in self._restorations.items():
            with self._mismatch_noted():
                for name in restoration.check_trained(known.get(f"{_TRAINED} {slot}", set())):
                    self.findings.exceed(slot, f"{slot}/{name}")
        self.findings.different += self._lazy.problems({id(target.local) for target in self._every_target()})
        self._hint()
        self.findings.check(self._policy, source)

    @property
    def user_content(self) -> Any:
        """What the user saved for all ranks."""
        return self._values.get("user_content")

    @property
    def per_rank_content(self) -> Any:
        """What the user saved for this rank."""
        return self._own.content

    def outcome(self) -> tuple[list[str], list[str]]:
        """The parts that are, once all is applied, what was saved; and those made from it that are not the same."""
        own, findings = self._own, self.findings
        loaded = [part for part in self._training.given() if part != LOADER and part not in findings.incomplete]
        exact = [part for part in loaded if part not in findings.cast]
        reconstructed = [part for part in loaded if part in findings.cast]
        if own.has_generators():
            (reconstructed if own.seeds else exact).append(RNG)
        if own.loader:
            (reconstructed if own.split else exact).append(LOADER)
        exact += ["user_content"] if "user_content" in self._values else []
        exact += [PER_RANK_CONTENT] if own.content is not None else []
        return exact, reconstructed

    def _hint(self) -> None:
        """Where a checkpoint of another system has several of what was asked for, say which."""
        for slot in self._views:
            others = sorted(name for name in self._groups if name.startswith(f"{slot}/"))
            if slot not in self._groups and others:
                self.findings.different.insert(0, _several(slot, others))

    @contextmanager
    def _mismatch_noted(self) -> Iterator[None]:
        """What is wrong with an optimizer is told with the model's differences, which are its cause, if there are."""
        try:
            yield
        except OptimizerMismatchError as error:
            if not self._is_mismatched():
                raise
            self.findings.different.append(str(error))

    def _is_mismatched(self) -> bool:
        unexpected = self._policy.strict and self.findings.unexpected
        return bool(self.findings.different or unexpected or self.findings.refused(self._policy))

    def _match_model(self, slot: str, parts: Sequence[object]) -> None:
        for part in parts:
            if isinstance(part, nn.Module):
                fsdp1.reshard(part)
        stored, tied = self._groups.get(slot, {}), self._tied.get(slot, {})
        view = self._views[slot] = models.build_load_view(parts, stored.keys() | tied.keys())
        aliases: dict[str, list[str]] = {}
        for alias, name in view.tied.items():
            aliases.setdefault(name, []).append(alias)
        for name, tensor in [*view.tensors.items(), *view.twins]:
            source: str | None = tied.get(name, name)
            if source not in stored:
                known = (tied.get(one, one) for one in aliases.get(name, ()))
                source = next((one for one in known if one in stored), None)
            if source is None:
                self.findings.lack(slot, name)
                continue
            target = self._resized(slot, name, tensor, stored[source]) or tensor
            if self._fits(slot, name, target, stored[source]):
                self._aim((slot, source), target)
                self.filled.add((slot, name))
        known_names = {tied.get(name, name) for name in (*view.tensors, *view.tied)} & stored.keys()
        refused = sorted(name for name in known_names if (slot, name) not in self.targets)
        self._check_flattened(slot, view)
        self.inventory.names[f"{_KNOWN} {slot}"] = refused + sorted(self._joined.get(slot, ()))

    def _resized(self, slot: str, name: str, tensor: TensorView, info: TensorInfo) -> TensorView | None:
        """What a buffer of another shape becomes that code of its module may give the checkpoint's; to be filled."""
        view = self._views[slot]
        is_plain = name in view.buffers and tensor.layout is None and not tensor.local.is_meta
        if tensor.shape == info.shape or not is_plain or not any(one.may_resize(name) for one in view.loaders):
            return None
        made = self._made.setdefault(slot, {})[name] = tensor.local.new_empty(info.shape)
        return view_of(made, f"model tensor {name!r}")

    def _check_flattened(self, slot: str, view: ModelView) -> None:
        """Load hooks that cannot be run are a difference, or make the model incomplete."""
        for loader in view.loaders:
            problem = loader.flattened() if fsdp1.wrapped_modules(loader.module) else None
            if problem is not None and self._policy.strict:
                self.findings.different.append(problem)
            elif problem is not None:
                self.findings.lack(slot, f"load hooks: {problem}")

    def _aim(self, source: tuple[str, str], tensor: TensorView) -> None:
        """Several targets have one source where weights are tied in the checkpoint and separate here."""
        if self.targets.setdefault(source, tensor) is not tensor:
            self.more.append((source, tensor))

    def _fits(self, slot: str, name: str, tensor: TensorView, info: TensorInfo) -> bool:
        if tensor.shape != info.shape:
            self.findings.different.append(
                f"{name}: shape {list(info.shape)} in the checkpoint, {list(tensor.shape)} here"
            )
        elif tensor.dtype != info.dtype and not (self._policy.cast_dtype and _may_cast(info.dtype, tensor.dtype)):
            hint = "cast_dtype=True casts" if _may_cast(info.dtype, tensor.dtype) else "no cast keeps these values"
            self.findings.different.append(
                f"{name}: dtype {info.dtype} in the checkpoint, {tensor.dtype} here ({hint})"
            )
        elif not tensor.local.is_meta and shares_elements(tensor.local):
            self.findings.different.append(
                f"{name}: an expanded view here, whose elements share memory and cannot be filled: replace it by its "
                "clone()"
            )
        elif tensor.local.is_meta and not self._lazy.may(slot):
            self.findings.different.append(
                f"{name}: on the meta device here, without memory: load the model by itself, before the optimizer is "
                "made; a state dict, or a model of FSDP1, needs memory first"
            )
        else:
            self.findings.cast |= {slot} if tensor.dtype != info.dtype else set()
            return True
        return False

    def _every_target(self) -> Iterator[TensorView]:
        yield from self.targets.values()
        yield from (target for _, target in self.more)

    def materialise(self) -> None:
        """Give tensors on the meta device memory, and initialise those that nothing is loaded into."""
        made = self._lazy.materialise({id(target.local) for target in self._every_target()})
        if made:
            self.targets = {key: _with_memory(target, made) for key, target in self.targets.items()}
            self.more = [(key, _with_memory(target, made)) for key, target in self.more]

    def _match_optimizer(self, slot: str, parts: Sequence[object]) -> None:
        if slot not in self._values:
            self.findings.lack(slot, slot)
            return
        handles = optimizers.refs_for(slot, self._views or self._named(slot))
        groups = optimizers.view_groups(parts, handles)
        self.named_by[slot] = "model" if handles is not None else "names" if has_names(groups) else "places"
        if self._values[slot].get(BY_NUMBER):
            groups = match_by_number(groups, self._values[slot]["groups"])
            check_order(groups, self._groups.get(slot, {}))
            self.named_by[slot] = "places"
        elif self.named_by[slot] == "places":
            groups = match_by_position(groups, self._values[slot]["groups"])
            check_order(groups, self._groups.get(slot, {}))
        stored = {name for handle in split_refs(groups).values() for name in stored_names(handle)}
        self.inventory.names[f"{_TRAINED} {slot}"] = sorted(stored.union(optimizers.parameter_names(groups)))
        with self._mismatch_noted():
            infos = {} if self._is_mismatched() else self._groups.get(slot, {})
            by_name = self.named_by[slot] != "places"
            leeway = MatchLeeway(is_partial=by_name and self._policy.may_lack(slot), by_name=by_name)
            restoration = self._restorations[slot] = OptimizerRestore(
                groups, self._values[slot]["groups"], infos, leeway
            )
            for name in restoration.missing:
                self.findings.lack(slot, f"{slot}/{name}")
            for number in restoration.regrouped:
                self.findings.lack(slot, f"{slot}: settings of group {number}")
            for name, tensor in restoration.targets.items():
                self._aim((slot, name), tensor)
                self.filled.add((slot, name))

    def _named(self, slot: str) -> dict[str, ModelView]:
        """The models that only tell names, by slot."""
        stored = {name for group in self._values[slot]["groups"] for name in group["params"]}
        every = models.model_components(self._training.named_by).items()
        return {name: models.build_load_view(parts, stored) for name, parts in every}

    def apply(self) -> None:
        """Put the values in place, once all tensors are filled."""
        for slot, view in self._views.items():
            self._apply_model(slot, view)
        restorations = self._restorations.values()
        put_settings([pair for restoration in restorations for pair in restoration.settings()])
        for restoration in restorations:
            restoration.apply()
        for slot, parts in schedulers.scheduler_components(self._training.scheduler).items():
            if slot in self._values:
                schedulers.load_scheduler(parts, self._values[slot])
        for name, one in (self._training.stateful or {}).items():
            if name in self._values.get("stateful", {}):
                one.load_state_dict(self._values["stateful"][name])
        self._own.apply(self._training.dataloader)

    def _apply_model(self, slot: str, view: ModelView) -> None:
        """Give a model its values, then let it do what it does itself when it is loaded."""
        extra = {name: value for name, value in self._values.get(slot, {}).items() if name in view.extra}
        for name, value in extra.items():
            view.put_extra(name, value)
        others = {name: value for name, value in extra.items() if not is_extra(name)}
        for loader in view.loaders:
            if not fsdp1.wrapped_modules(loader.module):
                loader.run(self._made.get(slot, {}) | others)


def _may_cast(stored: str, here: str) -> bool:
    """Whether a cast loses precision at most: neither signs, nor parts of numbers, nor what is not finite."""
    return {stored, here} <= FLOATING


def _with_memory(target: TensorView, made: Mapping[int, Tensor]) -> TensorView:
    local = made.get(id(target.local))
    return target if local is None else msgspec.structs.replace(target, local=local)


def _several(slot: str, others: Sequence[str]) -> str:
    key = others[0].partition("/")[2]
    return f"no {slot} as such, but {', '.join(others)}: pass keys={{{slot!r}: {key!r}}}, or a dict of {slot}s"
