"""Requests to buckets with an XML API: Amazon S3, and clouds with an API that is modelled on it.

:class:`~rankless.storage.http.xml_store.XmlStore`, and so ``S3`` and ``GCS``, inherit from :class:`XmlRequests`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from xml.etree.ElementTree import Element

from rankless.storage.http.client import (
    ObjectResponse,
    unexpected_answer_error,
)
from rankless.storage.http.object_reads import ObjectReads
from rankless.storage.http.xml import find_text, parse_xml
from rankless.storage.object_path import ObjectPath, path_class


@dataclass(frozen=True, slots=True)
class XmlDialect:
    """The names that differ between the XML APIs of clouds.

    ``note_prefix`` begins the headers of the notes that are stored with an object. ``creation_condition`` is the header
    of a request that must not replace an object. ``copy_source`` is the header of a request for a copy of an object
    that is there already. ``headers_of_all`` are the names of the headers that belong to all
    requests, and not only to those that create objects.
    """

    note_prefix: str
    creation_condition: tuple[str, str]
    copy_source: str
    headers_of_all: frozenset[str] = frozenset()


class XmlRequests(ObjectReads):
    """The requests of a store with an XML API for objects, their properties and lists of them."""

    dialect: ClassVar[XmlDialect]
    headers: tuple[tuple[str, str], ...]

    @property
    @abstractmethod
    def scheme(self) -> str:
        """The scheme of its URLs."""

    def _list_pages(self, folder: ObjectPath, delimiter: str = "") -> Iterator[Sequence[Element]]:
        token = ""
        while True:
            page = self._list_page(folder, delimiter, token, 1000)
            yield page
            previous, token = token, find_text(page, "NextContinuationToken")
            if token in {"", previous}:
                if token or find_text(page, "IsTruncated") == "true":  # the server does not continue the list
                    raise unexpected_answer_error("list", folder)
                return

    def _list_page(self, folder: ObjectPath, delimiter: str, token: str, limit: int) -> Sequence[Element]:
        query = {"list-type": "2", "max-keys": str(limit), "encoding-type": "url"}
        query["prefix"] = f"{folder.key}/" if folder.key else ""
        if delimiter:
            query["delimiter"] = delimiter
        if token:
            query["continuation-token"] = token
        permission = self.permissions.list
        return list(parse_xml(self._send_to_bucket(folder, "list", permission, query, "ListBucketResult").body))

    def _creation_headers(self) -> tuple[tuple[str, str], ...]:
        return tuple(header for header in self.headers if header[0] not in self.dialect.headers_of_all)

    def _headers_of_all(self) -> tuple[tuple[str, str], ...]:
        return tuple(header for header in self.headers if header[0] in self.dialect.headers_of_all)

    def _send_to_bucket(
        self, path: ObjectPath, action: str, permission: str, query: Mapping[str, str], root: str
    ) -> ObjectResponse:
        bucket = self._path_of(path.bucket, "")
        return self._send("GET", bucket, f"{action} {path.key or 'the root'} in", permission, query, root=root)

    def _path_of(self, bucket: str, key: str) -> ObjectPath:
        return path_class(self)(f"/{bucket}/{key}")
