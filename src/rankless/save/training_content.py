"""The content of a save of a training state, as one checkpoint of a run, wherever the run is.

:class:`~rankless.run_directory.RunDirectory` makes one on every rank for each save, and a
:class:`~rankless.save.save_operation.SaveOperation` calls it. The plan that a rank keeps is used again only if
the key says that all ranks have the same; the votes must have the same order on all ranks. The vote that opens the
output is "preparing the save", from the second save of the same tensors on "looking at what to save".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from rankless.save.run_output import LiveTensors, NewTag, RunOutput, open_output
from rankless.save.save_negotiation import (
    EarlyOpening,
    SaveAgreement,
    describe_differing,
    name_differing,
    negotiate_save,
)
from rankless.save.save_operation import SavedShare
from rankless.save.save_request import SaveRequest
from rankless.state.capture import Capture
from rankless.state.model.hf_config import pretrained_files
from rankless.state.model.model_traversal import model_components

if TYPE_CHECKING:
    from rankless.tier.job import TierJob

#: The text of a warning about values that differ between ranks: which ones ranks get back.
_STORED_BY_RANK = (
    "each rank gets its own back on as many ranks with the same layout; in any other, all get rank 0's; of an "
    "optimizer all get the states that any rank has"
)


class SavePlanCache(msgspec.Struct):
    """The plan of the last save. The next save reuses it if the tensor specs of all ranks are unchanged.

    ``key`` identifies the plan, ``saves`` counts the saves that were made with it. ``witness`` is the first rank that
    is not on rank 0's host, if there is one. ``differing`` are the encoded names of values that differ between ranks.
    ``own_spec`` identifies the tensors of this rank that the plan is for; it is empty if values must be exchanged.
    ``hosts`` and ``placement`` say where the ranks of the last save were, for the journal.
    ``host_names`` are, on rank 0, the names of hosts by number, and ``hub_layouts`` the files with the layouts of
    models of transformers, for ``hub_plan``.
    """

    key: bytes = b""
    plan: SavePlan = EMPTY_PLAN
    saves: int = 0
    witness: int | None = None
    differing: bytes = b""
    own_spec: bytes = b""
    hosts: int = 0
    placement: Placement = ()
    host_names: Mapping[int, str] = msgspec.field(default_factory=dict)
    hub_layouts: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    hub_plan: SavePlan = EMPTY_PLAN


@prepared
class _PreparedSave(msgspec.Struct, frozen=True, array_like=True):
    """The result of a rank's preparation: the digests of its replicas, and the bytes that its output has returned."""

    digests: bytes
    prepared: bytes


@prepared
class _OpenedSave(msgspec.Struct, frozen=True):
    """The decision of rank 0: the identity of the checkpoint, and the begun output; ``None`` if replicas differ."""

    identity: CheckpointIdentity | None = None
    begun: bytes = b""


_encode = msgspec.msgpack.Encoder().encode


