"""A save of a training state as one checkpoint of a run, wherever the run is.

:class:`~rankless.run_directory.RunDirectory` makes one on every rank for each save, and :mod:`rankless.save.background`
runs it. The plan that a rank keeps is used again only if the key says that all ranks have the same; the votes must have
the same order on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rankless.engine.comm.session import RankGroup, WritingRanks
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity import replica_comparison
from rankless.engine.integrity.compare_values_by_digest import join_differing
from rankless.engine.integrity.crc_gather import HashedResult
from rankless.engine.io.requests import MoveRanges, OnBytesMoved
from rankless.engine.io.staging import DeferredCopies
from rankless.engine.io.staging_memory import Arena
from rankless.engine.io.torn_snapshot import ALL_CHUNKS, SAMPLED_CHUNKS
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan, plan_save
from rankless.formats.native import RANKS
from rankless.formats.native import STATE as STATE_FILE
from rankless.observe.events import Event
from rankless.observe.reporter import EventReporter
from rankless.observe.warning import warn_caller
from rankless.ondisk.data_files import parse_size
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.ondisk.value_files import build_ranks_file, build_state_file
from rankless.process.prepared_types import prepared
from rankless.run.catalog import CheckpointIdentity, next_identity
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.journal import Placement, append_entry, describe_event, describe_placement
from rankless.save.base_checkpoint import KnownRun
from rankless.save.build_manifest import CheckpointLabel, build_manifest
from rankless.save.run_output import LiveTensors, NewTag, open_output
from rankless.save.save_negotiation import SaveAgreement, describe_differing, name_differing, negotiate_save
from rankless.save.save_operation import SaveOperation
from rankless.save.save_request import SaveRequest
from rankless.state.model.hf_config import pretrained_files
from rankless.state.model.model_traversal import model_components
from rankless.state.step_only_tensors import step_only_tensors

#: What becomes of values that differ between ranks, in a warning.
_STORED_BY_RANK = (
    "each rank gets its own back on as many ranks with the same layout; in any other, all get rank 0's; of an "
    "optimizer all get the states that any rank has"
)


class SavePlanCache(msgspec.Struct):
    """The plan of the last save. The next save reuses it if the tensor specs of all ranks are unchanged.

    ``key`` identifies the plan, ``saves`` counts the saves that were made with it. ``witness`` is the first rank that
    is not on rank 0's host, if there is one. ``differing`` are the encoded names of values that differ between ranks.
    ``host_names`` are, on rank 0, the names of hosts by number, and ``hub_layouts`` the files with the layouts of
    models of transformers, for ``hub_plan``.
    """

    key: bytes = b""
    plan: SavePlan = EMPTY_PLAN
    saves: int = 0
    witness: int | None = None
    differing: bytes = b""
    host_names: Mapping[int, str] = msgspec.field(default_factory=dict)
    hub_layouts: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    hub_plan: SavePlan = EMPTY_PLAN


@prepared
class _PreparedSave(msgspec.Struct, frozen=True, array_like=True):
    """The result of a rank's preparation: the digests of its replicas, and what its output has returned."""

    digests: bytes
    prepared: bytes


@prepared
class _OpenedSave(msgspec.Struct, frozen=True):
    """The decision of rank 0: the identity of the checkpoint, and what has begun; ``None`` if replicas differ."""

    identity: CheckpointIdentity | None = None
    begun: bytes = b""


_encode = msgspec.msgpack.Encoder().encode


