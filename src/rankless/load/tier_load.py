"""The part of a load that concerns the local tier: the hosts' parts, and the bytes that they send to each other.

1. All ranks tell which parts their hosts have. Rank 0 knows then which generations are complete, and selects.
2. The tables of all parts of the selected generation are sent to all ranks, which plan their reads.
3. Each host gets the bytes that its ranks need and that are in parts on other hosts. Meanwhile the ranks of each host
   verify its parts. If one is corrupt, the generation is assembled again without it: a copy on another host, or a part
   that is computed from parity, takes its place. After that, the load is an ordinary one, from files of the host.

:mod:`rankless.load.fallback` and :mod:`rankless.load.load_operation` call it on every rank, in the thread of the
caller; ``RunDirectory.drain`` assembles with it, too. Rank 0 claims only when all ranks have put the values in place,
and other generations are removed only after the claim.

All ranks get all tables, which are megabytes with thousands of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import CorruptCheckpointError, StorageError
from rankless.load.part_assembler import PartAssembler
from rankless.load.part_fetch import PartFetch
from rankless.load.rank_reads import Reads
from rankless.load.tier_generations import TierHosts, gather_hosts, look_at_hosts, take_over
from rankless.observe.warning import warn_caller
from rankless.ondisk.manifest import Manifest
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import JobHistory, LoadedBase
from rankless.storage.posix import remove_file
from rankless.tier.assembled_generation import Assembly
from rankless.tier.generation_catalog import LocalCheckpoint
from rankless.tier.generation_reader import GenerationReader
from rankless.tier.job import TierJob
from rankless.tier.part_names import GenerationKey
from rankless.tier.parts_in_run import CollectedParts


class TierLoad:
    """The local tier in one load, over all attempts."""

    def __init__(self, tier: TierJob, ranks: RankGroup, timeout: float, *, resumes: bool) -> None:
        """``resumes``: the training goes on from the loaded state. Otherwise the load only looks into the tier."""
        self.tier, self._ranks, self._timeout = tier, ranks, timeout
        self._resumes = resumes
        self._hosts = TierHosts((), ())
        self._assembler: PartAssembler | None = None
        #: The generation that was loaded last, or tried.
        self.assembly: Assembly | None = None

    @property
    def local(self) -> Sequence[LocalCheckpoint]:
        """On rank 0, the complete generations, oldest first."""
        return self._hosts.local

    @property
    def reads_again(self) -> bool:
        """True if this rank can read each byte of the checkpoint."""
        return self.assembly is None or not self.assembly.is_spread

    def gather(self) -> None:
        """Let all ranks tell which generations their hosts have.

        If the training goes on, an earlier job that is still alive changes none of them from now on.
        """
        if self._resumes:
            self._hosts = take_over(self.tier, self._ranks, self._timeout)
            return
        session = self._ranks.open_session(self._timeout)
        self._hosts = look_at_hosts(self.tier, session)
        session.leave()

    def assemble(self, session: Session, key: GenerationKey) -> None:
        """Collect the tables of a generation. Raises ``CorruptCheckpointError`` on all ranks if a part is lost."""
        if self._assembler is None or self._assembler.key != key:
            self._assembler = PartAssembler(self.tier, self._ranks, self._hosts, key)
        self.assembly = self._assembler.assemble(session)

    def assemble_latest(self, key: GenerationKey) -> None:
        """Assemble and verify the generation that this job has saved last.

        It is the one with this key, or a later one of a process that was forked from one of this job. Raises
        ``SupersededError`` if parts are lost because another job uses the folder of a host now.
        """
        session = self._ranks.open_session(self._timeout)
        later = self._find_later(session)
        if later is not None:
            try:
                self._assemble(session, later)
            except (CorruptCheckpointError, StorageError):  # that process has died before all of it was there
                session = self._ranks.open_session(self._timeout)
            else:
                self.tier.note_complete(later)
                return
        try:
            self._assemble(session, key)
        except CorruptCheckpointError:
            session = self._ranks.open_session(self._timeout)
            session.run_on_all("looking for another job that uses the local tier", self.tier.check_owner)
            session.leave()
            raise

    def _find_later(self, session: Session) -> GenerationKey | None:
        """Return the newest generation of this job that is later than all of its processes' own, on any host."""

        def choose(posted: list[bytes]) -> bytes:
            keys = [msgspec.msgpack.decode(raw, type=GenerationKey | None) for raw in posted]
            return msgspec.msgpack.encode(max((key for key in keys if key is not None), default=None))

        _, raw = session.vote(
            "looking for later checkpoints of the job", self.tier.find_later, msgspec.msgpack.encode, choose
        )
        return msgspec.msgpack.decode(raw, type=GenerationKey | None)

    def _assemble(self, session: Session, key: GenerationKey) -> None:
        self._hosts = gather_hosts(self.tier, session)
        self._assembler = PartAssembler(self.tier, self._ranks, self._hosts, key)
        session.run_on_all("verifying the local tier", self._assembler.verify_share)
        self.assembly = self._assembler.assemble(session)
        session.leave()

    def open_reader(self, path: Path, keys: Mapping[str, str]) -> GenerationReader:
        """Return the reader of the assembled generation."""
        assembly = self._require_assembly()
        paths = {part: assembly.path_of(part) for part in assembly.places}
        return GenerationReader(path, assembly.generation, paths, keys=keys)

    def fetch(self, session: Session, plan: Reads) -> bool:
        """Get the bytes that the ranks of this host will read and that are in parts on other hosts.

        The parts are verified meanwhile, once. Return false if some are corrupt: then the generation must be assembled
        again.
        """
        assembler = self._require_assembler()
        verify = None if assembler.is_verified else assembler.verify_share
        is_intact = PartFetch(self._ranks, session, self._require_assembly()).run(plan, verify)
        assembler.is_verified = True
        return is_intact

    def remove_fetched(self) -> None:
        """Remove the bytes that this host got from others. All its ranks have read them."""
        for path in {} if self.assembly is None else self.assembly.fetched.values():
            with suppress(StorageError):  # another rank of this host has removed it
                remove_file(path)

    def finish(
        self, session: Session, manifest: Manifest | None, key: GenerationKey | None, base: LoadedBase | None
    ) -> None:
        """Claim an incarnation that continues from the loaded checkpoint, and remove all other generations.

        If the training does not go on, only note the loaded generation: a save may continue from it later.
        """
        self.remove_fetched()
        if self._resumes:
            self._begin_incarnation(session, manifest, key, base)
        elif manifest is not None and key is not None:
            self.tier.note_loaded(CheckpointInfo.of(self.tier.run / manifest.tag, manifest))
        if self._hosts.unreadable:
            warn_caller(f"ignored in the local tier: {'; '.join(dict.fromkeys(self._hosts.unreadable))}")
        problems = () if self.assembly is None or key is None else self.assembly.problems
        if problems and session.rank == COORDINATOR_RANK:
            warn_caller(f"copies of other hosts were used in place of corrupt parts: {'; '.join(problems)}")

    def _begin_incarnation(
        self, session: Session, manifest: Manifest | None, key: GenerationKey | None, base: LoadedBase | None
    ) -> None:

        def begin(_: list[bytes]) -> bytes:
            is_local = manifest is not None and key is not None
            loaded = CheckpointInfo.of(self.tier.run / manifest.tag, manifest) if is_local and manifest else None
            job = JobHistory()
            if base is not None:
                job.note_loaded(base, resumes=True)
            self.tier.begin_incarnation(job, loaded)
            CollectedParts.of(self.tier.run).remove_outdated(self.tier.run)
            return b""

        session.vote("claiming an incarnation", lambda: None, lambda _: b"", begin)
        self.tier.forget_newest()
        self.tier.remove_generations(lambda one: one == key)

    @property
    def problems(self) -> tuple[str, ...]:
        """Descriptions of the corrupt parts that were not used."""
        return () if self.assembly is None else tuple(self.assembly.problems)

    def _require_assembly(self) -> Assembly:
        if self.assembly is None:
            raise StorageError(None, "no generation was assembled: this is a bug of rankless")
        return self.assembly

    def _require_assembler(self) -> PartAssembler:
        if self._assembler is None:
            raise StorageError(None, "no generation was assembled: this is a bug of rankless")
        return self._assembler
