"""The objects of one rank that the state is copied into: matched with the source first, filled and applied last.

:class:`~rankless.live_copy.copy_operation.CopyOperation` has a :class:`Receiver` on every rank. Nothing of the caller's
may change before :meth:`Receiver.make_sinks`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec.structs import replace

from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan import layout_types
from rankless.engine.plan.file_ranges import CHUNK
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.number_ranges import merge_spans
from rankless.engine.plan.tensor_specs import PER_RANK, Meshes, Spec
from rankless.errors import InvalidArgumentError, MismatchError, StateError
from rankless.formats.native import decode_values
from rankless.live_copy.copy_negotiation import SourceState
from rankless.ondisk.data_files import TensorInfo
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.mismatches import RestorePolicy
from rankless.state.own_mesh_rank import find_mesh_rank
from rankless.state.rank_states import SavedRankStates, restore_newcomer
from rankless.state.restore import LoadTargets
from rankless.state.restore_context import Merged
from rankless.state.tensor_views import DTYPES, TensorView
from rankless.state.training import TrainingObjects


@dataclass(frozen=True)
class RankNumbers:
    """The number of this rank in the process group, its number in all of the job, and the number of ranks."""

    rank: int
    global_rank: int
    size: int


@dataclass(frozen=True)
class Receiver:
    """The targets of a rank, with the tensors of the source; a rank that gets nothing has no targets."""

    targets: LoadTargets | None = None
    policy: RestorePolicy = field(default_factory=lambda: RestorePolicy(strict=True, cast_dtype=False, rng=False))
    infos: Mapping[str, Mapping[str, TensorInfo]] = field(default_factory=dict)
    components: Collection[str] = ()

    @classmethod
    def match(
        cls, objects: TrainingObjects | None, source: SourceState, policy: RestorePolicy, numbers: RankNumbers
    ) -> Receiver:
        """Find a target for everything that is requested, and allocate missing states.

        Each rank calls it in the vote "matching the state of the sources".
        """
        if objects is None:
            return cls()
        _check_meshes(objects, numbers)
        # A source goes on with its own random numbers.
        policy = replace(policy, rng=policy.rng and numbers.rank not in source.ranks)
        groups, name = source.groups, str(source.name)
        targets = LoadTargets(objects, groups, source.spec.tied_names(), policy)
        values = decode_values(source.state_file, source.ranks_file, source.name, targets.shared)
        arrays = ArrayDecoder(groups.get(PER_RANK, {}))
        saved = SavedRankStates(values.ranks, arrays, source.find_crcs, name)
        newcomer = restore_newcomer(saved, numbers.rank, numbers.size, objects.dataloader, generators=policy.rng)
        rank_state = replace(newcomer, differing=source.differing)
        with errors_about_a_source():
            targets.match_targets(values.shared, rank_state, arrays)
        targets.fill_inventory(numbers.rank)
        _check_separate(targets, source)
        receiver = cls(targets, policy, groups, objects.component_names())
        receiver.check_aliases(numbers.global_rank)
        return receiver

    def build_spec(self) -> tuple[Spec, Meshes]:
        """Return the spec and the meshes of the tensors that this rank requests."""
        if self.targets is None:
            return Spec(), Meshes()
        return self.targets.inventory.build_spec(), self.targets.inventory.build_meshes()

    def add_dropped(self, unequal: Collection[Merged], incomparable: Collection[Merged]) -> None:
        """Report tensors that are one tensor on some rank, and are not known to be equal in the source."""
        if self.targets is None:
            return
        for pair in unequal:
            self.targets.add_dropped(*pair, there="another one in the source")
        for pair in incomparable:
            self.targets.add_dropped(*pair, there="sharded in another way in the source, so that it may differ")

    def check_matches(self, source: SourceState, requested: GlobalSpec, *, joins: bool) -> list[str]:
        """Raise ``MismatchError`` with all mismatches. Return messages about missing things that are tolerated.

        If the rank ``joins`` others, which keep their state, it may have the same as one of them.

        Each rank calls it in the vote "matching the state with what it is copied into".
        """
        if self.targets is None:
            return []
        keys = {(tensor.group, tensor.name) for tensor in requested.iter_tensors()}
        known = names_known_to_any(requested)
        with errors_about_a_source():
            self.targets.check_matches(
                keys, known, str(source.name), is_part=joins and self._equals_a_source(source.spec)
            )
        return [reason.replace(*_WORDING) for reason in self.targets.report.tolerated_reasons(self.policy)]

    def _equals_a_source(self, spec: GlobalSpec) -> bool:
        """Return whether this rank has the same tensors as some source rank, such as a stage of a pipeline."""
        own = {key for key in self.targets.tensors.by_source if key[0] in self.components} if self.targets else set()
        return any(
            own == {(tensor.group, tensor.name) for tensor in rank.tensors if tensor.group in self.components}
            for rank in spec.specs
        )

    def make_sinks(self, numbers: Mapping[tuple[str, str], int]) -> dict[int, TensorBytes]:
        """Give all targets memory, and return them by the number of their tensor.

        Each rank calls it in the vote "copying".
        """
        if self.targets is None:
            return {}
        self.targets.materialize_models()
        self.targets.count_changes()
        return {numbers[key]: self._bytes_of(key, target) for key, target in self.targets.tensors.by_source.items()}

    def _bytes_of(self, key: tuple[str, str], target: TensorView) -> TensorBytes:
        group, name = key
        return TensorBytes(target.local, DTYPES[self.infos[group][name].dtype])

    def check_aliases(self, global_rank: int) -> None:
        """Raise ``StateError`` if tensors that are one tensor in the source have other layouts or dtypes here."""
        for (group, name), alias in self.targets.tensors.aliases if self.targets else ():
            first = self.targets.tensors.by_source[group, name] if self.targets else alias
            if (_shard_of(first, global_rank), first.dtype) != (_shard_of(alias, global_rank), alias.dtype):
                raise StateError(
                    f"{group} tensor {name!r} is tied to another one in the source; here both are separate, and have "
                    "different layouts or dtypes: tie them, or shard them alike"
                )

    def apply(self) -> None:
        """Fill the further targets of tied tensors, and put the values in place, once all tensors are filled.

        Each rank calls it in the vote "putting values in place".
        """
        if self.targets is None:
            return
        for key, alias in self.targets.tensors.aliases:
            filled, sink = self._bytes_of(key, self.targets.tensors.by_source[key]), self._bytes_of(key, alias)
            for start in range(0, filled.nbytes, CHUNK):
                data = np.empty(min(CHUNK, filled.nbytes - start), np.uint8)
                filled.copy_out(start, data)
                sink.write(start, data)
        self.targets.apply()


def names_known_to_any(requested: GlobalSpec) -> dict[str, set[str]]:
    """Return the names that any receiver knows, by their kind."""
    return {kind: requested.known_names(kind) for spec in requested.specs for kind in spec.known_names}


#: The subject of a mismatch: messages of loads say that it is a checkpoint.
_WORDING = ("the checkpoint", "the source")


@contextmanager
def errors_about_a_source() -> Iterator[None]:
    """Raise mismatches, which loads report of a checkpoint, in the words of a copy."""
    try:
        yield
    except MismatchError as error:
        raise type(error)(str(error).replace(*_WORDING)) from error


def _check_meshes(objects: TrainingObjects, numbers: RankNumbers) -> None:
    mesh_rank = find_mesh_rank(objects)
    if mesh_rank not in {None, numbers.global_rank}:
        raise StateError(
            f"the objects to copy into have device meshes in which this rank is rank {mesh_rank}, and it is rank "
            f"{numbers.global_rank} now: make them after the process group"
        )


def _check_separate(targets: LoadTargets, source: SourceState) -> None:
    """Raise ``InvalidArgumentError`` if a tensor to fill has its memory in common with one that is the source.

    Storages are compared by their addresses: two of them may be over one array of NumPy.
    """
    spans: dict[torch.device, list[tuple[int, int]]] = {}
    for shard in source.captured.tensors.values():
        spans.setdefault(shard.device, []).append(shard.storage_span)
    taken = {device: merge_spans(on_device) for device, on_device in spans.items()}
    for (group, name), target in targets.tensors.by_source.items():
        if target.local.is_meta:
            continue
        start, stop = TensorBytes(target.local).storage_span
        on_device = taken.get(target.local.device, [])
        at = bisect_right(on_device, start, key=_stop_of)
        if start < stop and at < len(on_device) and on_device[at][0] < stop:
            raise InvalidArgumentError(
                f"{group} tensor {name!r} shares its memory with a tensor of the source on this rank: pass other "
                "objects to copy into"
            )


def _stop_of(span: tuple[int, int]) -> int:
    return span[1]


def _shard_of(target: TensorView, global_rank: int) -> object:
    layout = target.layout
    place = None if layout is None else (layout.division, layout_types.coordinate_of_rank(layout, global_rank))
    return place, target.pieces
