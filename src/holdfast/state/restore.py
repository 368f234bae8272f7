"""Everything that one load puts into this rank's training objects: matched and allocated first, applied last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from holdfast.engine.spec import PER_RANK
from holdfast.errors import DamagedError, MismatchError, OptimizerMismatchError
from holdfast.layout.files import TensorInfo
from holdfast.state import fsdp1, rng, sources, stateful
from holdfast.state import model as models
from holdfast.state import optimizer as optimizers
from holdfast.state import scheduler as schedulers
from holdfast.state.arrays import ArraysIn
from holdfast.state.capture import STATE, Inventory, Training
from holdfast.state.named import ModelView
from holdfast.state.restoration import Restoration
from holdfast.state.tensors import Described, describe

#: ``{group: {name: dtype and shape}}``.
Groups = Mapping[str, Mapping[str, TensorInfo]]

#: What ranks tell each other beside the tensors they want, by slot: values of models, parameters of optimizers, and
#: stored tensors that a model has but cannot take in.
_VALUES, _TRAINED, _KNOWN = "values", "trained", "known"

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Policy:
    """What must match: names if ``strict``, dtypes unless ``map_dtype``; and whether ``rng`` is put back."""

    strict: bool
    map_dtype: bool
    rng: bool


@dataclass
class Findings:
    """What did not match: names on one side only, and what is of another shape or dtype."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def check(self, policy: Policy, source: str) -> None:
        """Raise ``MismatchError`` that names everything at once."""
        lines = [f"  {text}" for text in self.different]
        if policy.strict:
            lines += [f"  missing in the checkpoint: {name}" for name in self.missing]
            lines += [f"  only in the checkpoint: {name}" for name in self.unexpected]
        if lines:
            more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            hint = "\nPass strict=False to load what matches." if policy.strict and not self.different else ""
            raise MismatchError(
                f"{source} does not match what it is loaded into; nothing was changed:\n"
                + "\n".join(lines[:_SHOWN])
                + more
                + hint
            )


