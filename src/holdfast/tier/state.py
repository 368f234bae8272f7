"""What a process knows of the local tier of a run: its slots, and the order of its saves.

After the first save or load, nothing of it needs the run directory: a save into the tier must not wait for storage.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from holdfast.errors import StorageError
from holdfast.ondisk.manifest import LARGEST
from holdfast.run.catalog import CheckpointIdentity, cached_checkpoints, next_identity
from holdfast.tier.epochs import claim_epoch, read_epochs
from holdfast.tier.folder import TierFolder
from holdfast.tier.options import LocalTier
from holdfast.tier.part import GenerationKey
from holdfast.tier.slots import Slots


@dataclass(frozen=True)
class NextSave:
    """The decision about one save: its epoch and identity, and whether it is drained."""

    epoch: int
    identity: CheckpointIdentity
    drains: bool


class TierState:
    """The local tier of a run, as this process uses it."""

    def __init__(self, options: LocalTier, run: Path) -> None:
        self.options, self.run = options, run
        self._lock, self._process = threading.Lock(), 0
        self._opened: tuple[TierFolder, Slots] | None = None
        self._reset()

    def _reset(self) -> None:
        #: On rank 0: the epoch of this job, its newest sequence number and run, and the tags that are taken.
        self._epoch, self._sequence, self._run_id = 0, 0, ""
        self._tags: set[str] = set()
        self._undrained, self._drains, self._drained_at = 0, 0, time.monotonic()
        #: The newest complete generation, and whether it is in the run directory.
        self.newest: GenerationKey | None = None
        self.is_drained = True

    @property
    def folder(self) -> TierFolder:
        """The folder of this host. Raises ``InvalidArgumentError`` or ``StorageError`` if it cannot be used."""
        return self._open()[0]

    @property
    def slots(self) -> Slots:
        """The slots of this process."""
        return self._open()[1]

    def _open(self) -> tuple[TierFolder, Slots]:
        if self._opened is None or self._process != os.getpid():
            if self._process:  # a forked process continues nothing
                self._reset()
            folder = TierFolder.open(self.options.path, self.run)
            self._opened, self._process = (folder, Slots(folder)), os.getpid()
        return self._opened

    @property
    def known_tags(self) -> frozenset[str] | None:
        """On rank 0, the tags that are taken; ``None`` if the run directory was not read yet."""
        return frozenset(self._tags) if self._epoch else None

    def begin_epoch(self, start: int, run_id: str, tags: Mapping[str, int]) -> None:
        """Claim an epoch, on rank 0, that continues from the checkpoint with the sequence number ``start``.

        ``tags`` are those that are taken, with their sequence numbers.
        """
        self._epoch = claim_epoch(self.run, start)
        self._sequence, self._run_id = max([start, *tags.values()]), run_id
        self._tags, self._drained_at = set(tags), time.monotonic()

    def follow_epochs(self) -> None:
        """Continue nothing, but note when a job does from now on: then this process must drain nothing any more."""
        self._epoch = max(read_epochs(self.run), default=0)

    def plan_save(self, tag: str, runs: frozenset[str], *, is_forced: bool) -> NextSave:
        """Decide on a save, on rank 0. Raises ``StorageError`` if nothing was drained for too long."""
        if not self._epoch:
            identity = next_identity(self.run, runs)
            tags = {info.tag: info.sequence for info in cached_checkpoints(self.run)}
            self.begin_epoch(identity.sequence - 1, identity.run, tags)
        self._check_age()
        self._run_id = self._run_id or secrets.token_hex(8)
        self._sequence = min(self._sequence + 1, LARGEST)
        self._undrained += 1
        drains = is_forced or (self._undrained >= self.options.drain_every and not self._drains)
        if drains:
            self._undrained = 0
        self._tags.add(tag)
        return NextSave(
            self._epoch, CheckpointIdentity(self._sequence, self._run_id, secrets.token_hex(8)), drains=drains
        )

    def forget_tag(self, tag: str) -> None:
        """Note that a save has failed, so its tag is free."""
        self._tags.discard(tag)

    def is_fenced(self) -> bool:
        """Return whether another job has continued the run, on rank 0."""
        return max(read_epochs(self.run), default=0) > self._epoch

    def begin_drain(self) -> None:
        """Note that a drain has begun."""
        with self._lock:
            self._drains += 1

    def end_drain(self, drained: GenerationKey | None) -> None:
        """Note that a drain has ended; ``drained`` is the generation that it made durable."""
        with self._lock:
            self._drains -= 1
            if drained is not None:
                self._drained_at = time.monotonic()
                self.is_drained = self.is_drained or drained == self.newest
            else:
                self._undrained = self.options.drain_every

    def note_complete(self, key: GenerationKey) -> None:
        """Note that a generation is complete in the tier."""
        with self._lock:
            self.newest, self.is_drained = key, False

    @property
    def undrained_seconds(self) -> float:
        """The seconds since something was drained."""
        return time.monotonic() - self._drained_at

    def _check_age(self) -> None:
        limit = self.options.max_undrained_seconds
        if limit is not None and self.undrained_seconds > limit:
            raise StorageError(
                None,
                f"nothing was written to {self.run} for {self.undrained_seconds:.0f} seconds, and "
                f"max_undrained_seconds is {limit:g}: the checkpoints are in {self.options.path} only",
            )


class TierStates:
    """The local tiers of this process. Those with equal options and run directories are the same."""

    def __init__(self) -> None:
        self._states: WeakValueDictionary[tuple[LocalTier, Path], TierState] = WeakValueDictionary()

    def get_state(self, options: LocalTier, run: Path) -> TierState:
        """Return the state of a tier."""
        state = self._states.get((options, run))
        if state is None:
            state = self._states[options, run] = TierState(options, run)
        return state


tier_states = TierStates()
