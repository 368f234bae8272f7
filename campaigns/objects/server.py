"""A server of the campaign that runs: its address, its keys, and what is special about it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from campaigns.objects.readers import AzureReader, Reader, S3Reader
from rankless import S3, Azure
from rankless.errors import StorageError
from rankless.storage.object_path import ObjectPath
from rankless.storage.s3.aws_signing import Credentials

#: The bucket of all campaigns.
BUCKET = "rankless-tests"

#: The seconds after which a server that does not answer counts as broken.
_START_SECONDS = 180.0

RunningServer = TypeVar("RunningServer", bound="Server")

#: The settings of all stores: a connection that is silent for so long is broken; a request is repeated for so long.
_TIMEOUT, _RETRY_SECONDS = 5.0, 20.0


@dataclass(frozen=True)
class Server(ABC):
    """A server on the loopback interface.

    ``takes_small_parts``: parts of an upload may be of any size. ``notices_changes``: bytes that change on their way to
    it are noticed, since it compares their CRC, or answers with their MD5.
    """

    url: str
    takes_small_parts: bool = field(default=True, kw_only=True)
    notices_changes: bool = field(default=True, kw_only=True)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, compare=False, repr=False, kw_only=True)

    @abstractmethod
    def path(self, name: str, url: str = "") -> ObjectPath:
        """Return a path in the bucket, over another address of the server if ``url`` is given."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Return the variables with which the conformance suite finds the server."""

    @abstractmethod
    def create_bucket(self) -> None:
        """Create the bucket. Raises ``StorageError`` if it exists."""

    @abstractmethod
    def reader(self) -> Reader:
        """Return a reader of the bucket that does not use rankless."""


@dataclass(frozen=True)
class S3Server(Server):
    """A server with the API of S3.

    ``is_racy``: of several processes that create one object at a time, several may succeed.
    """

    access_key: str
    secret_key: str
    is_racy: bool = False

    def path(self, name: str, url: str = "") -> ObjectPath:
        """See :class:`Server`."""
        credentials = Credentials(self.access_key, self.secret_key)
        store = S3(url or self.url, credentials=credentials, timeout=_TIMEOUT, retry_seconds=_RETRY_SECONDS)
        return store.path(f"{BUCKET}/{name}")

    def environment(self) -> Mapping[str, str]:
        """See :class:`Server`."""
        racy = {"RANKLESS_TEST_S3_IS_RACY": "1"} if self.is_racy else {}
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return {"RANKLESS_TEST_S3": self.url, **keys, **racy}

    def create_bucket(self) -> None:
        """See :class:`Server`."""
        bucket = self.path("x").parent
        bucket.store._send("PUT", bucket, "create", "s3:CreateBucket")

    def reader(self) -> Reader:
        """See :class:`Server`."""
        return S3Reader(f"{self.url}/{BUCKET}", self.access_key, self.secret_key)


@dataclass(frozen=True)
class AzureServer(Server):
    """A server with the API of Azure Blob Storage. Its container can be read by all, so the reader needs no key."""

    account: str
    key: str = field(repr=False)

    def path(self, name: str, url: str = "") -> ObjectPath:
        """See :class:`Server`."""
        endpoint = f"{url or self.url}/{self.account}"
        store = Azure(self.account, endpoint, self.key, timeout=_TIMEOUT, retry_seconds=_RETRY_SECONDS)
        return store.path(f"{BUCKET}/{name}")

    def environment(self) -> Mapping[str, str]:
        """See :class:`Server`."""
        endpoint = f"BlobEndpoint={self.url}/{self.account}"
        return {"RANKLESS_TEST_AZURE": f"AccountName={self.account};AccountKey={self.key};{endpoint}"}

    def create_bucket(self) -> None:
        """See :class:`Server`."""
        bucket, public = self.path("x").parent, [("x-ms-blob-public-access", "container")]
        bucket.store._send("PUT", bucket, "create", "Contributor", {"restype": "container"}, public)

    def reader(self) -> Reader:
        """See :class:`Server`."""
        return AzureReader(f"{self.url}/{self.account}/{BUCKET}")


def start_process(
    server: Server, log: Path, *command: str | Path, environment: Mapping[str, str] | None = None
) -> None:
    """Start a process of a server. What it prints is in the file ``log``."""
    with log.open("wb") as output:
        server.processes.append(
            subprocess.Popen(
                [*map(str, command)], stdout=output, stderr=output, env={**os.environ, **(environment or {})}
            )
        )


def wait_for(server: RunningServer) -> RunningServer:
    """Wait until the server creates the bucket. Return the server."""
    bucket, ends = server.path("x").parent, time.monotonic() + _START_SECONDS
    while True:
        with suppress(StorageError):  # it exists, or the next request says what is wrong
            server.create_bucket()
        try:
            bucket.store.list_names(bucket)
        except StorageError:
            if time.monotonic() > ends:
                raise
        else:
            return server


@contextmanager
def stopped_at_end(server: Server) -> Iterator[None]:
    """Stop the processes of a server at the end of the context."""
    try:
        yield
    finally:
        for process in reversed(server.processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(server.processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
