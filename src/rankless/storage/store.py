"""The interfaces of stores: methods for reads from any store, and for saves into an object store.

``Store`` is narrow, so that a checkpoint can be read from wherever its bytes are. A file system is one store, each
endpoint of an object store is another. ``tests/unit/storage/test_store_conformance.py`` runs one suite against all.

``formats/`` reads, and ``run/`` lists and removes through :func:`store_of`, on rank 0 or on each rank. If a store
cannot tell something for a moment, that must be a ``StorageError``, and never "missing". The conditional methods of
:class:`ObjectStore` decide between jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar

import msgspec

from rankless.process.worker_threads import run_in_threads
from rankless.storage import posix
from rankless.storage.atomic_rename import create_small, replace_small
from rankless.storage.body import Body
from rankless.storage.direct_io import BufferedReader
from rankless.storage.object_path import ObjectPath

T = TypeVar("T")
Item = TypeVar("Item")


class RangeReader(Protocol):
    """A file or an object that is open for reading. Several threads may call it."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    @property
    def version(self) -> str:
        """The result of :meth:`Store.file_version` for the file that is open; of an object, known after its size."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``offset`` on. Raises ``CorruptCheckpointError`` if the file ends before."""

    def read_in_chunks(self, offset: int, into: memoryview) -> Iterator[memoryview]:
        """Fill ``into`` as :meth:`read` does, and yield each chunk of it, in order, right after it was filled."""

    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Store(Protocol):
    """A store that checkpoints are read from. All methods raise ``StorageError`` if the store fails.

    ``is_remote``: each read is a request to a server, and no path of the operating system leads there. So there are
    no links, no page cache that ranks share, and no names that a client remembers.
    """

    is_remote: ClassVar[bool]

    def path(self, location: str) -> Path:
        """Return the path that a text means in this store."""

    def is_bucket(self, path: Path) -> bool:
        """Return whether a path is the root of a bucket. Nothing can be written there: a write would create it."""

    def make_folder(self, folder: Path) -> None:
        """Create a directory, and make it durable, if the store has directories."""

    def list_entries(self, folder: Path) -> dict[str, str]:
        """List the files in a directory, each with a text that changes with its bytes: empty if only a look tells it.

        In an object store also the files below it, by their names relative to it, such as ``model/config.json``.
        """

    def create_small(self, path: Path, data: bytes) -> bool:
        """Write a small file in one step, unless it exists. Return whether this call has written it."""

    def list_names(self, folder: Path) -> set[str]:
        """List the names in a directory; none if it is missing."""

    def list_files(self, folder: Path) -> list[Path]:
        """List all entries but directories in a directory, by name; nothing if it is missing."""

    def list_subdirectories(self, folder: Path) -> list[Path]:
        """List the directories in a directory that are not hidden, by name; none if it is missing."""

    def is_file(self, path: Path) -> bool:
        """Return whether the path is a regular file, or an object."""

    def is_directory(self, path: Path) -> bool:
        """Return whether the path is a directory, or the prefix of the keys of objects."""

    def path_exists(self, path: Path) -> bool:
        """Return whether the path is a file or a directory."""

    def file_exists(self, path: Path) -> bool:
        """Return whether the path exists and is not a directory."""

    def file_size(self, path: Path) -> int:
        """Return a file's size in bytes."""

    def file_version(self, path: Path) -> str:
        """Return a text that another file at this path, or other bytes of this one, would change; empty if missing."""

    def read_small(self, path: Path, limit: int = 2**30) -> bytes:
        """Return all bytes of a small file. Raises ``StorageError`` if it has more than ``limit``."""

    def check_regular(self, path: Path, *, within: tuple[Path, ...]) -> None:
        """Raise ``UnsafeNameError`` unless the path is a regular file that is really inside one of the directories."""

    def open_reader(self, path: Path) -> RangeReader:
        """Open a file for reading of byte ranges."""

    def map_files(self, read: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """Return the results of a function that reads a file for each item: several at a time if each is a request."""

    def replace_small(self, path: Path, data: bytes) -> None:
        """Write a small file in one step, in place of the one that is there, if any."""

    def remove_file(self, path: Path) -> None:
        """Remove a file."""

    def remove_empty_folder(self, folder: Path) -> None:
        """Remove a directory unless something is in it; a missing one is no error."""

    def seconds_unchanged(self, folder: Path) -> float:
        """Return for how long nothing in a directory has changed, by the store's own clock; 0 if that is unknown."""


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object in a list: its path, its size in bytes, its version, and when it was changed, in seconds since 1970."""

    path: ObjectPath
    size: int
    etag: str
    time: float


class Upload(msgspec.Struct, frozen=True):
    """A multipart upload in progress. Any process may send parts of it."""

    path: ObjectPath
    id: str


class ObjectStore(Store, Protocol):
    """A store of objects, which appear in one step, and are never changed in place.

    An implementation is hashable: two stores with the same settings are equal.
    """

    def __hash__(self) -> int: ...

    @property
    def scheme(self) -> str:
        """The scheme of its URLs, such as ``s3``."""

    def put_object(self, path: ObjectPath, body: Body) -> str:
        """Write an object in one step, and return its ETag.

        Raises ``StorageError`` if the store has received other bytes.
        """

    def list_objects(self, prefix: ObjectPath) -> list[ObjectInfo]:
        """List all objects with keys that begin with ``prefix/``, in the order of their keys."""

    def create_object(self, path: ObjectPath, data: bytes) -> bool:
        """Write a small object in one step unless it exists. Return whether this call has created it.

        Of several processes that call it at a time, one creates the object.
        """

    def read_back(self, path: ObjectPath) -> bytes:
        """Return the bytes of a small object that was just written. Raises ``StorageError`` if it is not there."""

    def read_with_age(self, path: ObjectPath, limit: int) -> tuple[bytes, float | None]:
        """Return all bytes of a small object, and for how many seconds it was not written, by the store's clock.

        The age is ``None`` if the store does not tell it. Raises ``StorageError`` if it has more than ``limit`` bytes.
        """

    def find_version(self, path: ObjectPath) -> str | None:
        """Return the ETag of an object; ``None`` if there is none."""

    def replace_version(self, path: ObjectPath, etag: str, data: bytes) -> bool:
        """Write a small object in one step if the one that is there has this ETag. Return whether this call did.

        ``data`` must differ from the bytes that other processes write. A store that knows no such condition looks at
        the ETag before the write.
        """

    def remove_version(self, path: ObjectPath, etag: str) -> None:
        """Remove an object if its ETag is still this one. Another or a missing one is no error."""

    def copy_object(self, source: ObjectPath, etag: str, target: ObjectPath, crc64nvme: int) -> str:
        """Copy an object inside of the store if it still has this ETag, and return the ETag of the copy.

        ``crc64nvme`` is the CRC of its bytes. Raises ``StorageError`` if it has another ETag or is missing, or if the
        store says that the copy has other bytes; with ``errno.ENOTSUP`` if the store refuses to copy it.
        """

    def create_upload(self, path: ObjectPath, notes: Mapping[str, str]) -> Upload:
        """Begin a multipart upload. ``notes`` are stored with the object."""

    def put_part(self, upload: Upload, number: int, body: Body) -> str:
        """Send part ``number``, from 1 on, and return a receipt.

        :meth:`complete_upload` needs the receipt for the part. Any process may pass it on as a text. Raises
        ``StorageError`` if the upload was aborted, unless the store notices that only at its end.
        """

    def complete_upload(
        self, upload: Upload, receipts: Sequence[str], size: int, crc64nvme: int, *, is_new: bool = False
    ) -> str:
        """Make the object of all parts, in order, and return its ETag.

        Raises ``StorageError`` if the upload was aborted, or the size of the object or its CRC is not as expected; with
        ``is_new`` ``TagExistsError`` if there is an object, as far as the store knows such a condition.
        """

    def find_noted(self, path: ObjectPath, notes: Mapping[str, str]) -> str | None:
        """Return the ETag of an object if it was uploaded with these notes; else ``None``."""

    def abort_upload(self, upload: Upload) -> None:
        """Delete the parts of an upload; a missing one is no error."""

    def list_uploads(self, prefix: ObjectPath) -> list[tuple[Upload, float]]:
        """List uploads in progress with keys below ``prefix/``, and when they began, in seconds since 1970."""


class PosixStore:
    """The file systems of this host, as a :class:`Store`."""

    is_remote: ClassVar[bool] = False

    path = staticmethod(Path)

    def is_bucket(self, path: Path) -> bool:
        """See :class:`Store`. There are none."""
        del path
        return False

    make_folder = staticmethod(posix.make_durable_directory)
    create_small = staticmethod(create_small)
    list_names = staticmethod(posix.list_names)
    list_files = staticmethod(posix.list_files)
    list_subdirectories = staticmethod(posix.list_subdirectories)
    is_file = staticmethod(posix.is_file)
    is_directory = staticmethod(posix.is_directory)
    path_exists = staticmethod(posix.path_exists)
    file_size = staticmethod(posix.file_size)
    file_version = staticmethod(posix.file_version)
    read_small = staticmethod(posix.read_small)
    file_exists = staticmethod(posix.file_exists)
    check_regular = staticmethod(posix.check_regular)
    replace_small = staticmethod(replace_small)
    remove_file = staticmethod(posix.remove_file)
    remove_empty_folder = staticmethod(posix.remove_if_empty)
    seconds_unchanged = staticmethod(posix.seconds_unchanged)

    def open_reader(self, path: Path) -> BufferedReader:
        """See :class:`Store`."""
        return BufferedReader(path)

    def list_entries(self, folder: Path) -> dict[str, str]:
        """See :class:`Store`."""
        return dict.fromkeys(posix.list_names(folder), "")

    def map_files(self, read: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """See :class:`Store`. To start threads takes longer than to open some files."""
        return list(map(read, items))


_POSIX = PosixStore()

#: How many small objects are requested at a time.
_REQUESTS = 16


def count_stored_bytes(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a directory and below it."""
    if not isinstance(path, ObjectPath):
        return sum(map(posix.file_size, posix.walk_files(path)))
    infos = path.store.list_objects(path)
    return sum(info.size for info in infos) if infos else path.store.file_size(path)


def follow_folder_links(path: Path) -> Path:
    """Return a path without links to folders, so that none can lead elsewhere later.

    A file keeps its name, which says its format: in a download of the Hub it is a link to a file without one.
    """
    is_folder = not isinstance(path, ObjectPath) and posix.is_directory(path)
    return path.resolve() if is_folder else path.parent.resolve() / path.name


def list_versions(path: Path, most: int) -> dict[Path, str]:
    """Return the versions of a file, or of the files in a directory and below it, those near the top first.

    See :meth:`Store.file_version`. Of a directory on a file system, at most that many are returned.
    """
    if isinstance(path, ObjectPath):
        found: dict[Path, str] = {info.path: info.etag.strip('"') for info in path.store.list_objects(path)}
        return found or _version_of(path)
    if not posix.is_directory(path):
        return _version_of(path)
    return {file: posix.file_version(file) for file in itertools.islice(posix.iterate_files(path), most)}


def _version_of(path: Path) -> dict[Path, str]:
    version = store_of(path).file_version(path)
    return {path: version} if version else {}


def store_of(path: Path) -> Store:
    """Return the store that a path belongs to."""
    return path.store if isinstance(path, ObjectPath) else _POSIX


def map_requests(request: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    """Return the results of a function that sends a request for each item; several at a time."""
    return run_in_threads(request, items, _REQUESTS)
