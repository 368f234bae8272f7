"""The contenders of :mod:`benchmarks.object_store`: how each system moves a state to an object store and back.

Those that move bytes get a safetensors file in memory, made beforehand, and put it into memory that is there already.
"""

from __future__ import annotations

import base64
import http.client
import importlib
import io
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from awscrt.checksums import crc64nvme

import rankless
from benchmarks.object_server import Endpoint
from benchmarks.peers import DCP, OURS, State

#: The bytes of a part and the number of threads, for those with such settings.
PART, THREADS = 16 * 2**20, 8

#: The access key and its secret, which the server does not check.
CREDENTIALS = ("key", "secret")

BUCKET = "bucket"

#: The packages that are needed in addition to those of the other benchmarks.
PACKAGES = ("boto3", "obstore", "s3fs", "s3torchconnector", "trustme")


class ObjectPeer(Protocol):
    """A system. ``save`` gets what ``pack`` has made of a state, ``load`` what ``make_target`` has made of it."""

    #: Whether a load returns new memory with the whole state, instead of filling the target.
    allocates: ClassVar[bool]

    def pack(self, state: State) -> Any:
        """Return the input of a save."""

    def save(self, name: str, packed: Any) -> object:
        """Save."""

    def make_target(self, packed: Any) -> Any:
        """Return memory for such an input, all pages of which are present."""

    def load(self, name: str, target: Any) -> Any:
        """Load, and return the result."""

    def unpack(self, loaded: Any) -> State:
        """Return the tensors of a result."""


class _TensorPeer:
    """A system that saves tensors and loads into tensors."""

    allocates: ClassVar[bool] = False

    def pack(self, state: State) -> State:
        return state

    def make_target(self, packed: State) -> State:
        return {name: torch.full_like(tensor, 1) for name, tensor in packed.items()}

    def unpack(self, loaded: State) -> State:
        return loaded


class _BytesPeer:
    """A system that moves bytes."""

    allocates: ClassVar[bool] = False

    def pack(self, state: State) -> bytes:
        return safetensors.torch.save(dict(state))

    def make_target(self, packed: bytes) -> memoryview:
        return np.full(len(packed), 1, np.uint8).data

    def unpack(self, loaded: memoryview) -> State:
        return safetensors.torch.load(bytes(loaded))


class _Rankless(_TensorPeer):
    def __init__(self, endpoint: Endpoint) -> None:
        self._root = make_store(endpoint).path(BUCKET)

    def save(self, name: str, packed: State) -> None:
        rankless.save_checkpoint(self._root / name, "s", packed, rng=False)

    def load(self, name: str, target: State) -> State:
        rankless.load_checkpoint(self._root / name, model=target)
        return target


class _Dcp(_TensorPeer):
    def __init__(self, endpoint: Endpoint) -> None:
        self._options = list_s3fs_options(endpoint)

    def save(self, name: str, packed: State) -> None:
        dcp.save(dict(packed), storage_writer=open_dcp_writer(name, self._options), no_dist=True)

    def load(self, name: str, target: State) -> State:
        dcp.load(dict(target), storage_reader=open_dcp_reader(name, self._options), no_dist=True)
        return target


class _S3TorchConnector(_TensorPeer):
    allocates: ClassVar[bool] = True

    def __init__(self, endpoint: Endpoint) -> None:
        package = importlib.import_module("s3torchconnector")
        config = package.S3ClientConfig(force_path_style=True)
        self._checkpoint = package.S3Checkpoint("us-east-1", endpoint=endpoint.url, s3client_config=config)

    def save(self, name: str, packed: State) -> None:
        with self._checkpoint.writer(f"s3://{BUCKET}/{name}") as writer:
            torch.save(dict(packed), writer)

    def make_target(self, packed: State) -> State:
        del packed
        return {}

    def load(self, name: str, target: State) -> State:
        del target
        with self._checkpoint.reader(f"s3://{BUCKET}/{name}") as reader:
            loaded: State = torch.load(reader)
        return loaded


class _Boto3(_BytesPeer):
    def __init__(self, endpoint: Endpoint, checksums: str = "when_supported") -> None:
        boto3, botocore = importlib.import_module("boto3"), importlib.import_module("botocore.config")
        transfer = importlib.import_module("boto3.s3.transfer")
        options = botocore.Config(
            s3={"addressing_style": "path"},
            max_pool_connections=THREADS,
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
        )
        key, secret = CREDENTIALS
        self._client = boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=endpoint.url,
            verify=endpoint.ca_file,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=options,
        )
        self._config = transfer.TransferConfig(
            multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=THREADS
        )

    def save(self, name: str, packed: bytes) -> None:
        self._client.upload_fileobj(io.BytesIO(packed), BUCKET, name, Config=self._config)

    def load(self, name: str, target: memoryview) -> memoryview:
        self._client.download_fileobj(BUCKET, name, _MemoryFile(target), Config=self._config)
        return target


