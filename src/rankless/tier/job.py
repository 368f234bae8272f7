"""The state of a run's local tier in one process: its slots, and the order of its saves.

After the first save or load, nothing of it needs the run directory: a save into the tier must not wait for storage.

:mod:`rankless.save.tier_content` and :mod:`rankless.save.tier_stage` ask it in saves, :mod:`rankless.load.tier_load` in
loads, and outputs ask it before and after a publication. Methods that say "on rank 0" are called in votes there; each
rank has its own slots. The caller's thread, the background threads of saves and of drains share it.

A job that wakes up after another one has announced itself does no harm: its drain fails with ``SupersededError`` before
or after the commit, its saves into the tier are retired, its load fails with ``StateError``. A checkpoint that it
publishes just then it removes again. If it is killed before that, or stopped in the very request that publishes (on a
file system, between the last look and the rename), the checkpoint stays, and is abandoned.

A tier holds one run. A second object for it that loads nothing goes on with this run; if it goes back by a tag, the
first one gets ``SupersededError``; if it loads another run's checkpoint, ``StateError`` is raised.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from rankless.errors import NoCheckpointError, RanklessError, StateError, StorageError, SupersededError, TagExistsError
from rankless.observe.warning import warn_caller
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.manifest import LARGEST
from rankless.run.catalog import CheckpointIdentity, list_checkpoints, list_checkpoints_strictly
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import Claim, JobHistory, announce, check_not_superseded, claim, numbering_of
from rankless.run.cleanup import delete_checkpoints
from rankless.run.history import Entry, KnownCheckpoint
from rankless.run.stored_history import read_history, read_token
from rankless.storage.posix import list_names
from rankless.storage.store import store_of
from rankless.tier.generation_catalog import list_offers
from rankless.tier.host_folder import TierFolder
from rankless.tier.job_text import name_job
from rankless.tier.part_names import GenerationKey
from rankless.tier.slots import Slot, Slots
from rankless.tier.tier_options import LocalTier


@dataclass(frozen=True)
class NextSave:
    """The decision about one save: its identity, and whether it is drained."""

    identity: CheckpointIdentity
    drains: bool


class TierJob:
    """The local tier of a run, as this process uses it."""

    def __init__(self, path: Path, run: Path) -> None:
        self.path, self.run = path, run
        self._lock, self._process = threading.Lock(), os.getpid()
        self._numbering = numbering_of(run)
        self._folder: TierFolder | None = None
        self._slots: Slots | None = None
        #: On rank 0: the incarnation that this job has claimed, and its run.
        self._incarnation, self._run_id = 0, ""
        #: On rank 0, the token of the object of this process that has claimed it.
        self._owner = ""
        #: On rank 0, the number of the newest announcement of this job, and whether it has looked since its last claim
        #: for a checkpoint to continue.
        self._announced, self._has_looked = 0, False
        #: The history when this process began to drain checkpoints that others have saved; ``None`` if it saves itself.
        self._followed: Entry | None = None
        #: A checkpoint of the tier that was loaded without taking over the folder.
        self._loaded: CheckpointInfo | None = None
        #: On rank 0, the names that are taken.
        self._tags: set[str] = set()
        self._newest_tag = ""
        #: On rank 0, the checkpoints in the run directory, as far as this job knows.
        self.durable: list[CheckpointInfo] = []
        self._undrained, self._drains, self._drained_at = 0, 0, time.monotonic()
        self._has_failed_drain = False
        #: The text that the folder knows this job by: the same on all ranks once it has the folder.
        self.job, self._has_folder = "", False
        #: The newest complete generation, and whether it is in the run directory.
        self.newest: GenerationKey | None = None
        self.is_drained = True

    @property
    def folder(self) -> TierFolder:
        """The folder of this host. Raises ``InvalidArgumentError`` or ``StorageError`` if it cannot be used."""
        self._forget_in_fork()
        if self._folder is None:
            self._folder = _open_folder(self.path, self.run)
        return self._folder

    def find_folder(self) -> TierFolder | None:
        """Return the folder of this host if a job has made it, else ``None``: a load that only looks makes none."""
        self._forget_in_fork()
        if self._folder is not None:
            return self._folder
        problem: StorageError | None = None
        for path in (self.path, _beside(self.path)):
            try:
                folder = TierFolder.find(path, self.run)
            except NoCheckpointError:
                continue
            except StorageError as error:
                problem = problem or error
            else:
                return _find_newer(_beside(self.path), folder, self.run) or folder
        if problem is not None:
            warn_caller(f"{problem}. Nothing is loaded from it")
        return None

    @property
    def slots(self) -> Slots:
        """The slots of this process."""
        folder = self.folder
        if self._slots is None:
            self._slots = Slots(folder)
        return self._slots

    def pin_generation(self, key: GenerationKey) -> list[Slot]:
        """Pin the slots of this process with parts of a generation, and return them."""
        return [] if self._slots is None else self._slots.pin_generation(key)

    def _forget_in_fork(self) -> None:
        """Open the folder anew in a forked process: slots, locks and drains belong to the process before.

        It goes on with the incarnation that was claimed, as other objects of the job do.
        """
        if self._process != os.getpid():
            self._process, self._folder, self._slots = os.getpid(), None, None
            self._lock, self._drains = threading.Lock(), 0
            self._has_folder, self.newest, self.is_drained = False, None, True

    @property
    def known_tags(self) -> frozenset[str] | None:
        """On rank 0, the names that are taken; ``None`` if the run directory was not read yet."""
        self._forget_in_fork()
        return frozenset(self._tags) if self._incarnation else None

    def announce(self, above: int) -> str:
        """Announce on rank 0 that this job looks into the tiers, with a number above ``above``. Return its text.

        From now on, older jobs drain nothing and take over no folder.
        """
        self._forget_in_fork()
        self._announced, self._has_looked = announce(self.run, above), True
        return name_job(self._announced, read_token(self.run), secrets.token_hex(8))

    def begin_incarnation(self, job: JobHistory, loaded: CheckpointInfo | None = None) -> None:
        """Claim an incarnation, on rank 0, for a job that has loaded the checkpoint that it continues, or nothing.

        ``loaded`` is a checkpoint that was loaded from the tier: its tag is taken.

        Raises ``SupersededError`` if a later job has announced itself, ``StateError`` if a checkpoint would be lost.
        """
        self.durable, has_looked = list_checkpoints_strictly(self.run), self._has_looked
        infos = [*self.durable, *([] if loaded is None else [loaded])]
        complete = [info for info in infos if info.status == "complete"]

        def check(newest: Entry) -> None:
            if self._announced and newest.announced > self._announced:
                raise SupersededError(f"another job has continued the run {self.run}")
            if job.base is None and not has_looked:  # else no rank has found anything whole
                self._check_nothing_is_lost(newest, complete)

        check(read_history(self.run))  # before the announcement: a job that is refused stops no other one
        if not self._announced:  # nothing was loaded
            self.job = self.announce(self.folder.find_newest_job())
        claimant = msgspec.structs.replace(job, tier=os.fsencode(self.path).decode(errors="replace"))
        claimed, history = claim(self.run, claimant, complete, check)
        self._incarnation, self._run_id, self._owner = claimed.incarnation, claimed.run, job.token
        self._has_looked = False
        highest = history.next_sequence(complete, claimed.run) - 1
        self._numbering.note(max([highest, *(key.sequence for key in self.folder.list_parts())]))
        # Of the history with this claim, which may have gone back: checkpoints that it abandons may be removed at any
        # time.
        taken = (info for info in infos if info.status != "complete" or info.is_copy or history.is_current(info))
        self._tags, self._drained_at = {info.tag for info in taken}, time.monotonic()
        if not store_of(self.run).is_remote:
            known = {info.tag for info in infos}
            self._tags |= list_names(self.run) - known  # a folder of the user's is no checkpoint, and is not replaced

    def _check_nothing_is_lost(self, history: Entry, durable: Sequence[CheckpointInfo]) -> None:
        """Raise ``StateError`` if only the tier has the newest checkpoint, and nothing has loaded it.

        The next save would remove it. An older one than the run directory has is not drained either.
        """
        newest = max((info.sequence for info in durable), default=0)
        for manifest in (one.manifest for one in list_offers(self.folder)):
            if manifest is None or not history.is_current(manifest):
                continue
            if manifest.sequence > newest:
                raise StateError(
                    f"the local tier {self.folder.path} has the checkpoint {manifest.tag!r} of an earlier job, which"
                    " was not loaded: load it first, with local= as well, run `rankless drain`, or pass another folder"
                )

    def follow(self) -> None:
        """Continue nothing, but note when a job does from now on: then this process must drain nothing any more."""
        self._followed = read_history(self.run)
        self._announced = self._followed.announced

    def plan_save(
        self, tag: str, job: JobHistory, options: LocalTier, is_forced: Callable[[CheckpointInfo], bool]
    ) -> NextSave:
        """Decide on a save, on rank 0. ``is_forced`` says of the new checkpoint whether it is drained in any case.

        Raises ``StorageError`` if nothing was drained for too long.

        It runs in the decision of the vote "preparing the save".
        """
        identity = self.choose_identity(job)
        self._check_age(options.max_undrained_seconds)
        self._undrained += 1
        info = CheckpointInfo(tag, self.run / tag, sequence=identity.sequence, run=identity.run, id=identity.id)
        is_due = self._undrained >= options.drain_every or self._has_failed_drain
        drains = (is_due and not self._drains) or is_forced(info)
        if drains:
            self._undrained, self._has_failed_drain = 0, False
        self._tags.add(tag)
        self._newest_tag = tag
        return NextSave(identity, drains=drains)

    def choose_identity(self, job: JobHistory) -> CheckpointIdentity:
        """Return the identity of the next save, on rank 0, which is newer than all others in the tier and the run."""
        if not self._incarnation:
            base, loaded = job.base, self._loaded
            is_loaded = base is not None and loaded is not None and loaded.id == base.id
            self.begin_incarnation(job, loaded if is_loaded else None)
        elif job.token != self._owner:
            self._admit(job)
        sequence = min(max(self._numbering.highest, job.sequence) + 1, LARGEST)
        self._numbering.note(sequence)
        return CheckpointIdentity(sequence, self._run_id, secrets.token_hex(8), self._incarnation, job.edits)

    def _admit(self, job: JobHistory) -> None:
        """Let another object of this process save, on rank 0.

        If it has loaded something since its last save, it claims an incarnation. If it has neither loaded nor saved
        anything, it goes on with the run of the others: a tier holds one. Raises ``SupersededError`` if the run went
        back without its checkpoints, and ``StateError`` if the tier has another run by now.
        """
        if job.claim is None:
            if job.base is not None:
                self.begin_incarnation(job)
            return
        check_not_superseded(self.run, read_history(self.run), job)
        if job.claim != Claim(self._run_id, self._incarnation):
            raise StateError(
                f"another object of this process goes on with another run in the local tier {self.path} of {self.run}: "
                "use one object for both, or pass a folder of its own to each"
            )

    def note_loaded(self, info: CheckpointInfo) -> None:
        """Note that a checkpoint of the tier was loaded, and that the folder was not taken over: a save may do that."""
        self._loaded = info

    def forget_tag(self, tag: str) -> None:
        """Note that a save has failed, so its tag is free."""
        self._tags.discard(tag)

    def find_later(self) -> GenerationKey | None:
        """Return the newest generation of this job on this host, if a process that was forked from this one made it.

        It is later than the newest one of this process then.
        """
        newest = self.newest
        with suppress(StorageError):  # the folder is lost
            keys = [key for key in self.folder.list_parts() if newest and key.incarnation == newest.incarnation]
            return max((key for key in keys if newest and key > newest), default=None)
        return None

    def forget_newest(self) -> None:
        """Note that the newest complete generation is not to be drained any more: a checkpoint has replaced it."""
        with self._lock:
            self.newest, self.is_drained = None, True

    def forget_undrained(self) -> None:
        """Note that the newest generation is lost before it was drained: its tag is free."""
        self.forget_newest()
        self.forget_tag(self._newest_tag)

    def note_durable(self, info: CheckpointInfo) -> None:
        """Note that a checkpoint was written into the run directory, and that others may have been removed there."""
        durable = self.durable
        if self._incarnation:
            with suppress(StorageError):  # known values stay known
                # Without the lock: storage may hang, and the next save must not wait for it.
                durable = list_checkpoints(self.run)
        with self._lock:
            self._drained_at = time.monotonic()
            if self._incarnation:
                self._tags -= {known.tag for known in self.durable} - {found.tag for found in durable}
                self._tags.add(info.tag)
                self.durable = durable

    def reopen_lost_folder(self) -> None:
        """Make a folder that was removed anew at its next use: its next generations are complete again."""
        self._forget_in_fork()
        if self._folder is not None and self._folder.is_lost():
            self._folder, self._slots, self._has_folder = None, None, False
            self.forget_newest()

    def take_over(self, job: str) -> None:
        """Take over the folder for this job. Rank 0 has chosen its text.

        Raises ``SupersededError`` if a later job has it.
        """
        self.folder.take_over(job, self.run)
        self.job, self._has_folder = job, True

    def is_replaced(self) -> bool:
        """Return whether another job has taken over the folder of this host, or removed it: nothing may be changed."""
        return self._has_folder and (self.folder.is_lost() or self.folder.is_owned_by_other(self.job))

    def check_not_replaced(self) -> None:
        """Raise ``SupersededError`` if another job has taken over the folder of this host.

        Raises ``StorageError`` if it was removed.
        """
        if self._has_folder and self.folder.is_lost():
            raise StorageError(errno.ENOENT, f"{self.folder.path} was removed while the job was running")
        self.check_owner()

    def check_owner(self) -> None:
        """Raise ``SupersededError`` if another job has taken over the folder of this host."""
        if self._has_folder and self.folder.is_owned_by_other(self.job):
            raise SupersededError(f"another job has continued the run {self.run}, and uses {self.folder.path} now")

    def take_slot(self, nbytes: int) -> Slot:
        """Return a slot as :meth:`Slots.take`. Raises the errors of :meth:`check_not_replaced`.

        A folder that was removed is made anew. Raises ``StorageError`` if there is only the makeshift one.

        Each rank calls it in the vote "preparing the save", and before copies and parity are made.
        """
        self.reopen_lost_folder()
        self.check_not_replaced()
        if self.folder.path.parent != self.path.parent:
            raise StorageError(f"there is no folder {self.path} that can be used")
        return self.slots.take(nbytes)

    def remove_generations(self, is_wanted: Callable[[GenerationKey], bool]) -> None:
        """Remove the generations that are not wanted, unless another job has taken over the folder.

        Generations that cannot be removed stay: they are older than the newest one, or retired, and a save that lacks
        room says so.
        """
        with suppress(StorageError):
            if not self.is_replaced():
                self.folder.remove_generations(is_wanted)

    def check_not_fenced(self, tag: str) -> None:
        """Raise ``SupersededError`` if another job has continued the run, on rank 0.

        :mod:`rankless.save.folder_output` calls it before it begins and before it renames,
        :mod:`rankless.save.object_output` before it publishes.
        """
        if self._is_fenced():
            raise SupersededError(f"another job has continued the run: {self.run / tag} stays in its local tier")

    def _is_fenced(self) -> bool:
        history, followed = read_history(self.run), self._followed
        if history.announced > self._announced:
            return True
        if followed is None:
            return history.has_continued(self._run_id, self._incarnation)
        return any(followed.has_other_branch(run, branch) for run, branch in history.runs.items())

    def check_replaces(self, path: Path, folder: Path) -> None:
        """Check on rank 0, before and after the checkpoint at ``path`` is replaced, that no other job has continued.

        ``folder`` is where the old checkpoint is: at ``path``, or, after it, aside. Raises ``SupersededError``, or
        ``TagExistsError`` so that the old one gets its name back.
        """
        if folder == path:
            self.check_not_fenced(path.name)
        elif self._is_fenced():
            raise TagExistsError(f"another job has continued the run meanwhile: {path} stays as it was")

    def check_published(self, info: CheckpointInfo) -> None:
        """Remove a checkpoint that was just published if another job has continued the run, on rank 0.

        This process may have been stopped after :meth:`check_not_fenced`. Then the checkpoint may be newer than all
        that the other job has saved since. Raises ``SupersededError``.
        """
        if self._is_fenced():
            if not read_history(self.run).is_current(info):
                list(delete_checkpoints([info]))
            raise SupersededError(f"another job has continued the run: {info.path} stays in its local tier")

    def check_not_superseded(self, saved: KnownCheckpoint, tag: str) -> None:
        """Raise ``SupersededError``, on rank 0, if another job went on without a checkpoint of this one."""
        if not read_history(self.run).is_current(saved):
            raise SupersededError(
                f"another job has continued the run without {self.run / tag}: it is not written there"
            )

    def begin_drain(self) -> None:
        """Note that a drain has begun."""
        with self._lock:
            self._drains += 1

    def end_drain(self, drained: GenerationKey | None, info: CheckpointInfo | None = None) -> None:
        """Note that a drain has ended; ``drained`` is the generation that it made durable, as ``info`` says."""
        if info is not None:
            self.note_durable(info)
        with self._lock:
            self._drains -= 1
            if drained is not None:
                self.is_drained = self.is_drained or drained == self.newest
            else:
                self._has_failed_drain = True

    def note_complete(self, key: GenerationKey) -> None:
        """Note that a generation is complete in the tier.

        Each rank calls it after the vote that has completed the generation.
        """
        with self._lock:
            self.newest, self.is_drained = key, False

    @property
    def undrained_seconds(self) -> float:
        """The seconds since something was drained."""
        return time.monotonic() - self._drained_at

    def _check_age(self, limit: float | None) -> None:
        if limit is not None and self.undrained_seconds > limit:
            raise StorageError(
                None,
                f"nothing was written to {self.run} for {self.undrained_seconds:.0f} seconds, and "
                f"max_undrained_seconds is {limit:g}: the checkpoints are in {self.path} only",
            )


def _open_folder(path: Path, run: Path) -> TierFolder:
    """Open the folder of a tier, or another one with a warning if it cannot be used.

    A job that is started again in the night must go on also if the folder is wrong on one of its hosts. If none next to
    it can be used either, a *makeshift* one among the files of the system that are temporary takes the parts that the
    load gets from other hosts. Saves do not use it: it may be small, or be on the system's disk.
    """
    beside = _beside(path)
    try:
        folder = TierFolder.open(path, run)
    except StorageError as error:
        reason = error
    else:
        return _find_newer(beside, folder, run) or folder
    with suppress(StorageError):
        folder = TierFolder.open(beside, run)
        warn_caller(
            f"{reason}. Until then the local tier of this host is {beside}, and no checkpoint is loaded that only "
            f"{path} has"
        )
        return folder
    digest = crc64(f"{path} {run}".encode())
    makeshift = Path(tempfile.gettempdir(), f"rankless.{os.getuid()}.{digest:016x}")
    folder = TierFolder.open(makeshift, run)
    warn_caller(f"{reason}. Until then this host saves nothing into its local tier")
    return folder


def _find_newer(beside: Path, folder: TierFolder, run: Path) -> TierFolder | None:
    """Return the folder that earlier jobs have used because ``folder`` could not be, if it has a newer checkpoint."""
    try:
        other = TierFolder.find(beside, run)
        if other.newest_key() <= folder.newest_key():
            return None
    except RanklessError:  # there is none, or it is of another run
        return None
    warn_caller(
        f"the local tier of this host is still {beside}, where an earlier job has saved while {folder.path} could not "
        f"be used. To use {folder.path} again, end the job, drain {beside} with `rankless drain`, and remove it"
    )
    return other


def _beside(path: Path) -> Path:
    """Return the folder that this user takes if ``path`` cannot be used.

    For example, ``/dev/shm/job.1000`` for ``/dev/shm/job`` and the user 1000.
    """
    return path.with_name(f"{path.name}.{os.getuid()}")


class TierJobs:
    """The local tiers of this process. Those with equal folders and run directories are the same.

    Each call has its own options: a job may load with other ones than it saves with.
    """

    def __init__(self) -> None:
        self._states: WeakValueDictionary[tuple[Path, Path], TierJob] = WeakValueDictionary()

    def get_state(self, path: Path, run: Path) -> TierJob:
        """Return the state of the tier in the folder ``path``."""
        state = self._states.get((path, run))
        if state is None:
            state = self._states[path, run] = TierJob(path, run)
        return state


tier_jobs = TierJobs()
