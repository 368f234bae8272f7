"""``GCS``: a store of objects at Google Cloud Storage.

Its XML API has the requests of S3. These differ: a condition on the generation of an object takes the place of
``If-None-Match``, and the server compares CRC-32C. It accepts no condition and no checksum at the end of an upload. So
the object is compared with the checksums of its parts afterwards.

``gs://`` URLs mean it (:mod:`rankless.storage.location`); each rank has the store of its own process. An upload counts
only after the object was compared with the bytes that were sent.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from rankless.errors import InvalidArgumentError, StorageError
from rankless.storage.body import Body
from rankless.storage.gcs.access_tokens import TokenFunction, check_key_file
from rankless.storage.gcs.gcs_dialect import GCSService
from rankless.storage.gcs.object_checksums import PartChecksums, encode_crc32c, find_crc32c
from rankless.storage.http.client import ObjectClient, ObjectResponse
from rankless.storage.http.connection import check_endpoint
from rankless.storage.http.object_reads import Permissions
from rankless.storage.http.settings import check_connection_settings, is_header_text
from rankless.storage.http.xml_requests import XmlDialect
from rankless.storage.http.xml_store import BodyChecksums, XmlStore
from rankless.storage.object_path import ObjectPath

_ENDPOINT = "https://storage.googleapis.com"

_PERMISSIONS = Permissions(
    read="storage.objects.get",
    inspect="storage.objects.get, and storage.objects.list to see that it is missing",
    list="storage.objects.list",
    write="storage.objects.create, and storage.objects.delete to replace an object",
    upload="storage.multipartUploads.create, and storage.objects.create",
    delete="storage.objects.delete",
    abort="storage.multipartUploads.abort",
    list_uploads="storage.multipartUploads.list",
)

_DIALECT = XmlDialect(
    note_prefix="x-goog-meta-",
    creation_condition=("x-goog-if-generation-match", "0"),
    copy_source="x-goog-copy-source",
)


@dataclass(frozen=True)
class GCS(XmlStore):
    """A store at Google Cloud Storage.

    A URL ``gs://bucket/run`` means :meth:`from_environment`. To pass settings, make a path with :meth:`path`, and use
    it wherever a path is accepted: ``rankless.save_checkpoint(GCS(project="…").path("bucket/run"), …)``.

    Args:
        endpoint: The URL of the server.
        credentials: A function that returns an access token, or the path of the key file of a service account. By
            default the Application Default Credentials of Google's tools. These and key files need the library
            google-auth: ``pip install 'google-auth[requests]'``. The function is called for each request, so it should
            keep the token in memory; an empty token means requests without one.
        project: The project that pays for requests, as for a bucket with requester pays.
        ca_file: A file with the certificates of authorities to trust, instead of the system's.
        headers: Further headers of requests that create objects, such as ``x-goog-storage-class``.
        timeout: The number of seconds without any byte after which a connection counts as broken.
        retry_seconds: For how many seconds a request that fails is repeated.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    endpoint: str = _ENDPOINT
    credentials: str | TokenFunction | None = field(default=None, repr=False)
    project: str | None = None
    ca_file: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = 60.0
    retry_seconds: float = 120.0

    scheme = "gs"
    permissions = _PERMISSIONS
    headers_of_objects = ("content-length", "etag", "x-goog-generation")
    dialect = _DIALECT

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint)
        check_connection_settings(self)
        if self.credentials is not None and not callable(self.credentials):
            object.__setattr__(self, "credentials", check_key_file(self.credentials))
        if self.project is not None and not (isinstance(self.project, str) and is_header_text(self.project)):
            raise InvalidArgumentError(f"project must be the name of a project; got {self.project!r}")

    @classmethod
    def from_environment(cls) -> GCS:
        """Return the store that the variables of Google's tools describe.

        ``STORAGE_EMULATOR_HOST`` is the server of an emulator, which gets no token. Otherwise the Application Default
        Credentials are looked for when they are needed: ``GOOGLE_APPLICATION_CREDENTIALS``, the login of
        ``gcloud auth application-default``, and the service account of the host.
        """
        return _store_with(os.environ.get("STORAGE_EMULATOR_HOST") or None)

    def _client(self) -> ObjectClient:
        return _client_of(self)

    def _checksums(self, body: Body) -> BodyChecksums:
        part = PartChecksums.of(body)
        return BodyChecksums((("x-goog-hash", encode_crc32c(part.crc32c)),), part.record)

    def _is_received(self, response: ObjectResponse, body: Body) -> bool:
        reported = find_crc32c(response.headers.get("x-goog-hash", ""))
        return not reported or reported == encode_crc32c(body.compute_crc32c())

    def _upload_headers(self) -> Sequence[tuple[str, str]]:
        return ()

    def _completion_headers(self, size: int, crc64nvme: int) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        return ()

    def _copy_headers(self) -> Sequence[tuple[str, str]]:
        return ()

    def _is_copied(
        self,
        source: Mapping[str, str],
        target: ObjectPath,
        answer: bytes,  # noqa: ARG002 - it has no checksum
        crc64nvme: int,  # noqa: ARG002 - the server knows CRC-32C
    ) -> bool:
        response, expected = self._head(target), find_crc32c(source.get("x-goog-hash", ""))
        told = "" if response is None else find_crc32c(response.headers.get("x-goog-hash", ""))
        return response is not None and (not expected or told in {"", expected})

    def _version_condition(self, headers: Mapping[str, str]) -> tuple[str, str]:
        return "x-goog-if-generation-match", headers["x-goog-generation"]

    def _check_completed(
        self,
        path: ObjectPath,
        records: Sequence[Sequence[str]],
        size: int,
        crc64nvme: int,
        answer: bytes,  # noqa: ARG002 - the properties of the object are documented, the answer is not
    ) -> None:
        sent, response = PartChecksums.combine(records), self._head(path)
        if (sent.size, sent.crc64nvme) != (size, crc64nvme):
            raise StorageError(
                errno.EIO, f"the parts of {path} were sent with other bytes than were hashed: save again"
            )
        if response is None:
            raise StorageError(
                errno.ENOENT,
                f"{path} is not there after the server has confirmed it: check whether something else than rankless "
                "removes objects there, or a proxy answers for the server, and save again",
            )
        reported = find_crc32c(response.headers.get("x-goog-hash", ""))
        if reported not in {"", encode_crc32c(sent.crc32c)} or int(response.headers["content-length"]) != size:
            raise StorageError(errno.EIO, f"{path} has other bytes than were sent: save again")


@cache
def _client_of(store: GCS) -> ObjectClient:
    """Return the client of a store, which all equal stores of this process share."""
    service = GCSService(store.endpoint, store.credentials, store.project)
    return ObjectClient(service, ca_file=store.ca_file, timeout=store.timeout, retry_seconds=store.retry_seconds)


@cache
def _store_with(emulator: str | None) -> GCS:
    if emulator is None:
        return GCS()
    return GCS(emulator if "://" in emulator else f"http://{emulator}", _no_token)


def _no_token() -> str:
    return ""
