"""The drain of a generation that an earlier job has left in the local tier, after this one has loaded it.

The ranks of this job may be others, in another number. So each part is written by a rank of a host that holds it, as
the table of the part says.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.io.staging_memory import Arena
from rankless.errors import RanklessError, StorageError
from rankless.observe.events import Event, OnEvent
from rankless.observe.reporter import EventReporter
from rankless.observe.warning import warn_caller
from rankless.run.journal import append_entry, describe_event
from rankless.run.retention import Retention
from rankless.run.scan import CheckpointInfo
from rankless.save.drain_attempts import retry_drain
from rankless.save.save_operation import SaveOperation
from rankless.storage.aligned_memory import Bytes
from rankless.storage.mapped_file import map_to_read
from rankless.tier.assembled_generation import Assembly
from rankless.tier.job import TierJob
from rankless.tier.slots import Slot


@dataclass(frozen=True)
class DrainOptions:
    """The options of a drain: what happens if it fails, which checkpoints are kept after it, and who hears of it."""

    on_failure: str
    keep: Retention | None
    on_event: OnEvent


class GenerationDrain(SaveOperation[CheckpointInfo]):
    """The drain of an assembled generation, as a save without tensors of the caller."""

    def __init__(
        self, ranks: RankGroup, timeout: float, tier: TierJob, assembly: Assembly, options: DrainOptions
    ) -> None:
        super().__init__(ranks, timeout)
        self._tier, self._assembly, self._generation = tier, assembly, assembly.generation
        self._options = options
        self._label = assembly.generation.common.label
        self._reporter = EventReporter(
            self.path,
            self._forward_event,
            is_coordinator=self._session.rank == COORDINATOR_RANK,
            began=time.perf_counter(),
        )
        #: The slots of this process with parts of the generation.
        self._slots: list[Slot] = []
        #: The bytes of the parts that this rank writes: they stay mapped if a newer generation replaces this one.
        self._memory: dict[int, Bytes] = {}
        self._is_draining = False
        self.copied.set()

    @property
    def path(self) -> Path:
        """The path of the checkpoint in the run directory."""
        return self._tier.run / self._label.manifest.tag

    def _forward_event(self, event: Event) -> None:
        """Write an event into the journal, on rank 0, and call the listener."""
        entry = describe_event(event, time.time()) if self._session.rank == COORDINATOR_RANK else None
        if entry is not None:
            manifest, size = self._label.manifest, self._session.size
            append_entry(
                self._tier.run,
                msgspec.structs.replace(
                    entry,
                    step=manifest.step,
                    run=manifest.run,
                    world_size=size,
                    incarnation=manifest.incarnation,
                    sequence=manifest.sequence,
                ),
            )
        self._options.on_event(event)

    def prepare_save(self) -> None:
        """Map the parts that this rank writes."""
        self._tier.begin_drain()
        self._is_draining = True
        self._slots = self._tier.pin_generation(self._label.key)
        self.has_follow_up = True
        self._session.run_on_all("preparing the drain", self._map_parts)

    def _map_parts(self) -> None:
        for part, table in self._generation.tables.items():
            if self._assembly.rank_that_drains(part) == self._session.rank:
                try:
                    self._memory[part] = map_to_read(self._assembly.path_of(part), table.nbytes)
                except StorageError:
                    self._tier.check_not_replaced()  # a later job removes what it does not load
                    raise

    def stage_tensors(self, arena: Arena) -> None:
        """Do nothing: all bytes are in the tier."""

    def complete_copies(self) -> None:
        """Do nothing: all bytes are in the tier."""

    def write_and_commit(self) -> CheckpointInfo:
        """Return the description of the checkpoint, which is complete in the tier."""
        return CheckpointInfo.of(self.path, self._label.manifest)

    def mark_returned(self) -> float:
        """See :class:`SaveOperation`."""
        return self._reporter.mark_returned()

    def _roll_back(self, error: BaseException) -> None:
        if self._is_draining:
            self._end_drain(None)
        self._reporter.report_failed(error)

    def follow_up(self) -> CheckpointInfo:
        """Write the assembled bytes into the run directory, and try again if that fails."""
        drained: CheckpointInfo | None = None
        try:
            drained = retry_drain(self._drain_once, self._note_failure)
        except RanklessError as error:
            if self._options.on_failure == "raise":
                raise
            if self._session.rank == COORDINATOR_RANK:
                warn_caller(f"{self.path} could not be written, and stays in the local tier: {error}")
            return CheckpointInfo.of(self.path, self._label.manifest)
        else:
            return drained
        finally:
            self._end_drain(drained)

    def _end_drain(self, drained: CheckpointInfo | None) -> None:
        self._is_draining = False
        self._memory.clear()
        for slot in self._slots:
            self._tier.slots.unpin(slot)
        self._slots = []
        self._tier.end_drain(None if drained is None else self._label.key, drained)

    def _note_failure(self, error: RanklessError, attempt: int) -> None:
        self._discard_attempt()
        self._reporter.report_drain_failed(error, attempt, self._tier.undrained_seconds)

    @abstractmethod
    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """Write all parts into an output that no other attempt has, and commit it, unless the checkpoint is there."""

    @abstractmethod
    def _discard_attempt(self) -> None:
        """Remove what a failed attempt has written, unless it is committed."""
