"""Paths in object stores, such as ``s3://bucket/run``.

An :class:`ObjectPath` is a :class:`pathlib.Path` in all that concerns names: it has a name, a parent and children, and
it is a key of dictionaries. So a run in a bucket is described by the same classes as one in a directory. It is no path
of the operating system: whatever would open it as one raises ``InvalidArgumentError``. Functions that read or write go
through the store that a path belongs to: see :mod:`rankless.storage.store`.

:mod:`rankless.storage.location` and the stores make such paths. Only ``storage/`` and the places that write into a
store ask whether a path is one: all else asks the store of a path (``store_of``) or the layout of a run
(``run_store_of``).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rankless.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rankless.storage.store import ObjectStore


class ObjectPath(PosixPath):
    """The path of an object, or of a common prefix of keys, in a bucket: ``/bucket/key``.

    Each store has a subclass of its own. So paths that pathlib derives from a path belong to the same store.
    """

    store: ClassVar[ObjectStore]

    @property
    def bucket(self) -> str:
        """The name of the bucket."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """The key of the object in its bucket. For example, ``run/step_10`` for ``s3://bucket/run/step_10``."""
        return "/".join(self.parts[2:])

    def __str__(self) -> str:
        if not self.is_absolute():  # relative to another one
            return "/".join(self.parts)
        return f"{self.store.scheme}:/{'/'.join(('', *self.parts[1:]))}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002 - as in pathlib
        """Return the path itself: there are no links."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (make_object_path, (self.store, str(self))) if self.is_absolute() else super().__reduce__()

    def __fspath__(self) -> str:
        raise InvalidArgumentError(f"{self} is in an object store, which this call does not support: use a folder")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash((type(self), self.parts))


@cache
def path_class(store: ObjectStore) -> type[ObjectPath]:
    """Return the class of the paths in a store."""
    return type("ObjectPath", (ObjectPath,), {"store": store})


def as_object(path: Path) -> ObjectPath:
    """Return the path, which is in an object store. Raises ``TypeError`` if it is not."""
    if not isinstance(path, ObjectPath):
        raise TypeError(f"{path} is not in an object store")
    return path


def is_canonical(key: str) -> bool:
    """Return whether a path stands for exactly this key. Others have empty names, such as ``run/``."""
    return not {"", ".", ".."} & {*key.split("/")}


def make_object_path(store: ObjectStore, location: str) -> ObjectPath:
    """Return the path of ``bucket/key``, with or without the scheme. Raises ``InvalidArgumentError``."""
    scheme, separator, rest = location.rpartition("://")
    if separator and scheme != store.scheme:
        raise InvalidArgumentError(f"{location} is not in a store of {store.scheme}://")
    parts = rest.rstrip("/").split("/")
    if not all(parts) or any(part in {".", ".."} for part in parts):
        raise InvalidArgumentError(
            f"{location} must be {store.scheme}://bucket/name, without empty names, '.' and '..'"
        )
    return path_class(store)("/" + "/".join(parts))
