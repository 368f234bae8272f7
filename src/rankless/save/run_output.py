"""The interface between a save and the run that it writes into: one attempt to write a checkpoint, and to publish it.

A save and a drain define the content (:class:`SavedContent`). An output says where, and how it appears at once:
:class:`rankless.save.folder_output.RunFolderOutput` by a rename, :class:`rankless.save.object_output.RunObjectOutput`
by a pointer. Neither side knows which class the other one is.

:mod:`rankless.save.training_content` and :mod:`rankless.save.generation_content` open one on every rank. The order of
the calls must stay: prepare, begin, join, omit, verify, write, then the removal of old checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from rankless.engine.comm.session import WritingRanks
from rankless.engine.integrity.crc_gather import HashedResult
from rankless.engine.io.requests import MoveRanges, OnBytesMoved, ProviderOf
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.save_plan import SavePlan
from rankless.engine.plan.writer_cells import CellGrain
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import JobHistory
from rankless.run.corruption import CorruptRecord
from rankless.run.history import KnownCheckpoint
from rankless.run.retention import Retention
from rankless.save.base_checkpoint import KnownRun, TensorVersions
from rankless.storage.object_path import ObjectPath

if TYPE_CHECKING:
    from rankless.tier.job import TierJob


#: The records of files in a manifest, by path.
Records = Mapping[str, FileRecord]

NO_RECORDS: Records = {}


class NewTag(msgspec.Struct, frozen=True):
    """The tag of a run that a checkpoint is to get, and the rules for taking the tag.

    ``overwrite``: it replaces the checkpoint that has the tag, unless that is newer. ``corrupt``: checkpoints that a
    load found corrupt: it may take their tags. ``keep``: which checkpoints are kept after it; for example ``step_20``
    with ``KeepLast(1)`` removes ``step_10``. ``job``: the job's knowledge of the history. ``tier``: the tier that the
    bytes come from; then no other job may have continued the run. ``incremental``: it shares unchanged bytes with the
    checkpoint before, unless its number is a multiple of ``keep_full_every``.
    """

    run: Path
    tag: str
    overwrite: bool = False
    corrupt: frozenset[CorruptRecord] = frozenset()
    keep: Retention | None = None
    job: JobHistory | None = None
    tier: TierJob | None = None
    incremental: bool = False
    keep_full_every: int = 1

    @property
    def path(self) -> Path:
        """The path of the checkpoint, as its users name it."""
        return self.run / str(self.tag)  # the tag is checked later, on all ranks together


class LiveTensors(msgspec.Struct, frozen=True):
    """The tensors of a rank while a save is prepared: an output may compare them with the checkpoint before.

    ``frozen`` are the parameters without gradients, with their ``versions``. ``number`` counts the saves of this plan.
    """

    tensors: Mapping[tuple[str, str], TensorBytes]
    frozen: Collection[tuple[str, str]]
    versions: TensorVersions
    number: int


class SavedContent(Protocol):
    """The part of a save that an output asks for bytes and files."""

    def write_files(self, folder: Path, on_moved: OnBytesMoved) -> HashedResult:
        """Write this rank's bytes into the files in a folder, inside the vote on the writing."""

    def move_share(self, move: MoveRanges) -> bytes:
        """Call ``move`` once, with the bytes that this rank uploads or passes on, inside the vote on the writing.

        Return the values of this rank.
        """

    def build_small_files(self, payloads: Sequence[bytes]) -> Mapping[str, bytes]:
        """Return the files without tensor data, by name, on rank 0. For example, ``state.json``."""

    def begin_commit(self, folder: Path | None = None, payloads: Sequence[bytes] = ()) -> None:
        """Note on rank 0 that all ranks have written theirs.

        In a ``folder``, write the bytes that they left to rank 0: :meth:`write_files` has returned the ``payloads``.
        """

    def make_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        """Return the manifest, on rank 0."""


class RunOutput(Protocol):
    """One attempt to write a checkpoint into a run. All ranks have one, and call :meth:`write` together.

    Rank 0 decides in the vote that prepares a save or a drain: there all ranks call :meth:`prepare`, and rank 0
    :meth:`begin`. After the vote all ranks call :meth:`join` with the bytes that :meth:`begin` returned.
    """

    @property
    def grain(self) -> CellGrain | None:
        """The pieces of files that one rank must write; ``None`` if any ranks of a host may write side by side."""

    @property
    def shared_nbytes(self) -> int:
        """The bytes of tensors that the checkpoint shares with the one before."""

    def prepare(
        self,
        plan: SavePlan,
        tensors: LiveTensors | None = None,
        witness: int | None = None,
        bytes_of: ProviderOf | None = None,
    ) -> bytes:
        """Take the plan of this rank. Return the bytes that rank 0 must know of this rank to begin.

        With ``tensors``, bytes that the checkpoint before has may be shared. ``bytes_of`` are the bytes of the plan's
        file ranges, if all of them are there and never change: a drain's. ``witness`` is a rank on another host than
        rank 0, if there is one.
        """

    def is_committed(self, checkpoint_id: str) -> bool:
        """Return whether the run has the checkpoint under the tag, on rank 0."""

    def begin(self, saved: KnownCheckpoint, posted: Sequence[bytes], records: Records = NO_RECORDS) -> bytes:
        """Create the new files or objects, on rank 0. Return the bytes that all ranks must know of them.

        ``posted`` are the results of :meth:`prepare` of all ranks; none if nothing is shared. ``records`` are the
        records of files that were hashed before, as a drain's: such a file may be shared if an earlier checkpoint has
        the record. Then all ranks compare their bytes with that file.
        """

    def join(self, begun: bytes) -> None:
        """Take part in the output that rank 0 has begun."""

    def omit_unchanged(self, *, trusts_versions: bool) -> SavePlan:
        """Return the plan without the bytes that need not be written. It may end in a vote.

        If it ``trusts_versions``, frozen parameters that torch has not seen change are trusted for now.

        All ranks call it after :meth:`join`, in the thread that prepares.
        """

    def verify_trusted(self) -> None:
        """Raise ``TornSnapshotError`` on all ranks if a tensor that was trusted has changed. It may end in a vote.

        All ranks call it before :meth:`write`, in the thread that saves.
        """

    def write(self, content: SavedContent, on_moved: OnBytesMoved) -> CheckpointInfo:
        """Write all files, publish the checkpoint on rank 0, and return its description. It ends in votes.

        ``on_moved`` counts the bytes that this rank writes or sends.
        """

    def remove_old(self) -> None:
        """Remove the replaced checkpoint, and all that are not kept, after the commit: on rank 0. No rank waits for it.

        It raises nothing, or rank 0 alone would fail: the checkpoint is committed. A failure warns.
        """

    def discard(self) -> None:
        """Remove the written files, after a failure, unless they are committed or that is unknown.

        Each rank calls it in the rollback; only rank 0 has something to remove.
        """


def open_output(new: NewTag, ranks: WritingRanks, known: KnownRun) -> RunOutput:
    """Return an output for a run. ``known`` is this process's knowledge about it. Nothing is created.

    The modules of each kind are imported if it is used.

    Each rank calls it for itself, once for each attempt.
    """
    if isinstance(new.run, ObjectPath):
        from rankless.save.object_output import RunObjectOutput  # noqa: PLC0415

        return RunObjectOutput(new, new.run, ranks, known)
    from rankless.save.folder_output import RunFolderOutput  # noqa: PLC0415

    return RunFolderOutput(new, ranks, known)
