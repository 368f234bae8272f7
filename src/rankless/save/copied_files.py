"""Rank 0's part of an incremental save into an object store: the store copies the unchanged files of the base.

Objects cannot be linked, but a store can copy them: no byte of an unchanged file leaves the host. Only files of frozen
parameters that torch has not seen change since the base was saved are looked at: to read samples of the others back
would take requests, and to hash them for nothing, a pass over the memory. As in a folder, every byte that is left out
was hashed for this save.

:mod:`rankless.save.object_output` makes one in the vote that opens the output, settles it in the vote "finding
unchanged bytes", and copies in the vote "completing the files", before the manifest is written. A file is copied only
with the ETag that it had when it was uploaded.

The first copy of a process is tried at once: if it fails, all is sent, and a store that refuses copies is not asked
again. If a later copy fails because the base was removed, the save fails, and the next one sends all. S3 reports the
CRC of a copy, Google its CRC-32C; Azure, Swift and Ceph report none. There, bytes of the base that the store has lost
are in the copies, too, until the next full save, and a load finds them.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec

from rankless.engine.integrity.block_sums import has_all_blocks
from rankless.engine.io.checkpoint_files import UnchangedBlocks
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.omitted_ranges import OmittedRanges
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import StorageError
from rankless.formats.safetensors import SafetensorsFile
from rankless.observe.warning import warn_or_log
from rankless.ondisk.data_files import DataFile
from rankless.ondisk.header import decode_header
from rankless.process.prepared_types import prepared
from rankless.save.base_checkpoint import KnownRun, UploadedBase, UploadedFile
from rankless.save.shared_files import SettledFiles
from rankless.save.shared_upload import begin_uploads
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import map_requests

#: The sizes in bytes of files that are copied. Smaller ones are sent as fast; S3 copies no larger ones in one request.
MIN_COPY_BYTES, _MAX_COPY_BYTES = 2**20, 5 * 2**30

_encode = msgspec.msgpack.Encoder().encode


@prepared
class BegunCopies(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's decision: the files, by number, that are copied, and the ids of the uploads of all files.

    All ranks decode it after the vote, and join the uploads.
    """

    copied: list[int]
    uploads: list[str]


class CopiedFiles(msgspec.Struct, dict=True):
    """The files of the base that the store copies into ``folder``: the :class:`SharedFiles` of an object store.

    ``numbers`` are the files, by number, that may be unchanged. ``known`` says whether the store copies objects.
    ``etags`` are the ETags of the copies that were made, by the number of the file.
    """

    base: UploadedBase
    folder: ObjectPath
    plan: SavePlan
    numbers: Sequence[int]
    notes: Mapping[str, str]
    known: KnownRun
    copied: list[int] = msgspec.field(default_factory=list)
    etags: dict[int, str] = msgspec.field(default_factory=dict)

    @property
    def base_path(self) -> Path:
        """See :class:`SharedFiles`."""
        return self.base.path

    @cached_property
    def crcs(self) -> Mapping[int, list[int]]:
        """See :class:`SharedFiles`."""
        return {
            tensor: crcs[name]
            for number in self.numbers
            for crcs in [self._crcs_of(self._base_file(number))]
            for tensor, name in self._tensors_of(number)
        }

    def _crcs_of(self, file: UploadedFile) -> Mapping[str, list[int]]:
        path = self.base.path / file.file.path
        return SafetensorsFile(path, decode_header(file.header, file.file.size, str(path))).crcs

    def settle(self, matching: Mapping[int, Collection[int]]) -> SettledFiles:
        """See :class:`SharedFiles`. If it is not known that the store copies objects, one file is copied now.

        If that fails, all files are sent.
        """
        unchanged = [number for number in self.numbers if self._is_unchanged(number, matching)]
        is_there = map_requests(self._is_there, unchanged)
        self.copied = [number for number, there in zip(unchanged, is_there, strict=True) if there]
        if self.known.makes_copies is None:
            try:
                self._copy(self.copied[:1])
            except StorageError as error:
                self.copied = []
                if error.errno == errno.ENOTSUP:
                    self._give_up(error)
        files = self.plan.files
        sent = [number for number in range(len(files)) if number not in self.copied]
        begun = begin_uploads({self.folder / files[number].path: files[number].size for number in sent}, self.notes)
        uploads = dict(zip(sent, begun, strict=True))
        omitted = {number: [ElementRange(0, files[number].size)] for number in self.copied}
        begun_copies = BegunCopies(self.copied, [uploads.get(number, "") for number in range(len(files))])
        return SettledFiles(omitted, _encode(begun_copies))

    def copy_all(self) -> None:
        """Copy the files that are not yet, when the others are complete.

        Raises ``StorageError``. Later saves send all files then, unless somebody has removed the base: else each second
        one could fail.

        Called in the vote "completing the files".
        """
        try:
            self._copy([number for number in self.copied if number not in self.etags])
        except StorageError as error:
            if error.errno != errno.ENOENT:
                self._give_up(error)
            raise

    def unchanged_blocks(self, omitted: OmittedRanges) -> UnchangedBlocks:
        """See :class:`SharedFiles`."""
        crcs = {
            tensor: dict(enumerate(self.crcs[tensor])) for number in omitted for tensor, _ in self._tensors_of(number)
        }
        return UnchangedBlocks(frozenset(omitted), crcs)

    def _copy(self, numbers: Sequence[int]) -> None:
        def copy(number: int) -> str:
            file, name = self._base_file(number), self.plan.files[number].path
            crc = int(file.record.crc64nvme, 16)
            return self.folder.store.copy_object(self.base.path / name, file.etag, self.folder / name, crc)

        self.etags |= dict(zip(numbers, map_requests(copy, numbers), strict=True))
        self.known.makes_copies = True if numbers else self.known.makes_copies

    def _give_up(self, error: StorageError) -> None:
        self.known.makes_copies = False
        warn_or_log(f"{error}. From now on, this process sends also the files that have not changed")

    def _is_unchanged(self, number: int, matching: Mapping[int, Collection[int]]) -> bool:
        entries = self.plan.files[number].entries
        return all(
            has_all_blocks(matching.get(tensor, ()), entries[name].nbytes) for tensor, name in self._tensors_of(number)
        )

    def _is_there(self, number: int) -> bool:
        """Return whether the base still has a file: it may have been removed."""
        with suppress(StorageError):
            etag = self.folder.store.find_version(self.base.path / self.plan.files[number].path)
            return (etag or "").strip('"') == self._base_file(number).etag.strip('"')
        return False

    def _base_file(self, number: int) -> UploadedFile:
        return self.base.files[self.plan.files[number].path]

    def _tensors_of(self, number: int) -> list[tuple[int, str]]:
        """Return the numbers and names of the tensors of a file."""
        return list(zip(self.plan.tensors_by_file[number], self.plan.files[number].entries, strict=True))


def can_be_copied(base: UploadedBase, file: DataFile) -> bool:
    """Return whether the base has a file with the same layout, of a size that is copied. Called on rank 0."""
    known = base.files.get(file.path)
    return known is not None and known.file == file and MIN_COPY_BYTES <= file.size <= _MAX_COPY_BYTES