class Intake:
    """One load, before any byte of tensor data is read.

    :attr:`targets` are the tensors to fill, live or just allocated, by group and stored name; :attr:`more` are further
    ones for the same stored tensors. :attr:`inventory` is what this rank wants, to be told to the others.
    """

    def __init__(
        self, training: Training, groups: Groups, tied: Mapping[str, Mapping[str, str]], policy: Policy
    ) -> None:
        self._training, self._groups, self._tied, self._policy = training, groups, tied, policy
        self.shared, self.own = ArraysIn(groups.get(STATE, {})), ArraysIn(groups.get(PER_RANK, {}))
        self.targets: dict[tuple[str, str], Described] = {}
        self.more: list[tuple[tuple[str, str], Described]] = []
        self.findings = Findings()
        self.inventory = Inventory()
        self._views: dict[str, ModelView] = {}
        self._restorations: dict[str, Restoration] = {}
        self._values: Mapping[str, Any] = {}
        self._rng: Mapping[str, Any] | None = None
        self._own: Mapping[str, Any] | None = None

    def match(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, source: str) -> None:
        """Find a target for everything asked for. Raises ``OptimizerMismatchError`` or ``DamagedError``."""
        self._values = shared
        for slot, parts in models.slots(self._training.model).items():
            self._match_model(slot, parts)
        for slot, parts in sources.slots(self._training.optimizer).items():
            self._match_optimizer(slot, parts)
        for slot, parts in schedulers.slots(self._training.scheduler).items():
            if slot in shared:
                self.findings.different += schedulers.differences(parts, shared[slot])
            else:
                self.findings.missing.append(slot)
        if self._policy.rng:
            self._rng = None if own is None else own.get("rng")
            if self._rng is not None:
                _check_rng(self._rng, source)
        self._match_stateful(own)
        for group, arrays in ((STATE, self.shared), (PER_RANK, self.own)):
            for name, tensor in arrays.tensors.items():
                self._aim((group, name), describe(tensor, f"{group} tensor {name!r}"))

    def _match_stateful(self, own: Mapping[str, Any] | None) -> None:
        """Objects by name; and the data loader, whose state is kept for as many ranks as saved it."""
        saved = self._values.get("stateful", {})
        wanted = () if self._training.stateful is None else stateful.check(self._training.stateful)
        self.findings.missing += [f"stateful object {name!r}" for name in wanted if name not in saved]
        if self._training.dataloader is not None:
            stateful.check_one(self._training.dataloader, "the data loader")
            self._own = own
            if own is not None and "dataloader" not in own:
                self.findings.missing.append("dataloader")

    def take_stock(self, rank: int) -> None:
        """Note in :attr:`inventory` what this rank wants, and knows the names of."""
        for (group, name), tensor in self.targets.items():
            known = name.removeprefix(f"{rank}/") if group == PER_RANK else name
            self.inventory.add(group, known, tensor, dtype=self._groups[group][name].dtype)
        for slot, view in self._views.items():
            self.inventory.names[f"{_VALUES} {slot}"] = list(view.extra)

    def check(self, wanted: set[tuple[str, str]], known: Mapping[str, set[str]], source: str) -> None:
        """Look at the whole, when it is known what all ranks want: raise ``MismatchError`` with all that does not fit.

        ``wanted`` are the stored tensors that any rank wants, ``known`` the other names that any rank knows.
        """
        for slot, view in self._views.items():
            also = known.get(f"{_KNOWN} {slot}", set())
            stored = self._groups.get(slot, {})
            self.findings.unexpected += [name for name in stored if (slot, name) not in wanted and name not in also]
            extra = self._values.get(slot, {})
            self.findings.missing += [name for name in view.extra if name not in extra]
            self.findings.unexpected += [name for name in extra if name not in known.get(f"{_VALUES} {slot}", set())]
        for slot, restoration in self._restorations.items():
            with self._mismatch_noted():
                restoration.check_trained(known.get(f"{_TRAINED} {slot}", set()))
        self.findings.check(self._policy, source)
        if self._policy.rng and self._rng is None:
            self.findings.missing.append("rng")
        if self._training.dataloader is not None and self._own is None:
            self.findings.missing.append("dataloader")

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
        names = [*self.findings.missing, *self.findings.unexpected] if self._policy.strict else []
        return bool(self.findings.different or names)

    def _match_model(self, slot: str, parts: Sequence[object]) -> None:
        for part in parts:
            if isinstance(part, nn.Module):
                fsdp1.reshard(part)
        view = self._views[slot] = models.view(parts)
        stored, tied = self._groups.get(slot, {}), self._tied.get(slot, {})
        aliases: dict[str, list[str]] = {}
        for alias, name in view.tied.items():
            aliases.setdefault(name, []).append(alias)
        for name, tensor in [*view.tensors.items(), *view.twins]:
            known = [name, *aliases.get(name, [])]
            source = next((tied.get(one, one) for one in known if tied.get(one, one) in stored), None)
            if source is None:
                self.findings.missing.append(name)
            elif self._fits(name, tensor, stored[source]):
                self._aim((slot, source), tensor)
        known_names = {tied.get(name, name) for name in (*view.tensors, *view.tied)} & stored.keys()
        refused = sorted(name for name in known_names if (slot, name) not in self.targets)
        self.inventory.names[f"{_KNOWN} {slot}"] = refused

    def _aim(self, source: tuple[str, str], tensor: Described) -> None:
        """Several targets have one source where weights are tied in the checkpoint and separate here."""
        if self.targets.setdefault(source, tensor) is not tensor:
            self.more.append((source, tensor))

    def _fits(self, name: str, tensor: Described, info: TensorInfo) -> bool:
        if tensor.shape != info.shape:
            self.findings.different.append(
                f"{name}: shape {list(info.shape)} in the checkpoint, {list(tensor.shape)} here"
            )
        elif tensor.dtype != info.dtype and not self._policy.map_dtype:
            self.findings.different.append(
                f"{name}: dtype {info.dtype} in the checkpoint, {tensor.dtype} here (map_dtype=True casts)"
            )
        elif tensor.local.is_meta:
            self.findings.different.append(
                f"{name}: on the meta device here, without memory; materialise the model first, with to_empty()"
            )
        else:
            return True
        return False

    def _match_optimizer(self, slot: str, parts: Sequence[object]) -> None:
        if slot not in self._values:
            self.findings.missing.append(slot)
            return
        groups = optimizers.groups(parts, optimizers.handles_for(slot, self._views))
        self.inventory.names[f"{_TRAINED} {slot}"] = sorted(optimizers.names(groups))
        with self._mismatch_noted():
            infos = {} if self._is_mismatched() else self._groups.get(slot, {})
            restoration = self._restorations[slot] = Restoration(groups, self._values[slot]["groups"], infos)
            for name, tensor in restoration.targets.items():
                self._aim((slot, name), tensor)

    def apply(self) -> None:
        """Put the values in place, once all tensors are filled."""
        for restoration in self._restorations.values():
            restoration.apply()
        for slot, parts in schedulers.slots(self._training.scheduler).items():
            if slot in self._values:
                schedulers.load(parts, self._values[slot])
        for slot, view in self._views.items():
            for name, value in self._values.get(slot, {}).items():
                if name in view.extra:
                    view.put_extra(name, value)
        self._apply_stateful()
        if self._rng is not None:
            rng.restore(self._rng)

    def _apply_stateful(self) -> None:
        for name, one in (self._training.stateful or {}).items():
            if name in self._values.get("stateful", {}):
                one.load_state_dict(self._values["stateful"][name])
        if self._own is not None and "dataloader" in self._own:
            self._training.dataloader.load_state_dict(self._own["dataloader"])


def _check_rng(state: Mapping[str, Any], source: str) -> None:
    try:
        rng.check(state)
    except DamagedError as error:
        raise DamagedError(f"{source}: {error}") from error
