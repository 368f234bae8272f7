"""Rank 0's part of a save: a hidden folder with files of the right size, and its publication under the final name.

A folder with its final name is complete: it appears by one rename, after everything in it is durable.
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

#: Makes the manifest of the files that it is given.
Describe = Callable[[dict[str, FileRecord]], Manifest]

#: How often an overwrite begins again where others change what it overwrites.
_ATTEMPTS = 100


@dataclass(frozen=True)
class ReplacePolicy:
    """How a checkpoint is replaced: it is ``replaced`` before it is ``removed``, hidden names both.

    ``check`` raises ``TagExistsError`` where what is in a folder is to keep the name.
    """

    replaced: Path
    removed: Path
    check: Callable[[Path], None]


@dataclass(frozen=True)
class StagingDirectory:
    """A save in progress: a hidden folder, and the plan of what will be in it."""

    folder: Path
    plan: SavePlan

    def open(self) -> DirectoryLock:
        """Create the folder, and its data files at their final sizes; nothing is left of it on failure.

        The lock is to be held until the save has ended: it tells others that the save lives.
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
            self.discard()
            if lock is not None:
                lock.close()
            raise
        return lock

    def complete(self, fragments: Fragments, small: SmallFiles, describe: Describe) -> Manifest:
        """Write what is missing in the folder, whose data is durable, and make all of it durable.

        ``fragments`` is what all ranks hashed. Raises ``RankMismatchError`` where that leaves a gap in a tensor.
        """
        records = dict(self._finish_data(fragments))
        indexes = {index_path(group): build_index(files) for group, files in self.plan.groups.items() if len(files) > 1}
        for name, data in sorted({**indexes, **small}.items()):
            posix.make_parents(self.folder, name)
            posix.write_small(self.folder / name, data)
            records[name] = FileRecord(len(data), f"{blocks.crc64(data):016x}")
        described = describe(dict(sorted(records.items())))
        posix.write_small(self.folder / manifest.NAME, manifest.encode_manifest(described))
        for folder in sorted({parent for name in records for parent in Path(name).parents}, reverse=True):
            posix.fsync_directory(self.folder / folder)
        return described

    def publish(self, final: Path) -> None:
        """Give the folder its final name. Raises ``TagExistsError`` where that is taken."""
        directories.rename_noreplace(self.folder, final)

    def overwrite(self, final: Path, how: ReplacePolicy) -> None:
        """Give the folder its final name, whoever has it. Others may overwrite or remove the same checkpoint."""
        for attempt in range(1, _ATTEMPTS + 1):
            how.check(final)
            try:
                if posix.path_exists(final):
                    directories.exchange_directories(self.folder, final, how.replaced)
                    self._give_back(final, how)
                else:
                    directories.rename_noreplace(self.folder, final)
            except (TagExistsError, StorageError) as error:
                changed = isinstance(error, TagExistsError) or error.errno == errno.ENOENT
                if not changed or attempt == _ATTEMPTS:
                    raise
                _drop_displaced(final, how)
            else:
                return

    def _give_back(self, final: Path, how: ReplacePolicy) -> None:
        """What took the name after the last look, and is to keep it, has it again; the draft is one again."""
        try:
            how.check(how.replaced)
        except TagExistsError:
            directories.exchange_directories(how.replaced, final, self.folder)
            raise
        except StorageError:
            return  # the draft has the name by now: what cannot be told of the other does not undo that

    def discard(self) -> None:
        """Remove the folder, after a failure; what cannot be removed stays hidden."""
        with suppress(StorageError):
            directories.remove_tree(self.folder)

    def _finish_data(self, fragments: Fragments) -> Iterator[tuple[str, FileRecord]]:
        """Write the headers, which hold the CRCs of all blocks."""
        number = itertools.count()
        for file in self.plan.files:
            crcs = []
            for entry in file.entries.values():
                tensor = next(number)
                group, name = self.plan.tensors[tensor]
                crcs.append(block_crcs(fragments.get(tensor, []), entry.nbytes, f"{group} tensor {name!r}"))
            header = file.header(itertools.chain(*crcs))
            with BufferedWriter(self.folder / file.path) as writer:
                writer.write(0, memoryview(header))
                writer.sync()
            crc = blocks.crc64(header)
            yield file.path, FileRecord(file.size, f"{_is_complete(crc, file, crcs):016x}", len(header), f"{crc:016x}")


def block_crcs(found: Sequence[Fragment], nbytes: int, what: str) -> list[int]:
    """The CRC of each block of a tensor from what all ranks hashed. Raises ``RankMismatchError`` naming a gap."""
    crcs = blocks.assemble_crcs(found, nbytes)
    whole = [crc for crc in crcs if crc is not None]
    if len(whole) != len(crcs):
        start, stop = blocks.block_range(crcs.index(None), nbytes)
        raise RankMismatchError(
            f"{what}: no rank saved all of bytes {start} to {stop}; some rank of its mesh did not pass it to the save"
        )
    return whole


def _drop_displaced(final: Path, how: ReplacePolicy) -> None:
    """What was put aside goes, if anything was, but only where another has taken its name: else it is all there is."""
    with suppress(StorageError):
        if posix.path_exists(final):
            directories.remove_directory(how.replaced, how.removed)


def _is_complete(header_crc: int, file: DataFile, crcs: list[list[int]]) -> int:
    """The CRC of a file from those of its header and of its tensors' blocks."""
    pieces = [(header_crc, file.data_start)]
    for entry, row in zip(file.entries.values(), crcs, strict=True):
        spans = (blocks.block_range(block, entry.nbytes) for block in range(len(row)))
        pieces += [(crc, stop - start) for crc, (start, stop) in zip(row, spans, strict=True)]
    return blocks.combine_crcs(pieces)
