"""The drain of a generation into a run in an object store.

The bytes are uploaded as those of a save: in parts of one size, each by one rank. Other ranks pass on what they hold of
a part.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.io import upload_parts
from rankless.engine.plan.save_plan import SavePlan
from rankless.engine.plan.writer_cells_of_parts import CellLayout, HeldBytes, plan_transfers
from rankless.errors import CorruptCheckpointError
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.run.pointers import find_tag
from rankless.run.scan import CheckpointInfo
from rankless.save.generation_drain import DrainOptions, GenerationDrain
from rankless.save.object_publication import ObjectPublication, PublicationChecks
from rankless.save.object_upload import ObjectUpload
from rankless.save.shared_upload import RankBytes, UploadRanks
from rankless.storage.object_path import ObjectPath
from rankless.tier.assembled_generation import Assembly
from rankless.tier.job import TierJob
from rankless.tier.upload_source import HeldParts

_encode = msgspec.msgpack.Encoder().encode


class ObjectDrain(GenerationDrain):
    """The drain of an assembled generation into a run in an object store."""

    def __init__(  # noqa: PLR0917 - as any drain, and the run
        self,
        run: ObjectPath,
        ranks: RankGroup,
        timeout: float,
        tier: TierJob,
        assembly: Assembly,
        options: DrainOptions,
    ) -> None:
        super().__init__(ranks, timeout, tier, assembly, options)
        self._run = run
        self._publication: ObjectPublication | None = None

    def _discard_attempt(self) -> None:
        if self._publication is not None:
            self._publication.discard()
            self._publication = None

    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """See :class:`GenerationDrain`. Each attempt has a folder of its own: no two processes write one object."""
        session, label = self._session, self._label.manifest
        plan, ranks = self._plan_upload(), UploadRanks(self._ranks, session, attempt)

        def begin_uploads(_: list[bytes]) -> bytes:
            entry = find_tag(self._run, label.tag)
            if entry is not None and entry.names_checkpoint(label.id):
                return _encode(("", []))
            self._tier.check_not_fenced(label.tag)
            self._publication = publication = self._open_publication(secrets.token_hex(8))
            return _encode((publication.folder_id, ObjectUpload(publication.folder, plan, ranks).begin(label.id)))

        _, raw = session.vote("preparing the drain", lambda: None, lambda _: b"", begin_uploads)
        folder_id, uploads = msgspec.msgpack.decode(raw, type=tuple[str, list[str]])
        if not folder_id:  # it is there already
            return CheckpointInfo.of(self.path, label)
        publication = self._publication or self._open_publication(folder_id)
        upload = ObjectUpload(publication.folder, plan, ranks)
        upload.join(uploads)
        self._reporter.begin_phase("write")
        upload.send_parts(
            self._read_bytes, self._build_small_files, self._reporter.progress_counter("save", self._nbytes).add
        )
        committed = upload.finish(self._make_manifest, lambda finished: self._publish(publication, finished))
        info = CheckpointInfo.of(publication.folder, committed, label.tag)
        self._reporter.report_saved(self.path, info.step, info.nbytes, 0)
        return info

    def _open_publication(self, folder_id: str) -> ObjectPublication:
        tier, label = self._tier, self._label.manifest
        tag = label.tag
        checks = PublicationChecks(lambda: tier.check_not_fenced(tag), lambda: tier.check_not_superseded(label, tag))
        return ObjectPublication(self._run, tag, folder_id, checks)

    def _plan_upload(self) -> SavePlan:
        """Return the plan of this rank: the files, and the bytes that ranks pass on."""
        plan, session = self._generation.plan, self._session
        rows = [table.rows for table in self._generation.tables.values()]
        holders = [self._assembly.rank_that_drains(part) for part in self._generation.tables]
        files, starts, sizes = (
            np.concatenate([column.astype(np.int64) for column in columns])
            for columns in (
                [row.file for row in rows],
                [row.offset for row in rows],
                [row.stop - row.start for row in rows],
            )
        )
        ranks = np.repeat(np.array(holders, np.int64), [len(row.file) for row in rows])
        held = HeldBytes(files, starts, sizes, ranks)
        moved = plan_transfers(held, CellLayout(plan.files, upload_parts.GRAIN, session.size), session.rank)
        return replace(
            plan,
            sent=moved.sent,
            received=moved.received,
            needs_exchange=moved.needs_exchange,
            rank_order=range(session.size),
        )

    @property
    def _nbytes(self) -> int:
        return sum(self._generation.tables[part].nbytes for part in self._memory)

    def _read_bytes(self) -> RankBytes:
        held = HeldParts(self._generation.tables, self._memory)
        return RankBytes(held.file_ranges, lambda _: held, b"")

    def _build_small_files(self, _: Sequence[bytes]) -> Mapping[str, bytes]:
        return self._generation.common.small_files

    def _make_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        """Return the manifest. Raises ``CorruptCheckpointError`` if other bytes were sent than the tables describe."""
        self._reporter.begin_phase("commit")
        expected = self._generation.manifest
        wrong = [name for name, record in files.items() if expected.files.get(name) != record]
        if wrong:
            raise CorruptCheckpointError(f"{wrong[0]} of {self.path} has changed in the local tier")
        return expected

    def _publish(self, publication: ObjectPublication, finished: Manifest) -> Manifest:
        published = publication.publish(finished, overwrite=self._label.replaces)
        publication.remove_old_checkpoints(finished, self._options.keep, corrupt=())
        return published

    def _roll_back(self, error: BaseException) -> None:
        if self._session.rank == COORDINATOR_RANK:
            self._discard_attempt()
        super()._roll_back(error)
