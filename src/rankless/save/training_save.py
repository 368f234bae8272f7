"""The common part of saves of a whole training state, wherever the checkpoint is stored."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.compare_values_by_digest import join_differing
from rankless.engine.io.staging import DeferredCopies
from rankless.engine.io.staging_memory import Arena
from rankless.engine.io.torn_snapshot import ALL_CHUNKS, SAMPLED_CHUNKS
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.formats.native import RANKS
from rankless.formats.native import STATE as STATE_FILE
from rankless.observe.events import Event
from rankless.observe.reporter import EventReporter
from rankless.observe.warning import warn_caller
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.ondisk.value_files import build_ranks_file, build_state_file
from rankless.run.catalog import CheckpointIdentity, next_identity
from rankless.run.journal import Placement, append_entry, describe_event, describe_placement
from rankless.run.scan import CheckpointInfo
from rankless.save.build_manifest import CheckpointLabel, build_manifest
from rankless.save.save_negotiation import SaveAgreement, describe_differing, name_differing, negotiate_save
from rankless.save.save_operation import SaveOperation
from rankless.save.save_request import SaveRequest
from rankless.state.model.hf_config import pretrained_files
from rankless.state.model.model_traversal import model_components
from rankless.state.step_only_tensors import step_only_tensors
from rankless.storage.links_and_clones import Sharing

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
    ``sharing`` is what is known about the file system, and ``has_checked_store`` whether an object store was asked if
    it honours conditions.
    """

    key: bytes = b""
    plan: SavePlan = EMPTY_PLAN
    saves: int = 0
    witness: int | None = None
    differing: bytes = b""
    host_names: Mapping[int, str] = msgspec.field(default_factory=dict)
    hub_layouts: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    hub_plan: SavePlan = EMPTY_PLAN
    sharing: Sharing = msgspec.field(default_factory=Sharing)
    has_checked_store: bool = False


class TrainingSave(SaveOperation[CheckpointInfo]):
    """A save of a training state as one checkpoint of a run."""

    def __init__(self, request: SaveRequest, ranks: RankGroup, cache: SavePlanCache, timeout: float) -> None:
        super().__init__(ranks, timeout)
        self._request, self._cache = request, cache
        self._merged_values: Mapping[str, Any] = {}
        self._identity, self._started_at, self._hosts = CheckpointIdentity(0, "", ""), 0.0, 0
        self._placement: Placement = ()
        #: Whether old checkpoints may be removed or hidden after the commit.
        self._removes_old = False
        self._reporter = EventReporter(
            self.path, self._forward_event, is_coordinator=self._session.rank == COORDINATOR_RANK, began=request.began
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

    @abstractmethod
    def _plan_and_open(self, agreement: SaveAgreement) -> None:
        """Plan, check that replicas are equal, and open the output. It ends in a vote."""

    @abstractmethod
    def _update_plan(self, agreement: SaveAgreement) -> None:
        """Plan the save, unless the plan of an earlier one is still right."""

    def _choose_identity(self) -> CheckpointIdentity:
        """Return the identity of the new checkpoint, on rank 0."""
        return next_identity(self._request.path, self._request.job)

    def _set_identity(self, identity: CheckpointIdentity) -> None:
        """Note the identity of the new checkpoint."""
        self._identity = identity

    @property
    def path(self) -> Path:
        """The path of the new checkpoint."""
        return self._request.path / str(self._request.tag)  # the tag is checked later, on all ranks together

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

    def _build_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        step, metrics = self._request.manifest_numbers()
        return build_manifest(
            CheckpointLabel(self._request.tag, self._identity, self._started_at, self._session.size, step, metrics),
            files,
            str(torch.__version__),
        )

    def _build_small_files(self, rank_values: Sequence[bytes]) -> dict[str, bytes]:
        """Return the files without tensor data, by name. ``rank_values`` are those of all ranks."""
        ranks_file = build_ranks_file(list(rank_values), self._merged_values)
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
