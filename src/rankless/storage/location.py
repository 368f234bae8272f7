"""Locations that callers pass: the path of a folder or file, or the URL of a place in an object store.

This module knows all kinds of stores; the modules of the stores know nothing of it.

Every public function that takes a path calls :func:`parse_location` first, on each rank for itself; equal arguments
must give equal paths, because ranks compare them.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path, PosixPath

from rankless.errors import InvalidArgumentError
from rankless.storage.object_path import ObjectPath, make_object_path
from rankless.storage.posix import local_path

#: The first parts of paths that were made from URLs.
_URL_PARTS = frozenset({"s3:", "gs:", "az:"})

#: The starts of URLs.
_SCHEMES = ("s3://", "gs://", "az://")

#: The start of the URLs of checkpoints that Lightning's callbacks give. They mean the same without it.
RUN_PREFIX = "rankless+"


def is_supported(path: str | PathLike[str]) -> bool:
    """Return whether a path is one of a file system, or of an object store that is supported."""
    return "://" not in str(path) or str(path).startswith(_SCHEMES)


def parse_location(path: str | PathLike[str]) -> Path:
    """Return the absolute path of a directory or file, or the path in an object store that a URL names.

    The store of an ``s3://`` URL is :meth:`S3.from_environment <rankless.storage.s3.s3_store.S3.from_environment>`,
    of a ``gs://`` URL :meth:`GCS.from_environment <rankless.storage.gcs.gcs_store.GCS.from_environment>`, and of an
    ``az://`` URL :meth:`Azure.from_environment <rankless.storage.azure.azure_store.Azure.from_environment>`. Raises
    ``InvalidArgumentError`` for an empty path, for the URL of a store that is not supported, and for a value that is
    neither a text nor a path, or has a NUL. For example, ``ftp://host/run`` is refused, and ``s3://bucket/run`` is a
    path in S3.
    """
    if isinstance(path, ObjectPath):
        if "\0" in path.key:
            raise InvalidArgumentError(f"{str(path)!r} cannot be the path of an object: it has a NUL")
        return path
    if isinstance(path, str):
        path = path.removeprefix(RUN_PREFIX)
        if "://" in path or path.partition("/")[0] in _URL_PARTS:
            return _parse_url(path)
    elif isinstance(path, PathLike) and {*PosixPath(path).parts[:1]} & _URL_PARTS:
        raise InvalidArgumentError(f"{path} was a URL before it became a {type(path).__name__}: pass it as a text")
    return local_path(path)


def _parse_url(url: str) -> ObjectPath:
    """Return the path in the store of a URL. The modules of the stores are imported here: few jobs use one."""
    if "://" not in url:
        raise InvalidArgumentError(f"{url} is no URL: write {url.replace(':/', '://', 1)}")
    if url.startswith("s3://"):
        from rankless.storage.s3.s3_store import S3  # noqa: PLC0415

        return make_object_path(S3.from_environment(), url)
    if url.startswith("gs://"):
        from rankless.storage.gcs.gcs_store import GCS  # noqa: PLC0415

        return make_object_path(GCS.from_environment(), url)
    if url.startswith("az://"):
        from rankless.storage.azure.azure_store import Azure  # noqa: PLC0415

        return make_object_path(Azure.from_environment(), url)
    raise InvalidArgumentError(f"{url} is in no store that rankless knows: use s3://, gs:// or az://, or a folder")