class TrainingSave(SaveOperation[CheckpointInfo]):
    """A save of a training state as one checkpoint of a run: the content of a :class:`RunOutput`."""

    def __init__(
        self, request: SaveRequest, ranks: RankGroup, cache: SavePlanCache, known: KnownRun, timeout: float
    ) -> None:
        super().__init__(ranks, timeout)
        self._request, self._cache, self._known = request, cache, known
        self._merged_values: Mapping[str, Any] = {}
        self._identity, self._started_at, self._hosts = CheckpointIdentity(0, "", ""), 0.0, 0
        self._placement: Placement = ()
        self._output = open_output(self._new_tag, WritingRanks(ranks, self._session), known)
        self._reporter = EventReporter(
            self.path, self._forward_event, is_coordinator=self._session.rank == COORDINATOR_RANK, began=request.began
        )

    @property
    def _new_tag(self) -> NewTag:
        request, options = self._request, self._request.options
        return NewTag(
            request.path,
            request.tag,
            request.overwrite,
            request.corrupt,
            request.keep,
            request.job,
            incremental=options.incremental is True,  # other values are refused in the vote
            keep_full_every=options.keep_full_every,
        )

    def prepare_save(self) -> None:
        """Capture the training state, plan the save, and open its output."""
        agreement = self._negotiate(self._cache.differing)
        differing = join_differing(self._cache.differing, agreement.differing)
        if differing != self._cache.differing:
            names = name_differing(self._session, agreement)
            agreement = self._negotiate(differing)
            self._cache.differing = differing
            if names:
                warn_caller(
                    describe_differing(
                        names,
                        _STORED_BY_RANK,
                    )
                )
        self._captured, self._merged_values = agreement.captured, agreement.merged_values
        self._captured.compared.clear()  # else tensors would be kept until the save ends
        self._cache.host_names = agreement.host_names or self._cache.host_names
        self._hosts = len(set(agreement.host_of))
        self._placement = describe_placement(agreement.host_of, self._cache.host_names)
        self._plan_and_open(agreement)

    def _negotiate(self, differing: bytes) -> SaveAgreement:
        ranks = self._ranks.global_ranks()
        return negotiate_save(
            self._request,
            self._session,
            ranks,
            self._cache.key,
            differing=differing,
            has_metrics=bool(self._request.metrics),
        )

    def _plan_and_open(self, agreement: SaveAgreement) -> None:
        """Plan, check that replicas are equal, and open the output. It ends in votes."""
        cache, output = self._cache, self._output

        def plan_and_compare() -> _PreparedSave:
            self._update_plan(agreement)
            tensors, frozen = self._captured.tensors, self._captured.frozen
            versions = {key: tensors[key].version for key in sorted(frozen)}
            live = LiveTensors(tensors, frozen, versions, cache.saves)
            return _PreparedSave(self._hash_replicas(), output.prepare(self._plan, live, cache.witness))

        def open_pending(posted: list[bytes]) -> bytes:
            prepared = [msgspec.msgpack.decode(raw, type=_PreparedSave) for raw in posted]
            if not replica_comparison.have_equal_replicas([rank.digests for rank in prepared]):
                return _encode(_OpenedSave())
            self._identity, self._started_at = self._choose_identity(), round(time.time(), 6)
            begun = output.begin(self._identity, [rank.prepared for rank in prepared])
            return _encode(_OpenedSave(self._identity, begun))

        _, raw = self._session.vote("preparing the save", plan_and_compare, _encode, open_pending)
        opened = msgspec.msgpack.decode(raw, type=_OpenedSave)
        self._accept_identity(opened.identity)
        output.join(opened.begun)
        trusts_versions = self._is_overlapped and self._request.options.staging_check != "full"
        self._plan = output.omit_unchanged(trusts_versions=trusts_versions)

    def _accept_identity(self, identity: CheckpointIdentity | None) -> None:
        """Note the identity of the new checkpoint. Raise ``ReplicaMismatchError`` without one. All ranks call it."""
        if identity is None:
            self._cache.key = b""
            raise self._writer.describe_replica_mismatch()
        self._cache.saves += 1
        self._identity = identity

    def _update_plan(self, agreement: SaveAgreement) -> None:
        """Plan the save, unless the plan of an earlier one is still right."""
        cache, session, grain = self._cache, self._session, self._output.grain
        if agreement.global_spec is not None:
            cache.key = b""
            limit = parse_size(self._request.options.max_shard_size)
            # With a grain, each rank is a host of its own: a piece has one writer.
            host_of = agreement.host_of if grain is None else range(session.size)
            cache.plan = plan_save(agreement.global_spec, session.rank, limit, host_of, grain)
            cache.key, cache.saves = agreement.key, 0
            hosts = list(enumerate(agreement.host_of))
            cache.witness = next((rank for rank, host in hosts if host != agreement.host_of[0]), None)
        self._plan = cache.plan

    def _choose_identity(self) -> CheckpointIdentity:
        """Return the identity of the new checkpoint, on rank 0."""
        return next_identity(self._request.path, self._request.job, self._request.step)

    @property
    def path(self) -> Path:
        """The path of the new checkpoint."""
        return self._new_tag.path

    @property
    def identity(self) -> CheckpointIdentity:
        """The identity of the new checkpoint; its run is empty before :meth:`prepare_save`."""
        return self._identity

    @property
    def _is_overlapped(self) -> bool:
        return self._request.async_save and self._request.options.staging == "overlapped"

    def _deferred_copies(self) -> DeferredCopies:
        if not self._is_overlapped:
            return DeferredCopies()
        keys = step_only_tensors(self._captured, self._request.training.optimizer)
        numbers = frozenset(number for number, key in enumerate(self._plan.tensors) if key in keys)
        sampled = ALL_CHUNKS if self._request.options.staging_check == "full" else SAMPLED_CHUNKS
        return DeferredCopies(numbers, sampled, self._cache.saves, is_overlapped=True)

    def stage_tensors(self, arena: Arena) -> None:
        """See :class:`SaveOperation`."""
        self._reporter.begin_phase("copy")
        super().stage_tensors(arena)

    def complete_copies(self) -> None:
        """See :class:`SaveOperation`. Then check that tensors that were trusted to be unchanged are."""
        super().complete_copies()
        self._output.verify_trusted()

    def write_and_commit(self) -> CheckpointInfo:
        """Write the files, commit the checkpoint, and remove the checkpoints that are no longer kept."""
        self._reporter.begin_phase("write")
        output = self._output
        info = output.write(self, self._reporter.progress_counter("save", self._plan.nbytes).add)
        self._release_tensors()
        self._reporter.report_saved(self.path, info.step, info.nbytes, output.shared_nbytes)
        output.remove_old()
        return info

    def _roll_back(self, error: BaseException) -> None:
        self._output.discard()
        self._reporter.report_failed(error)

    def mark_returned(self) -> float:
        """Record that the call returns to the caller, and return for how many seconds it blocked."""
        return self._reporter.mark_returned()

    def _forward_event(self, event: Event) -> None:
        """Write an event into the journal, on rank 0, and call the listener."""
        entry = describe_event(event, time.time()) if self._session.rank == COORDINATOR_RANK else None
        if entry is not None:
            step = self._request.step
            append_entry(
                self._request.path,
                msgspec.structs.replace(
                    entry,
                    step=step if isinstance(step, int | float) else None,  # of a failed save, it may be anything
                    run=self._identity.run,
                    world_size=self._session.size,
                    hosts=self._hosts,
                    placement=self._placement,
                    incarnation=self._identity.incarnation,
                    sequence=self._identity.sequence,
                ),
            )
        self._request.on_event(event)

    @property
    def _compared_save(self) -> int:
        """The number of the save for comparisons between ranks: of all bytes at 0, of a sample at later ones."""
        return 0 if self._request.options.replica_check == "full" else self._cache.saves

    def _hash_replicas(self) -> bytes:
        digests, seconds = self._writer.hash_replicas(self._compared_save)
        if self._plan.replicas:
            self._reporter.record_replica_check(seconds)
        return digests

    def write_files(self, folder: Path, on_moved: OnBytesMoved) -> HashedResult:
        """See :class:`SavedContent`."""
        paths = [file.path for file in self._plan.files]
        return HashedResult(self._writer.write(folder, paths, self._staged, on_moved), self._captured.rank_values)

    def move_share(self, move: MoveRanges) -> bytes:
        """See :class:`SavedContent`."""
        move(*self._writer.ranges_to_upload(self._staged))
        return self._captured.rank_values

    def begin_commit(self, folder: Path | None = None, payloads: Sequence[bytes] = ()) -> None:
        """See :class:`SavedContent`."""
        del folder, payloads  # no rank leaves anything to rank 0
        self._reporter.begin_phase("commit")

    def make_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        """See :class:`SavedContent`."""
        step, metrics = self._request.manifest_numbers()
        return build_manifest(
            CheckpointLabel(self._request.tag, self._identity, self._started_at, self._session.size, step, metrics),
            files,
            str(torch.__version__),
        )

    def build_small_files(self, payloads: Sequence[bytes]) -> dict[str, bytes]:
        """See :class:`SavedContent`. ``payloads`` are the values of all ranks."""
        ranks_file = build_ranks_file(list(payloads), self._merged_values)
        state_file = build_state_file(self._merged_values, self._captured.shared_values)
        return {**self._captured.small_files, **self._hub_layouts(), STATE_FILE: state_file, RANKS: ranks_file}

    def _hub_layouts(self) -> Mapping[str, bytes]:
        """Return the layouts of models of transformers."""
        cache = self._cache
        if cache.hub_plan is not cache.plan:
            cache.hub_layouts, cache.hub_plan = self._build_hub_layouts(cache.plan), cache.plan
        return cache.hub_layouts

    def _build_hub_layouts(self, plan: SavePlan) -> Mapping[str, bytes]:
        models = model_components(self._request.training.model)
        pretrained = {slot: parts[0] for slot, parts in models.items() if dict(pretrained_files(parts))}
        if not pretrained:
            return {}
        from rankless.save.hub_layout import hub_layout_files  # noqa: PLC0415 - few models are of transformers

        return hub_layout_files(pretrained, plan, self._merged_values)
