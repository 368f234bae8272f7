"""Reads of byte ranges of one version of an object.

Stores return it from ``open_reader`` (:mod:`rankless.storage.http.object_reads`), and
:mod:`rankless.storage.reader_pool` shares it between the reading threads of a rank. All reads must be of one version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rankless.storage.closing import ClosingMixin
from rankless.storage.object_path import ObjectPath

#: The bytes at the start of an object that are fetched with its size: most headers are in them.
_START_BYTES = 32 * 2**10


class RangeSource(Protocol):
    """The requests for ranges of objects."""

    def get_start(self, path: ObjectPath, limit: int) -> tuple[bytes, int, str]:
        """Return the first bytes of an object, at most ``limit``, its size, and its version."""

    def get_range(self, path: ObjectPath, offset: int, into: memoryview, version: str | None) -> str:
        """Fill ``into`` from a byte of an object on, and return the version of the object.

        Raises ``CorruptCheckpointError`` if it has fewer bytes, ``StorageError`` if it is not the given version.
        """


class ObjectReader(ClosingMixin):
    """An object that is open for reading: all reads are of the version that the first one has found."""

    def __init__(self, source: RangeSource, path: ObjectPath) -> None:
        self._source, self._path = source, path
        self._version: str | None = None
        self._start, self._size = b"", -1

    @property
    def size(self) -> int:
        """See :class:`~rankless.storage.store.RangeReader`. The request for it also fetches the first bytes."""
        if self._size < 0:
            self._start, self._size, self._version = self._source.get_start(self._path, _START_BYTES)
        return self._size

    @property
    def version(self) -> str:
        """See :class:`~rankless.storage.store.RangeReader`: the ETag."""
        return (self._version or "").strip('"')

    def read(self, offset: int, into: memoryview) -> None:
        """See :class:`~rankless.storage.store.RangeReader`."""
        if not len(into):
            return
        if offset + len(into) <= len(self._start):
            into.cast("B")[:] = self._start[offset : offset + len(into)]
        else:
            self._version = self._source.get_range(self._path, offset, into.cast("B"), self._version) or self._version

    def read_in_chunks(self, offset: int, into: memoryview) -> Iterator[memoryview]:
        """See :class:`~rankless.storage.store.RangeReader`."""
        self.read(offset, into)
        yield into

    def close(self) -> None:
        """See :class:`~rankless.storage.store.RangeReader`. Connections stay open for other objects."""
