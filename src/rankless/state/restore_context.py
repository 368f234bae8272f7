"""The parts of a restore share this: the tensors of the checkpoint, the tensors to fill, and the mismatches found.

:class:`~rankless.state.restore.LoadTargets` makes one on each rank; the matches of models and of optimizers fill it, in
the thread of the caller. The order of targets and of mismatches follows from the objects alone, so that ranks with
equal objects report the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from rankless.errors import OptimizerMismatchError
from rankless.ondisk.data_files import TensorInfo, is_adapter_group
from rankless.state.inventory import MODEL, OPTIMIZER, Inventory
from rankless.state.mismatches import MismatchReport, RestorePolicy
from rankless.state.tensor_views import TensorView, find_shared_memory

#: The group and the name of a stored tensor.
Source = tuple[str, str]

#: A stored tensor that is loaded, and one that is dropped, because both are one tensor here.
Merged = tuple[Source, Source]

#: The kind of the names of stored tensors that are one tensor here, in pairs: as JSON, the group and name of both.
_MERGED = "merged"

#: The kind of the names that a model or an optimizer has besides the tensors that it requests, by slot: stored tensors
#: that cannot be loaded into it, and parameters that are trained.
KNOWN, TRAINED = "known", "trained"


class TargetTensors:
    """The tensors to fill, live or just allocated, each with the stored tensor that fills it.

    Attributes:
        by_source: The first target of each stored tensor.
        aliases: Further targets of the same stored tensors: weights that are tied in the checkpoint and separate here.
        filled: The names here of the targets of models and optimizers, by slot.
        merged: The stored tensors that are one tensor here.
    """

    def __init__(self) -> None:
        self.by_source: dict[Source, TensorView] = {}
        self.aliases: list[tuple[Source, TensorView]] = []
        self.filled: set[tuple[str, str]] = set()
        self.merged: set[Merged] = set()

    def add(self, source: Source, tensor: TensorView) -> None:
        """Add a target of a stored tensor."""
        if self.by_source.setdefault(source, tensor) is not tensor:
            self.aliases.append((source, tensor))

    def __iter__(self) -> Iterator[TensorView]:
        yield from self.by_source.values()
        yield from (target for _, target in self.aliases)

    def note_merged(self, pairs: Iterable[Merged]) -> None:
        """Note stored tensors that are one tensor here: of each pair, the second is dropped if they are equal."""
        self.merged.update((kept, dropped) for kept, dropped in pairs if kept != dropped)

    def find_shared(self) -> set[str]:
        """Note which stored tensors fill the same memory here. Return the groups of tensors that share it in part."""
        alike, partial = find_shared_memory(dict(self._number()))
        self.note_merged((kept[:2], dropped[:2]) for kept, dropped in alike)
        return {group for group, *_ in partial}

    def find_overlapping(self, tensor: Tensor) -> set[str]:
        """Return the groups of the targets that share memory with a tensor."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return {
            group
            for (group, *_), target in self._number()
            if target.local.device == tensor.device
            and target.local.data_ptr() < stop
            and start < target.local.data_ptr() + target.local.nbytes
        }

    def set_aside(self, kept: Source, dropped: Source) -> None:
        """Give a tensor that is dropped memory of its own, so that it does not replace the one that is loaded."""
        alike, _ = find_shared_memory({key: view for key, view in self._number() if key[:2] in {kept, dropped}})
        for group, name, number in (key for _, key in alike if key[:2] == dropped):
            at = int(number) - len(self.by_source)
            view = self.by_source[group, name] if at < 0 else self.aliases[at][1]
            aside = msgspec.structs.replace(view, local=torch.empty_like(view.local, device="cpu"))
            if at < 0:
                self.by_source[dropped] = aside
            else:
                self.aliases[at] = dropped, aside

    def replace_memory(self, materialized: Mapping[int, Tensor]) -> None:
        """Replace tensors on the meta device, by their identity, by tensors with memory."""
        self.by_source = {key: _with_memory(target, materialized) for key, target in self.by_source.items()}
        self.aliases = [(key, _with_memory(target, materialized)) for key, target in self.aliases]

    def list_names(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the pairs of stored tensors that are one tensor here, as names to exchange, with their kind."""
        if self.merged:
            yield _MERGED, [msgspec.json.encode(pair).decode() for pair in sorted(self.merged)]

    def _number(self) -> list[tuple[tuple[str, str, str], TensorView]]:
        """Return all targets, each with its group, its name and its number."""
        targets = [*self.by_source.items(), *self.aliases]
        return [((*key, str(number)), target) for number, (key, target) in enumerate(targets)]


class RestoreContext(msgspec.Struct, frozen=True):
    """The checkpoint as this restore sees it, the tensors to fill, and what does not match.

    ``groups`` are the stored tensors, ``tied`` by group the names that share a stored tensor, with that. ``joined`` are
    stored tensors, by group, that this rank sees as parts of others. ``inventory`` has the tensors that this rank
    requests, to be sent to the other ranks.
    """

    groups: Mapping[str, Mapping[str, TensorInfo]]
    tied: Mapping[str, Mapping[str, str]]
    joined: Mapping[str, Sequence[str]]
    policy: RestorePolicy
    tensors: TargetTensors = msgspec.field(default_factory=TargetTensors)
    report: MismatchReport = msgspec.field(default_factory=MismatchReport)
    inventory: Inventory = msgspec.field(default_factory=Inventory)

    @contextmanager
    def noting_mismatch(self) -> Iterator[None]:
        """Report an optimizer's mismatch together with the model's mismatches, if there are any: they are its cause."""
        try:
            yield
        except OptimizerMismatchError as error:
            if not self.has_mismatches():
                raise
            self.report.different.append(str(error))

    def has_mismatches(self) -> bool:
        """Return whether the load is known to fail."""
        report, policy = self.report, self.policy
        return bool(report.different or report.refused_names(policy) or report.refused_components(policy))

    def add_dropped(self, kept: Source, dropped: Source, there: str) -> None:
        """Report a stored tensor that is dropped although it is not known to equal the one that is loaded.

        ``there`` says how it differs in the checkpoint.
        """
        components = [component_of(group) for group, _ in (kept, dropped)]
        names = [key[1] if kept[0] == dropped[0] else "/".join(key) for key in (kept, dropped)]
        if any(map(self.policy.is_strict, components)):
            self.report.different.append(
                f"{names[1]}: the same tensor as {names[0]} here, and {there}, which would be dropped: untie them, or "
                f"pass strict=False to load {names[0]} for both"
            )
            return
        is_state = components[1].partition("/")[0] == OPTIMIZER
        self.report.add_unexpected(components[1], "/".join(dropped) if is_state else names[1])
        self.tensors.set_aside(kept, dropped)


def list_merged(known: Mapping[str, Collection[str]]) -> list[Merged]:
    """Return, given the names that any rank knows, which stored tensors are one tensor on some rank."""
    return [msgspec.json.decode(pair, type=Merged) for pair in sorted(known.get(_MERGED, ()))]


def component_of(group: str) -> str:
    """Return the component that a group of tensors belongs to: adapters belong to the model."""
    return MODEL if is_adapter_group(group) else group


def _with_memory(target: TensorView, materialized: Mapping[int, Tensor]) -> TensorView:
    local = materialized.get(id(target.local))
    return target if local is None else msgspec.structs.replace(target, local=local)