class TrainingContent:
    """A training state that becomes one checkpoint of a run: the content of a :class:`RunOutput`."""

    has_follow_up = False
    completed_locally: None = None

    def __init__(
        self, request: SaveRequest, ranks: RankGroup, cache: SavePlanCache, known: KnownRun, timeout: float
    ) -> None:
        self.share = SavedShare(ranks, timeout)
        self.request, self.cache = request, cache
        self._known = known
        self._is_overlapped = request.async_save and request.options.staging == "overlapped"
        self._merged_values: Mapping[str, Any] = {}
        #: The identity of the new checkpoint; its run is empty before :meth:`prepare`.
        self.identity = CheckpointIdentity(0, "", "")
        self.started_at, self._hosts = 0.0, 0
        self._placement: Placement = ()
        #: The path of the new checkpoint. The tag is checked later, on all ranks together.
        self.path = request.path / str(request.tag)
        self.output = self._open_output()
        is_coordinator = self.share.session.rank == COORDINATOR_RANK
        self.reporter = EventReporter(
            self.path, self._forward_event, is_coordinator=is_coordinator, began=request.began
        )

    def _open_output(self, tier: TierJob | None = None) -> RunOutput:
        request, options = self.request, self.request.options
        new = NewTag(
            request.path,
            request.tag,
            request.overwrite,
            request.corrupt,
            request.keep,
            request.job,
            tier,
            incremental=options.incremental is True,  # other values are refused in the vote
            keep_full_every=options.keep_full_every,
        )
        return open_output(new, WritingRanks(self.share.ranks, self.share.session, self.share.attempt), self._known)

    def begin_attempt(self, tier: TierJob, attempt: int) -> RunOutput:
        """Return an output that no other attempt has, for bytes that are in a tier.

        Each rank calls it before each drain.
        """
        self.share.attempt = attempt
        self.output = self._open_output(tier)
        return self.output

    def prepare(self) -> None:
        """Capture the training state, plan the save, and open its output."""
        request = self.request
        choose_identity = partial(next_identity, request.path, request.job, request.step)
        begin = partial(self._begin_output, choose_identity)
        agreement = self.agree(EarlyOpening(self.cache.own_spec, self._prepare_known, begin))
        if agreement.opened:
            self._join_output(agreement.opened)
        else:
            self.plan_and_open(agreement, choose_identity)

    def agree(self, early: EarlyOpening | None = None) -> SaveAgreement:
        """Capture the training state, and return the plan that all ranks have agreed on.

        All ranks call it, in the thread of the caller. It holds the vote "looking at what to save", and the votes of
        the negotiation that follow. ``early``: how the output is opened in the first one, if nothing but values has
        changed since the save before.
        """
        cache, session = self.cache, self.share.session
        global_ranks, has_metrics = self.share.ranks.global_ranks(), bool(self.request.metrics)
        while True:
            agreement = negotiate_save(
                self.request,
                session,
                global_ranks,
                cache.key,
                differing=cache.differing,
                has_metrics=has_metrics,
                early=early,
            )
            differing = join_differing(cache.differing, agreement.differing)
            if differing == cache.differing:
                break
            names = name_differing(session, agreement)
            cache.differing = differing
            if names:
                warn_caller(describe_differing(names, _STORED_BY_RANK))
        self.share.captured, self._merged_values = agreement.captured, agreement.merged_values
        self.share.captured.compared.clear()  # else tensors would be kept until the save ends
        cache.host_names = agreement.host_names or cache.host_names
        self._hosts = cache.hosts = len(set(agreement.host_of))
        self._placement = cache.placement = describe_placement(agreement.host_of, cache.host_names)
        return agreement

    def plan_and_open(self, agreement: SaveAgreement, choose_identity: Callable[[], CheckpointIdentity]) -> None:
        """Plan, check that replicas are equal, and open the output.

        ``choose_identity`` returns the identity of the new checkpoint, on rank 0.

        All ranks call it after :meth:`agree`, if that has opened nothing. It holds the vote "preparing the save".
        """

        def plan_and_prepare() -> bytes:
            self.update_plan(agreement)
            return self._prepare_output()

        begin = partial(self._begin_output, choose_identity)
        _, opened = self.share.session.vote("preparing the save", plan_and_prepare, bytes, begin)
        self._join_output(opened)

    def _prepare_known(self, captured: Capture) -> bytes:
        """Prepare with the plan of the save before, which is for the same tensors.

        Each rank calls it in the vote "looking at what to save": :class:`EarlyOpening`.
        """
        self.share.captured, self.share.plan = captured, self.cache.plan
        self._hosts, self._placement = self.cache.hosts, self.cache.placement
        return self._prepare_output()

    def _prepare_output(self) -> bytes:
        """Give the plan to the output. Return the bytes for rank 0, with digests of replicas: called in a vote."""
        tensors, frozen = self.share.captured.tensors, self.share.captured.frozen
        versions = {key: tensors[key].version for key in sorted(frozen)}
        live = LiveTensors(tensors, frozen, versions, self.cache.saves)
        digests = self.hash_replicas()
        return _encode(_PreparedSave(digests, self.output.prepare(self.share.plan, live, self.cache.witness)))

    def _begin_output(self, choose_identity: Callable[[], CheckpointIdentity], posted: list[bytes]) -> bytes:
        """Compare the digests of replicas, and open the output, on rank 0 in the same vote. Return the decision."""
        prepared = [msgspec.msgpack.decode(raw, type=_PreparedSave) for raw in posted]
        if not replica_comparison.have_equal_replicas([rank.digests for rank in prepared]):
            return _encode(_OpenedSave())
        self.identity, self.started_at = choose_identity(), round(time.time(), 6)
        begun = self.output.begin(self.identity, [rank.prepared for rank in prepared])
        return _encode(_OpenedSave(self.identity, begun))

    def _join_output(self, raw: bytes) -> None:
        """Join the output that rank 0 has opened. All ranks call it after the vote; it may end in another one."""
        opened = msgspec.msgpack.decode(raw, type=_OpenedSave)
        self.accept_identity(opened.identity)
        self.output.join(opened.begun)
        trusts_versions = self._is_overlapped and self.request.options.staging_check != "full"
        self.share.plan = self.output.omit_unchanged(trusts_versions=trusts_versions)

    def accept_identity(self, identity: CheckpointIdentity | None) -> None:
        """Note the identity of the new checkpoint. Raise ``ReplicaMismatchError`` without one. All ranks call it."""
        if identity is None:
            self.cache.key = b""
            raise self.share.writer.describe_replica_mismatch()
        self.cache.saves += 1
        self.identity = identity

    def update_plan(self, agreement: SaveAgreement) -> None:
        """Plan the save, unless the plan of an earlier one is still right.

        Each rank calls it in the vote "preparing the save".
        """
        cache, session, grain = self.cache, self.share.session, self.output.grain
        cache.own_spec = b""  # until the plan belongs to this spec, whatever interrupts it
        if agreement.global_spec is not None:
            cache.key = b""
            limit = parse_size(self.request.options.max_shard_size)
            # With a grain, each rank is a host of its own: a piece has one writer.
            host_of = agreement.host_of if grain is None else range(session.size)
            cache.plan = plan_save(agreement.global_spec, session.rank, limit, host_of, grain)
            cache.key, cache.saves = agreement.key, 0
            hosts = list(enumerate(agreement.host_of))
            cache.witness = next((rank for rank, host in hosts if host != agreement.host_of[0]), None)
        self.share.plan, cache.own_spec = cache.plan, agreement.own_spec

    def choose_copies(self, arena: Arena) -> tuple[Arena, DeferredCopies]:
        """See :class:`Content`."""
        self.reporter.begin_phase("copy")
        return arena, self._deferred_copies()

    def _deferred_copies(self) -> DeferredCopies:
        if not self._is_overlapped:
            return DeferredCopies()
        from rankless.state.step_only_tensors import step_only_tensors  # noqa: PLC0415 - only these saves need it

        keys = step_only_tensors(self.share.captured, self.request.training.optimizer)
        numbers = frozenset(number for number, key in enumerate(self.share.plan.tensors) if key in keys)
        sampled = ALL_CHUNKS if self.request.options.staging_check == "full" else SAMPLED_CHUNKS
        return DeferredCopies(numbers, sampled, self.cache.saves, is_overlapped=True)

    def verify_copies(self) -> None:
        """Check that tensors that were trusted to be unchanged are. See :class:`Content`."""
        self.output.verify_trusted()

    def write_and_commit(self) -> CheckpointInfo:
        """Write the files, commit the checkpoint, and remove the checkpoints that are no longer kept."""
        self.reporter.begin_phase("write")
        output = self.output
        info = output.write(self, self.reporter.progress_counter("save", self.share.plan.nbytes).add)
        self.share.release_tensors()
        self.reporter.report_saved(self.path, info.step, info.nbytes, output.shared_nbytes)
        output.remove_old()
        return info

    def follow_up(self) -> CheckpointInfo:
        """See :class:`Content`: without a local tier nothing follows."""
        raise NotImplementedError

    def roll_back(self, error: BaseException) -> None:
        """See :class:`Content`."""
        self.output.discard()
        self.reporter.report_failed(error)

    def mark_returned(self) -> float:
        """Record that the call returns to the caller, and return for how many seconds it blocked."""
        return self.reporter.mark_returned()

    def _forward_event(self, event: Event) -> None:
        """Write an event into the journal, on rank 0, and call the listener."""
        entry = describe_event(event, time.time()) if self.share.session.rank == COORDINATOR_RANK else None
        if entry is not None:
            step = self.request.step
            append_entry(
                self.request.path,
                msgspec.structs.replace(
                    entry,
                    step=step if isinstance(step, int | float) else None,  # of a failed save, it may be anything
                    run=self.identity.run,
                    world_size=self.share.session.size,
                    hosts=self._hosts,
                    placement=self._placement,
                    incarnation=self.identity.incarnation,
                    sequence=self.identity.sequence,
                ),
            )
        self.request.on_event(event)

    def hash_replicas(self) -> bytes:
        """Return the digests of this rank's replicas. Each rank calls it in the vote that opens the output."""
        number = 0 if self.request.options.replica_check == "full" else self.cache.saves
        digests, seconds = self.share.writer.hash_replicas(number)
        if self.share.plan.replicas:
            self.reporter.record_replica_check(seconds)
        return digests

    def write_files(self, folder: Path, on_moved: OnBytesMoved) -> HashedResult:
        """See :class:`SavedContent`."""
        paths = [file.path for file in self.share.plan.files]
        return HashedResult(
            self.share.writer.write(folder, paths, self.share.staged, on_moved), self.share.captured.rank_values
        )

    def move_share(self, move: MoveRanges) -> bytes:
        """See :class:`SavedContent`."""
        move(*self.share.writer.ranges_to_upload(self.share.staged))
        return self.share.captured.rank_values

    def begin_commit(self, folder: Path | None = None, payloads: Sequence[bytes] = ()) -> None:
        """See :class:`SavedContent`."""
        del folder, payloads  # no rank leaves anything to rank 0
        self.reporter.begin_phase("commit")

    def make_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        """See :class:`SavedContent`."""
        step, metrics = self.request.manifest_numbers()
        return build_manifest(
            CheckpointLabel(self.request.tag, self.identity, self.started_at, self.share.session.size, step, metrics),
            files,
            str(torch.__version__),
        )

    def build_small_files(self, payloads: Sequence[bytes]) -> dict[str, bytes]:
        """See :class:`SavedContent`. ``payloads`` are the values of all ranks."""
        ranks_file = build_ranks_file(list(payloads), self._merged_values)
        state_file = build_state_file(self._merged_values, self.share.captured.shared_values)
        return {**self.share.captured.small_files, **self._hub_layouts(), STATE_FILE: state_file, RANKS: ranks_file}

    def _hub_layouts(self) -> Mapping[str, bytes]:
        """Return the layouts of models of transformers."""
        cache = self.cache
        if cache.hub_plan is not cache.plan:
            cache.hub_layouts, cache.hub_plan = self._build_hub_layouts(cache.plan), cache.plan
        return cache.hub_layouts

    def _build_hub_layouts(self, plan: SavePlan) -> Mapping[str, bytes]:
        models = model_components(self.request.training.model)
        pretrained = {slot: parts[0] for slot, parts in models.items() if dict(pretrained_files(parts))}
        if not pretrained:
            return {}
        from rankless.save.hub_layout import hub_layout_files  # noqa: PLC0415 - few models are of transformers

        return hub_layout_files(pretrained, plan, self._merged_values)
