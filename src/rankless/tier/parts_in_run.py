"""Parts that hosts without a job put into the run directory, each its own, until a checkpoint is complete there.

The folder ``.parts`` of a run directory is a tier folder in miniature that all hosts share: tables, bytes and commons,
without slots, because no process writes into them again. All files appear by a rename, when they are durable. So two
hosts may put parts at once, and a process may die at any moment.

Drains without a job put parts (:mod:`rankless.save.offline_drain`), and so does a load that finds a generation if only
hosts and the run directory together have all its parts (:mod:`rankless.load.tier_generations`). The order must stay:
bytes, table, and the checkpoint is published before the parts are removed.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankless.errors import StorageError
from rankless.run.stored_history import read_history
from rankless.run.tier_parts_removal import FOLDER, LOCK, remove_parts, remove_superseded_parts
from rankless.storage.aligned_memory import Bytes
from rankless.storage.atomic_rename import replace_file
from rankless.storage.directory_trees import remove_tree
from rankless.storage.file_lock import FileLock
from rankless.storage.mapped_file import map_to_read
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import list_names, make_durable_directory, wrap_os_errors, write_small
from rankless.storage.store import store_of
from rankless.tier.generation import Common
from rankless.tier.host_folder import DATA_SUFFIX, TierFolder
from rankless.tier.part import PartTable, encode_checked, find_corrupt_range
from rankless.tier.part_names import COMMON_SUFFIX, PART_SUFFIX, GenerationKey


@dataclass(frozen=True)
class CollectedParts:
    """The parts in a run directory. ``folder`` has them."""

    folder: TierFolder

    @classmethod
    def of(cls, run: Path) -> CollectedParts:
        """Return the parts of a run directory, which need not have any."""
        folder = TierFolder(run / FOLDER, f"parts of {run}")
        if isinstance(folder.path, ObjectPath):
            from rankless.tier.parts_in_store import ObjectParts  # noqa: PLC0415 - few jobs use an object store

            return ObjectParts(folder)
        return cls(folder)

    @property
    def exist(self) -> bool:
        """True if there may be some."""
        return store_of(self.folder.path).path_exists(self.folder.path)

    def put_part(self, table: PartTable, memory: Bytes, writer: str) -> None:
        """Put a part of a host, unless it is there. ``writer``: the identity of the host's folder."""
        path = self.folder.path
        data = f"{table.name.name.removesuffix(PART_SUFFIX)}{DATA_SUFFIX}"
        if table.name.name not in list_names(path):
            make_durable_directory(path)
            self._write(data, memory[: table.nbytes].data, writer)
            self._write(table.name.name, table._replace(data=data).encode(), writer)

    def put_host_parts(self, folder: TierFolder, key: GenerationKey, ranks: Collection[int]) -> None:
        """Put the intact parts of some ranks that a host has, and its label."""
        for name in folder.list_parts().get(key, ()):
            if name.rank in ranks:
                table = folder.read_part(name)
                memory = map_to_read(folder.path / table.data, table.nbytes)
                if find_corrupt_range(table, memory) is None:
                    self.put_part(table, memory, folder.identity)
        if (common := folder.read_common(key)) is not None:
            self.put_common(common, folder.identity)

    def put_common(self, common: Common, writer: str) -> None:
        """Put the label of a generation, unless it is there."""
        name = f"{common.label.key.name}{COMMON_SUFFIX}"
        if name not in list_names(self.folder.path):
            make_durable_directory(self.folder.path)
            self._write(name, encode_checked(common), writer)

    def remove_outdated(self, run: Path) -> None:
        """Remove the parts of checkpoints that the run directory has, or newer ones, or that are retired."""
        if self.exist:
            remove_superseded_parts(run)
            history = read_history(run)
            keys = [*self.folder.list_parts(), *self.folder.list_commons()]
            retired = {key.id for key in keys if not history.is_current_number(key.incarnation, key.sequence)}
            remove_parts(run, lambda _, identity: identity in retired)

    def _write(self, name: str, data: bytes | memoryview, writer: str) -> None:
        """Write a file. The draft of a process that died is written again by the next one of its host."""
        draft = self.folder.path / f"{name}.{hashlib.sha256(writer.encode()).hexdigest()[:16]}.draft"
        remove_tree(draft)
        write_small(draft, data)
        replace_file(draft, self.folder.path / name)

    @contextmanager
    def open_parts(self, tables: Mapping[int, PartTable]) -> Iterator[Mapping[int, Path]]:
        """Yield the paths of files with the bytes of parts, which are there as long as the block lasts."""
        yield {rank: self.folder.path / table.data for rank, table in tables.items()}

    @contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Lock the parts to write a checkpoint from them, as long as the block lasts. Yield whether that succeeded.

        No process removes them meanwhile. It is false if another process has locked or removed them.
        """
        try:
            with wrap_os_errors("lock", self.folder.path):
                lock = FileLock(self.folder.path / LOCK)
        except StorageError as error:
            if error.errno not in {errno.EWOULDBLOCK, errno.ENOENT}:
                raise
            yield False
            return
        try:
            yield True
        finally:
            lock.close()
