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

from holdfast.engine.plan import SavePlan
from holdfast.engine.transfer import Fragments
from holdfast.errors import DisagreementError, StorageError, TagExistsError
from holdfast.layout import blocks, manifest
from holdfast.layout.blocks import Fragment
from holdfast.layout.files import DataFile, index, index_path
from holdfast.layout.manifest import FileRecord, Manifest
from holdfast.storage import folders, local
from holdfast.storage.bulk import CachedWriter
from holdfast.storage.folders import Lock

#: ``{path inside the checkpoint: contents}``.
SmallFiles = Mapping[str, bytes]

#: Makes the manifest of the files that it is given.
Describe = Callable[[dict[str, FileRecord]], Manifest]

#: How often an overwrite begins again where others change what it overwrites.
_ATTEMPTS = 100


@dataclass(frozen=True)
class Overwrite:
    """How a checkpoint is replaced: it is ``replaced`` before it is ``removed``, hidden names both.

    ``check`` raises ``TagExistsError`` where what is in a folder is to keep the name.
    """

    replaced: Path
    removed: Path
    check: Callable[[Path], None]


@dataclass(frozen=True)
class Draft:
    """A save in progress: a hidden folder, and the plan of what will be in it."""

    folder: Path
    plan: SavePlan

    def open(self) -> Lock:
        """Create the folder, and its data files at their final sizes; nothing is left of it on failure.

        The lock is to be held until the save has ended: it tells others that the save lives.
        """
        local.make_durable_folder(self.folder.parent)
        folders.check_space(self.folder.parent, sum(file.size for file in self.plan.files))
        lock = None
        try:
            lock = folders.claim(self.folder)
            for file in self.plan.files:
                local.make_parents(self.folder, file.path)
                local.allocate(self.folder / file.path, file.size)
        except BaseException:
            self.discard()
            if lock is not None:
                lock.close()
            raise
        return lock

    def complete(self, fragments: Fragments, small: SmallFiles, describe: Describe) -> Manifest:
        """Write what is missing in the folder, whose data is durable, and make all of it durable.

        ``fragments`` is what all ranks hashed. Raises ``DisagreementError`` where that leaves a gap in a tensor.
        """
        records = dict(self._finish_data(fragments))
        indexes = {index_path(group): index(files) for group, files in self.plan.groups.items() if len(files) > 1}
        for name, data in sorted({**indexes, **small}.items()):
            local.make_parents(self.folder, name)
            local.write_small(self.folder / name, data)
            records[name] = FileRecord(len(data), f"{blocks.crc64(data):016x}")
        described = describe(dict(sorted(records.items())))
        local.write_small(self.folder / manifest.NAME, manifest.encode(described))
        for folder in sorted({parent for name in records for parent in Path(name).parents}, reverse=True):
            local.sync_folder(self.folder / folder)
        return described

    def publish(self, final: Path) -> None:
        """Give the folder its final name. Raises ``TagExistsError`` where that is taken."""
        folders.publish(self.folder, final)

    def overwrite(self, final: Path, how: Overwrite) -> None:
        """Give the folder its final name, whoever has it. Others may overwrite or remove the same checkpoint."""
        for attempt in range(1, _ATTEMPTS + 1):
            how.check(final)
            try:
                if local.exists(final):
                    folders.replace(self.folder, final, how.replaced)
                    self._give_back(final, how)
                else:
                    folders.publish(self.folder, final)
            except (TagExistsError, StorageError) as error:
                changed = isinstance(error, TagExistsError) or error.errno == errno.ENOENT
                if not changed or attempt == _ATTEMPTS:
                    raise
                _forget(final, how)
            else:
                return

    def _give_back(self, final: Path, how: Overwrite) -> None:
        """What took the name after the last look, and is to keep it, has it again; the draft is one again."""
        try:
            how.check(how.replaced)
        except TagExistsError:
            folders.replace(how.replaced, final, self.folder)
            raise
        except StorageError:
            return  # the draft has the name by now: what cannot be told of the other does not undo that

    def discard(self) -> None:
        """Remove the folder, after a failure; what cannot be removed stays hidden."""
        with suppress(StorageError):
            folders.remove_tree(self.folder)

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
            with CachedWriter(self.folder / file.path) as writer:
                writer.write(0, memoryview(header))
                writer.sync()
            crc = blocks.crc64(header)
            yield file.path, FileRecord(file.size, f"{_whole(crc, file, crcs):016x}", len(header), f"{crc:016x}")


def block_crcs(found: Sequence[Fragment], nbytes: int, what: str) -> list[int]:
    """The CRC of each block of a tensor from what all ranks hashed. Raises ``DisagreementError`` naming a gap."""
    crcs = blocks.assemble(found, nbytes)
    whole = [crc for crc in crcs if crc is not None]
    if len(whole) != len(crcs):
        start, stop = blocks.span(crcs.index(None), nbytes)
        raise DisagreementError(
            f"{what}: no rank saved all of bytes {start} to {stop}; some rank of its mesh did not pass it to the save"
        )
    return whole


def _forget(final: Path, how: Overwrite) -> None:
    """What was put aside goes, if anything was, but only where another has taken its name: else it is all there is."""
    with suppress(StorageError):
        if local.exists(final):
            folders.remove(how.replaced, how.removed)


def _whole(header_crc: int, file: DataFile, crcs: list[list[int]]) -> int:
    """The CRC of a file from those of its header and of its tensors' blocks."""
    pieces = [(header_crc, file.data_start)]
    for entry, row in zip(file.entries.values(), crcs, strict=True):
        spans = (blocks.span(block, entry.nbytes) for block in range(len(row)))
        pieces += [(crc, stop - start) for crc, (start, stop) in zip(row, spans, strict=True)]
    return blocks.join(pieces)
