"""Everything that one load puts into this rank's training objects: matched and allocated first, applied last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.engine.spec import PER_RANK
from holdfast.errors import DamagedError, MismatchError
from holdfast.layout.files import TensorInfo
from holdfast.state import model as models
from holdfast.state import optimizer as optimizers
from holdfast.state import rng
from holdfast.state import scheduler as schedulers
from holdfast.state.arrays import ArraysIn
from holdfast.state.capture import MODEL, OPTIMIZER, STATE, Training
from holdfast.state.tensors import NAMES

#: ``{group: {name: dtype and shape}}``.
Groups = Mapping[str, Mapping[str, TensorInfo]]

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

    :attr:`targets` are the tensors to fill, live or just allocated, by group and stored name.
    """

    def __init__(
        self, training: Training, groups: Groups, tied: Mapping[str, Mapping[str, str]], policy: Policy
    ) -> None:
        self._training, self._groups, self._tied, self._policy = training, groups, tied, policy
        self.shared, self.own = ArraysIn(groups.get(STATE, {})), ArraysIn(groups.get(PER_RANK, {}))
        self.targets: dict[tuple[str, str], torch.Tensor] = {}
        self.findings = Findings()
        self._model: models.ModelView | None = None
        self._optimizer: optimizers.Restoration | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._values: Mapping[str, Any] = {}
        self._rng: Mapping[str, Any] | None = None

    def match(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None, source: str) -> None:
        """Find a target for everything asked for. Raises ``MismatchError`` with all that does not fit."""
        self._values = shared
        if self._training.model is not None:
            self._match_model(self._training.model)
        if self._training.optimizer is not None:
            self._match_optimizer(self._training.optimizer)
        if self._training.scheduler is not None:
            self._match_scheduler(self._training.scheduler)
        self.findings.check(self._policy, source)
        if self._policy.rng:
            self._rng = None if own is None else own.get("rng")
            if self._rng is None:
                self.findings.missing.append("rng")
            else:
                self._check_rng(self._rng, source)
        self.targets |= {(STATE, name): tensor for name, tensor in self.shared.tensors.items()}
        self.targets |= {(PER_RANK, name): tensor for name, tensor in self.own.tensors.items()}

    @staticmethod
    def _check_rng(state: Mapping[str, Any], source: str) -> None:
        try:
            rng.check(state)
        except DamagedError as error:
            raise DamagedError(f"{source}: {error}") from error

    def _match_model(self, model: Any) -> None:
        view = self._model = models.view(model)
        stored, tied = self._groups.get(MODEL, {}), self._tied.get(MODEL, {})
        aliases: dict[str, list[str]] = {}
        for alias, name in view.tied.items():
            aliases.setdefault(name, []).append(alias)
        for name, tensor in view.tensors.items():
            known = [name, *aliases.get(name, [])]
            source = next((tied.get(one, one) for one in known if tied.get(one, one) in stored), None)
            if source is None:
                self.findings.missing.append(name)
            elif self._fits(name, tensor, stored[source]):
                self._aim(source, tensor)
        wanted = view.tensors.keys() | view.tied.keys()
        used = {tied.get(name, name) for name in wanted}
        self.findings.unexpected += [name for name in stored if name not in wanted and name not in used]
        extra = self._values.get("model", {})
        self.findings.missing += [name for name in view.extra if name not in extra]
        self.findings.unexpected += [name for name in extra if name not in view.extra]

    def _aim(self, source: str, tensor: torch.Tensor) -> None:
        """A stored tensor is read once; of two that are tied in the checkpoint and separate here, one is copied."""
        first = self.targets.setdefault((MODEL, source), tensor)
        if first is not tensor:
            self._copies.append((first, tensor))

    def _fits(self, name: str, tensor: torch.Tensor, info: TensorInfo) -> bool:
        shape, dtype = tuple(tensor.shape), NAMES.get(tensor.dtype, str(tensor.dtype))
        if shape != info.shape:
            self.findings.different.append(f"{name}: shape {list(info.shape)} in the checkpoint, {list(shape)} here")
        elif dtype != info.dtype and not self._policy.map_dtype:
            self.findings.different.append(
                f"{name}: dtype {info.dtype} in the checkpoint, {dtype} here (map_dtype=True casts)"
            )
        elif tensor.is_meta:
            self.findings.different.append(
                f"{name}: on the meta device here, without memory; materialise the model first, with to_empty()"
            )
        else:
            return True
        return False

    def _match_optimizer(self, optimizer: Any) -> None:
        if "optimizer" not in self._values:
            self.findings.missing.append("optimizer")
            return
        names = None if self._model is None else self._model.name_of_parameters()
        view = optimizers.view(optimizer, names)
        if self.findings.different or (self._policy.strict and self.findings.missing):
            # The model's differences are the cause of what would differ in states.
            self.findings.different += optimizers.differences(view, self._values["optimizer"])
            return
        self._optimizer = optimizers.Restoration(view, self._values["optimizer"], self._groups.get(OPTIMIZER, {}))
        self.targets |= {(OPTIMIZER, name): tensor for name, tensor in self._optimizer.tensors.items()}

    def _match_scheduler(self, scheduler: Any) -> None:
        if "scheduler" not in self._values:
            self.findings.missing.append("scheduler")
            return
        self.findings.different += schedulers.differences(scheduler, self._values["scheduler"])

    def apply(self) -> None:
        """Put the values in place, once all tensors are filled."""
        with torch.no_grad():
            for source, target in self._copies:
                target.copy_(source)
        if self._optimizer is not None:
            self._optimizer.apply()
        if self._training.scheduler is not None and "scheduler" in self._values:
            schedulers.load(self._training.scheduler, self._values["scheduler"])
        if self._model is not None:
            self._apply_extra(self._model)
        if self._rng is not None:
            rng.restore(self._rng)

    def _apply_extra(self, view: models.ModelView) -> None:
        for name, value in self._values.get("model", {}).items():
            if name not in view.extra:
                continue
            if view.module is not None:
                models.set_extra(view.module, view.raw[name], value)
            else:
                self._training.model[name] = value
