"""Parts that hosts without a job put into a run in an object store: see :mod:`rankless.tier.parts_in_run`.

They have keys below ``.parts``. No two processes write one object with the bytes of a part; the table, which is written
last, names the one that counts. There are no locks: two hosts may write the checkpoint at once, and the first one gives
it its tag. A host that finds that parts were removed meanwhile looks for the checkpoint.

:meth:`CollectedParts.of <rankless.tier.parts_in_run.CollectedParts.of>` returns it for runs in object stores. The table
must be written last.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankless.engine.io.upload_files import download_object, upload_memory
from rankless.errors import InvalidArgumentError
from rankless.run.unpublished_output import LocalOutput
from rankless.storage.aligned_memory import Bytes
from rankless.storage.mapped_file import map_reserved
from rankless.storage.object_path import ObjectPath
from rankless.tier.generation import Common
from rankless.tier.host_folder import DATA_SUFFIX
from rankless.tier.part import PartTable
from rankless.tier.part_names import PART_SUFFIX
from rankless.tier.parts_in_run import CollectedParts


@dataclass(frozen=True)
class ObjectParts(CollectedParts):
    """The parts in a run in an object store."""

    def put_part(self, table: PartTable, memory: Bytes, writer: str) -> None:
        """See :class:`CollectedParts`."""
        del writer
        if self.folder.has_part(table.name):
            return
        data = f"{table.name.name.removesuffix(PART_SUFFIX)}.{secrets.token_hex(8)}{DATA_SUFFIX}"
        upload_memory(self._prefix / data, memory[: table.nbytes])
        self.folder.write_part(table._replace(data=data))

    def put_common(self, common: Common, writer: str) -> None:
        """See :class:`CollectedParts`."""
        del writer
        self.folder.write_common(common)

    @contextmanager
    def open_parts(self, tables: Mapping[int, PartTable]) -> Iterator[Mapping[int, Path]]:
        """See :class:`CollectedParts`. The parts are copied into a directory for temporary files."""
        pending = LocalOutput(self._prefix)
        pending.create(sum(table.nbytes for table in tables.values()))
        try:
            paths = {rank: pending.path / f"{rank:06d}{DATA_SUFFIX}" for rank in tables}
            for rank, table in tables.items():
                if table.nbytes:
                    memory = map_reserved(paths[rank], table.nbytes)
                    download_object(self._prefix / table.data, memory[: table.nbytes])
            yield paths
        finally:
            pending.discard()

    @contextmanager
    def try_lock(self) -> Iterator[bool]:
        """See :class:`CollectedParts`. Several processes may write the checkpoint."""
        yield True

    @property
    def _prefix(self) -> ObjectPath:
        path = self.folder.path
        if not isinstance(path, ObjectPath):
            raise InvalidArgumentError(f"{path} is in no object store: this is a bug of rankless")
        return path