class _MemoryFile(io.RawIOBase):
    """A file over memory, into which boto3 writes piece by piece."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at}[whence]
        return self._at

    def write(self, data: Any, /) -> int:
        self._memory[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


class _Obstore(_BytesPeer):
    """The loads are ranges in threads, because one request for all would use one connection.

    ``unsigned``: bodies are not hashed for the signature, so nothing protects them but TLS.
    """

    def __init__(self, endpoint: Endpoint, *, unsigned: bool = False) -> None:
        self._obstore = importlib.import_module("obstore")
        options: dict[str, Any] = {"allow_http": endpoint.is_plain}
        if not endpoint.is_plain:
            with open(endpoint.ca_file, "rb") as file:  # noqa: PTH123
                options["root_certificate"] = file.read()
        key, secret = CREDENTIALS
        self._store = importlib.import_module("obstore.store").S3Store(
            BUCKET,
            endpoint=endpoint.url,
            access_key_id=key,
            secret_access_key=secret,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options=options,
            unsigned_payload=unsigned,
        )
        self._threads = ThreadPoolExecutor(THREADS)

    def save(self, name: str, packed: bytes) -> None:
        file = io.BytesIO(packed)
        self._obstore.put(self._store, name, file, use_multipart=True, chunk_size=PART, max_concurrency=THREADS)

    def load(self, name: str, target: memoryview) -> memoryview:
        def read(start: int) -> None:
            stop = min(start + PART, len(target))
            target[start:stop] = memoryview(self._obstore.get_range(self._store, name, start=start, end=stop))

        list(self._threads.map(read, range(0, len(target), PART)))
        return target


class _ObstoreAtOnce(_Obstore):
    """The load is one request, whose body becomes the result as it is."""

    allocates: ClassVar[bool] = True

    def make_target(self, packed: bytes) -> memoryview:
        del packed
        return memoryview(b"")

    def load(self, name: str, target: memoryview) -> memoryview:
        del target
        return memoryview(self._obstore.get(self._store, name).bytes())


class _BareLoop(_BytesPeer):
    """``http.client`` in threads: each part is an object. The least that a client in Python does."""

    def __init__(self, endpoint: Endpoint, checksum: Callable[[memoryview], int] | None = None) -> None:
        self._endpoint, self._checksum = urlsplit(endpoint.url), checksum
        self._context = ssl.create_default_context(cafile=endpoint.ca_file)
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(THREADS)

    def save(self, name: str, packed: bytes) -> None:
        list(self._threads.map(self._put, *zip(*_cut(name, memoryview(packed)), strict=True)))

    def load(self, name: str, target: memoryview) -> memoryview:
        list(self._threads.map(self._get, *zip(*_cut(name, target), strict=True)))
        return target

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._local, "connection"):
            host, port = self._endpoint.hostname or "", self._endpoint.port
            self._local.connection = (
                http.client.HTTPConnection(host, port)
                if self._endpoint.scheme == "http"
                else http.client.HTTPSConnection(host, port, context=self._context)
            )
        connection: http.client.HTTPConnection = self._local.connection
        return connection

    def _put(self, name: str, part: memoryview) -> None:
        crc = {} if self._checksum is None else {"x-amz-checksum-crc64nvme": _encode(self._checksum(part))}
        self._connection().request("PUT", f"/{BUCKET}/{name}", part, crc)
        self._connection().getresponse().read()

    def _get(self, name: str, part: memoryview) -> None:
        self._connection().request("GET", f"/{BUCKET}/{name}", headers={"x-amz-checksum-mode": "ENABLED"})
        response, done = self._connection().getresponse(), 0
        while count := response.readinto(part[done:]):
            done += count
        if self._checksum is not None and response.headers["x-amz-checksum-crc64nvme"] != _encode(self._checksum(part)):
            raise ValueError(f"{name} has other bytes than were sent")


def _cut(name: str, memory: memoryview) -> Iterator[tuple[str, memoryview]]:
    for number, start in enumerate(range(0, len(memory), PART)):
        yield f"{name}-{number}", memory[start : start + PART]


def _encode(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def make_store(endpoint: Endpoint) -> rankless.S3:
    """Return rankless's store."""
    return rankless.S3(endpoint=endpoint.url, credentials=CREDENTIALS, ca_file=endpoint.ca_file)


def list_s3fs_options(endpoint: Endpoint) -> Mapping[str, Any]:
    """Return the arguments of s3fs."""
    key, secret = CREDENTIALS
    return {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint.url, "verify": endpoint.ca_file}}


def open_dcp_writer(name: str, options: Mapping[str, Any]) -> Any:
    """Return DCP's writer. It need not sync: that would be a sync of all local disks."""
    return _import_fsspec().FsspecWriter(f"s3://{BUCKET}/{name}", sync_files=False, **options)


def open_dcp_reader(name: str, options: Mapping[str, Any]) -> Any:
    """Return DCP's reader."""
    return _import_fsspec().FsspecReader(f"s3://{BUCKET}/{name}", **options)


def _import_fsspec() -> Any:
    return importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")


#: The names in tables.
S3FS, BARE, BARE_CRC = f"{DCP} + s3fs", "bare loop", "bare loop, CRC-64"

#: The peers among which rankless is compared with the best.
TRANSFERS: Mapping[str, Callable[[Endpoint], ObjectPeer]] = {
    "boto3": _Boto3,
    "boto3, no checksums": lambda endpoint: _Boto3(endpoint, "when_required"),
    "obstore": _Obstore,
    "obstore, no checksums": lambda endpoint: _Obstore(endpoint, unsigned=True),
    "obstore, one request a load": _ObstoreAtOnce,
    "s3torchconnector": _S3TorchConnector,
}

PEERS: Mapping[str, Callable[[Endpoint], ObjectPeer]] = {
    OURS: _Rankless,
    **TRANSFERS,
    S3FS: _Dcp,
    BARE: _BareLoop,
    BARE_CRC: lambda endpoint: _BareLoop(endpoint, crc64nvme),
}
