"""Rank 0's part of a save: a staging directory with files of the final size, and its publication.

A directory with its final name is complete: it appears by one rename, after everything in it is durable.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.io.requests import Fragments
from holdfast.engine.plan.save_plan import SavePlan
from holdfast.errors import RankMismatchError, StorageError, TagExistsError
from holdfast.ondisk import blocks, manifest
from holdfast.ondisk.blocks import Fragment
from holdfast.ondisk.files import DataFile, build_index, index_path
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.storage import directories, posix
from holdfast.storage.direct_io import BufferedWriter
from holdfast.storage.directories import DirectoryLock

#: ``{path inside the checkpoint: contents}``.
SmallFiles = Mapping[str, bytes]

#: Builds the manifest of the given files.
MakeManifest = Callable[[dict[str, FileRecord]], Manifest]

#: The most attempts to replace a checkpoint while other processes change it.
_ATTEMPTS = 100


@dataclass(frozen=True)
class ReplacePolicy:
    """The paths and the check for replacing a checkpoint.

    The old checkpoint is renamed to ``displaced_path``, and to ``removal_path`` when it is deleted; both names are
    hidden. ``check_replaceable`` raises ``TagExistsError`` if the checkpoint in a directory must keep its name.
    """

    displaced_path: Path
    removal_path: Path
    check_replaceable: Callable[[Path], None]


@dataclass(frozen=True)
class StagingDirectory:
    """The hidden directory of a save in progress, and the plan of the files in it."""

    folder: Path
    plan: SavePlan

    def create_directory(self) -> DirectoryLock:
        """Create the directory, and its data files with their final sizes. After a failure nothing is left of it.

        The returned lock must be held until the save has ended: it shows other processes that the save is in progress.
        """
        posix.make_durable_directory(self.folder.parent)
        directories.check_space(self.folder.parent, sum(file.size for file in self.plan.files))
        lock = None
        try:
            lock = directories.create_locked(self.folder)
            for file in self.plan.files:
                posix.make_parents(self.folder, file.path)
                posix.allocate_space(self.folder / file.path, file.size)
        except BaseException:
            self.remove_directory()
            if lock is not None:
                lock.close()
            raise
        return lock

    def finalize(self, fragments: Fragments, small_files: SmallFiles, make_manifest: MakeManifest) -> Manifest:
        """Write the headers, indexes, small files and the manifest, and make them durable; the data is durable already.

        ``fragments`` are those of all ranks. Raises ``RankMismatchError`` if they leave a gap in a tensor.
        """
        records = dict(self._finish_data(fragments))
        indexes = {index_path(group): build_index(files) for group, files in self.plan.groups.items() if len(files) > 1}
        for name, data in sorted({**indexes, **small_files}.items()):
            posix.make_parents(self.folder, name)
            posix.write_small(self.folder / name, data)
            records[name] = FileRecord(len(data), f"{blocks.crc64(data):016x}")
        finished = make_manifest(dict(sorted(records.items())))
        posix.write_small(self.folder / manifest.NAME, manifest.encode_manifest(finished))
        for folder in sorted({parent for name in records for parent in Path(name).parents}, reverse=True):
            posix.fsync_directory(self.folder / folder)
        return finished

    def publish(self, final: Path) -> None:
        """Rename the directory to its final name. Raises ``TagExistsError`` if that exists."""
        directories.rename_noreplace(self.folder, final)

    def publish_replacing(self, final: Path, policy: ReplacePolicy) -> None:
        """Rename the directory to its final name, and replace a checkpoint of that name.

        Other processes may replace or remove the same checkpoint meanwhile.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            policy.check_replaceable(final)
            try:
                if posix.path_exists(final):
                    directories.exchange_directories(self.folder, final, policy.displaced_path)
                    self._undo_replace(final, policy)
                else:
                    directories.rename_noreplace(self.folder, final)
            except (TagExistsError, StorageError) as error:
                is_changed = isinstance(error, TagExistsError) or error.errno == errno.ENOENT
                if not is_changed or attempt == _ATTEMPTS:
                    raise
                _drop_displaced(final, policy)
            else:
                return

    def _undo_replace(self, final: Path, policy: ReplacePolicy) -> None:
        """Swap back if a checkpoint that must keep the name took it after the check.

        Then that one has its name again, and this directory is a staging directory again.
        """
        try:
            policy.check_replaceable(policy.displaced_path)
        except TagExistsError:
            directories.exchange_directories(policy.displaced_path, final, self.folder)
            raise
        except StorageError:
            return  # this directory has the name by now, which an unreadable old checkpoint does not undo

    def remove_directory(self) -> None:
        """Remove the directory after a failure. If that is not possible it stays hidden."""
        with suppress(StorageError):
            directories.remove_tree(self.folder)

    def _finish_data(self, fragments: Fragments) -> Iterator[tuple[str, FileRecord]]:
        """Write the headers, which contain the CRCs of all blocks."""
        numbers = itertools.count()
        for file in self.plan.files:
            crcs = []
            for entry in file.entries.values():
                tensor = next(numbers)
                group, name = self.plan.tensors[tensor]
                crcs.append(block_crcs(fragments.get(tensor, []), entry.nbytes, f"{group} tensor {name!r}"))
            header = file.build_header(itertools.chain(*crcs))
            with BufferedWriter(self.folder / file.path) as writer:
                writer.write(0, memoryview(header))
                writer.sync()
            crc = blocks.crc64(header)
            yield file.path, FileRecord(file.size, f"{_file_crc(crc, file, crcs):016x}", len(header), f"{crc:016x}")


def block_crcs(fragments: Sequence[Fragment], nbytes: int, tensor_text: str) -> list[int]:
    """Return the CRC of each block of a tensor from the fragments of all ranks.

    Raises ``RankMismatchError`` naming a gap.
    """
    crcs = blocks.assemble_crcs(fragments, nbytes)
    complete_crcs = [crc for crc in crcs if crc is not None]
    if len(complete_crcs) != len(crcs):
        start, stop = blocks.block_range(crcs.index(None), nbytes)
        raise RankMismatchError(
            f"{tensor_text}: no rank saved all of bytes {start} to {stop}; "
            "some rank of its mesh did not pass it to the save"
        )
    return complete_crcs


def _drop_displaced(final: Path, policy: ReplacePolicy) -> None:
    """Delete the displaced checkpoint, but only if another one has its name by now; otherwise it is the only copy."""
    with suppress(StorageError):
        if posix.path_exists(final):
            directories.remove_directory(policy.displaced_path, policy.removal_path)


def _file_crc(header_crc: int, file: DataFile, crcs: list[list[int]]) -> int:
    """Combine the CRCs of a file's header and of its tensors' blocks into the CRC of the file."""
    crcs_and_lengths = [(header_crc, file.data_start)]
    for entry, block_row in zip(file.entries.values(), crcs, strict=True):
        spans = (blocks.block_range(block, entry.nbytes) for block in range(len(block_row)))
        crcs_and_lengths += [(crc, stop - start) for crc, (start, stop) in zip(block_row, spans, strict=True)]
    return blocks.combine_crcs(crcs_and_lengths)
