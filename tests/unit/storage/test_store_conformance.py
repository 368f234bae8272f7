"""One suite for all stores: file systems, servers with the API of S3, Google's, Azure's, and the fakes of the tests.

To run it against a real server as well, set ``RANKLESS_TEST_S3`` to its URL, and the variables of AWS's tools. If the
server is Swift, set ``RANKLESS_TEST_S3_IS_RACY`` too. For Google Cloud Storage, set ``RANKLESS_TEST_GCS`` to a bucket:
``make gcs BUCKET=...``. What the suite writes there is deleted. For Azure, or Azurite, set ``RANKLESS_TEST_AZURE`` to a
connection string.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from awscrt.checksums import crc64nvme

import rankless
from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, StorageError, UnsafeNameError
from rankless.storage.azure.azure_store import Azure
from rankless.storage.azure.environment import parse_connection_string
from rankless.storage.body import Body
from rankless.storage.gcs.gcs_store import GCS
from rankless.storage.object_path import ObjectPath
from rankless.storage.s3.s3_store import S3
from rankless.storage.store import ObjectStore, store_of
from tests.helpers.certificates import Authority
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import PROFILES, FakeS3, store_for

PART = 5 * 2**20
REAL = os.environ.get("RANKLESS_TEST_S3")
REAL_GOOGLE = os.environ.get("RANKLESS_TEST_GCS")
REAL_AZURE = os.environ.get("RANKLESS_TEST_AZURE")

#: Whether the real server decides conditions in another step than the write, as Swift does.
IS_RACY = bool(os.environ.get("RANKLESS_TEST_S3_IS_RACY"))


def object_folder(kind: str, scratch: Path) -> Iterator[ObjectPath]:
    if kind == "real":
        store = S3(REAL, retry_seconds=20)
        bucket = store.path(f"rankless-tests/{uuid4().hex}")
        with suppress(StorageError):
            store._send("PUT", store.path("rankless-tests"), "create", "s3:CreateBucket")
        yield bucket / "run"
        return
    if kind == "real google":
        yield from google_folder()
        return
    if kind == "real azure":
        account = Azure(*parse_connection_string(REAL_AZURE or ""), retry_seconds=20)
        with suppress(StorageError):
            account._send("PUT", account.path("rankless-tests"), "create", "Contributor", {"restype": "container"})
        yield account.path(f"rankless-tests/{uuid4().hex}/run")
        return
    if kind == "azure":
        azure = FakeAzure()
        azure.page = 3
        with azure.served() as url:
            yield azure.store_at(url).path(f"{BUCKET}/some/run")
        return
    if kind == "encrypted":
        authority, fake = Authority(scratch), FakeS3()
        with fake.served(authority.issue("127.0.0.1")) as url:
            yield fake.store_at(url, ca_file=authority.file).path(f"{BUCKET}/some/run")
        return
    with FakeS3(PROFILES[kind]).served() as url:
        yield store_for(PROFILES[kind])(url).path(f"{BUCKET}/some/run")


def google_folder() -> Iterator[ObjectPath]:
    folder = GCS.from_environment().path(f"{REAL_GOOGLE}/rankless-tests-{uuid4().hex}")
    yield folder / "run"
    for upload, _ in folder.store.list_uploads(folder):
        folder.store.abort_upload(upload)
    for info in folder.store.list_objects(folder):
        folder.store.remove_file(info.path)


REAL_STORES = {"real": REAL, "real google": REAL_GOOGLE, "real azure": REAL_AZURE}
OBJECT_STORES = [*PROFILES, "azure", "encrypted", *(name for name, setting in REAL_STORES.items() if setting)]


@pytest.fixture(params=["posix", *OBJECT_STORES])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "posix":
        (tmp_path / "run/sub").mkdir(parents=True)
        yield tmp_path / "run"
    else:
        yield from object_folder(request.param, tmp_path)


@pytest.fixture(params=OBJECT_STORES)
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectPath]:
    yield from object_folder(request.param, tmp_path)


class TestReads:
    def test_small_files_are_replaced_read_and_removed(self, folder: Path) -> None:
        store, path = store_of(folder), folder / "a b+ü%.json"
        for data in (b"one", b"", b"three"):
            store.replace_small(path, data)
            assert (store.read_small(path), store.file_size(path)) == (data, len(data))
        assert store.is_file(path)
        assert store.file_exists(path)
        store.remove_file(path)
        assert not store.path_exists(path)
        with pytest.raises(StorageError) as missing:
            store.read_small(path)
        assert missing.value.errno == errno.ENOENT
        assert path.name in str(missing.value)

    def test_a_small_file_has_a_limit(self, folder: Path) -> None:
        store_of(folder).replace_small(folder / "a", b"12345")
        with pytest.raises(StorageError) as error:
            store_of(folder).read_small(folder / "a", 4)
        assert error.value.errno == errno.EFBIG

    def test_names_are_those_of_files_and_folders(self, folder: Path) -> None:
        store = store_of(folder)
        assert store.list_names(folder / "none") == set()
        for name in ("b", ".hidden", "sub/deep", "a b+ü%"):
            store.replace_small(folder / name, b"x")
        assert store.list_names(folder) == {"b", ".hidden", "sub", "a b+ü%"}
        assert [store.is_directory(folder / name) for name in ("b", "sub", "none", "su")] == [False, True, False, False]
        assert [store.path_exists(folder / name) for name in ("b", "sub", "none", "su")] == [True, True, False, False]

    def test_ranges_are_read_into_memory(self, folder: Path) -> None:
        data = bytes(range(256)) * 400
        store_of(folder).replace_small(folder / "data", data)
        into = bytearray(50_000)
        with store_of(folder).open_reader(folder / "data") as reader:
            assert reader.size == len(data)
            for offset in (0, 1, 30_000, 52_400):
                reader.read(offset, memoryview(into))
                assert into == data[offset : offset + len(into)]
            assert sum(len(chunk) for chunk in reader.read_in_chunks(7, memoryview(into))) == len(into)
            reader.read(5, memoryview(b""))
            for offset in (52_401, 102_400, 500_000):
                with pytest.raises(CorruptCheckpointError, match="truncated"):
                    reader.read(offset, memoryview(into))

    def test_an_empty_file_has_the_size_0(self, folder: Path) -> None:
        store_of(folder).replace_small(folder / "empty", b"")
        with store_of(folder).open_reader(folder / "empty") as reader:
            assert reader.size == 0

    def test_names_that_lead_outside_are_refused(self, folder: Path) -> None:
        store_of(folder).replace_small(folder / "a", b"x")
        store_of(folder).replace_small(folder.parent / "outside", b"x")
        store_of(folder).check_regular(folder / "a", within=(folder,))
        with pytest.raises(UnsafeNameError):
            store_of(folder).check_regular(folder.parent / "outside", within=(folder,))


class TestObjects:
    def test_an_object_is_created_once(self, prefix: ObjectPath) -> None:
        assert prefix.store.create_object(prefix / "1", b"first")
        assert not prefix.store.create_object(prefix / "1", b"second")
        assert prefix.store.read_small(prefix / "1") == b"first"

    def test_of_many_writers_one_creates_an_object(self, prefix: ObjectPath) -> None:
        if IS_RACY and prefix.bucket != BUCKET:
            pytest.skip("this server lets several writers create one object: see docs/object-stores.md")
        created: list[bytes] = []

        def create(number: int) -> None:
            data = f"writer {number}".encode()
            if prefix.store.create_object(prefix / "1", data):
                created.append(data)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert created == [prefix.store.read_small(prefix / "1")]

    def test_only_the_version_that_is_named_is_replaced(self, prefix: ObjectPath) -> None:
        store: ObjectStore = prefix.store
        assert store.find_version(prefix / "a") is None
        assert not store.replace_version(prefix / "a", '"none"', b"new")
        store.replace_small(prefix / "a", b"first")
        first = store.find_version(prefix / "a")
        assert first is not None
        assert first.strip('"') == store.list_objects(prefix)[0].etag.strip('"')
        assert store.replace_version(prefix / "a", first, b"second")
        assert not store.replace_version(prefix / "a", first, b"third")
        assert store.read_small(prefix / "a") == b"second"

    def test_lists_have_all_objects_in_order(self, prefix: ObjectPath) -> None:
        for number in range(12):
            prefix.store.replace_small(prefix / f"x/{number:02}", bytes(number))
        prefix.store.replace_small(prefix / "xyz", b"")
        infos = prefix.store.list_objects(prefix / "x")
        assert [(info.path, info.size) for info in infos] == [(prefix / f"x/{n:02}", n) for n in range(12)]
        assert all(info.etag and info.time > 1.7e9 for info in infos)
        assert prefix.store.list_objects(prefix / "none") == []

    def test_parts_of_any_order_become_one_object(self, prefix: ObjectPath) -> None:
        store: ObjectStore = prefix.store
        data = [bytes([number]) * PART for number in (1, 2)] + [b"end"]
        upload = store.create_upload(prefix / "big", {"rankless": "id"})
        assert [found for found, _ in store.list_uploads(prefix)] == [upload]
        assert not store.path_exists(prefix / "big")
        etags = {n: store.put_part(upload, n, Body.of(data[n - 1])) for n in (3, 1, 2)}
        whole = b"".join(data)
        etag = store.complete_upload(upload, [etags[n] for n in (1, 2, 3)], len(whole), crc64nvme(whole))
        assert etag.strip('"') == (store.find_version(prefix / "big") or "").strip('"')
        assert store.read_small(prefix / "big") == whole
        assert store.list_uploads(prefix) == []

    def test_an_object_is_copied_if_it_has_the_version(self, prefix: ObjectPath) -> None:
        store, source, copied, data = prefix.store, prefix / "a b+c", prefix / "copies/of it", bytes(range(256)) * 40
        etag = store.put_object(source, Body.of(data))
        new = store.copy_object(source, etag, copied, crc64nvme(data))
        assert store.read_small(copied) == data
        assert new.strip('"') == (store.find_version(copied) or "").strip('"')
        other = store.put_object(source, Body.of(b"others"))
        with pytest.raises(StorageError, match="was removed or replaced before it was copied"):
            store.copy_object(source, etag, prefix / "late", crc64nvme(data))
        store.remove_file(source)
        with pytest.raises(StorageError, match="was removed or replaced before it was copied"):
            store.copy_object(source, other, prefix / "late", crc64nvme(data))
        assert not store.path_exists(prefix / "late")
        assert store.read_small(copied) == data

    def test_an_upload_replaces_the_object_that_is_there(self, prefix: ObjectPath) -> None:
        store: ObjectStore = prefix.store
        for data in (b"first", b"the second"):
            upload = store.create_upload(prefix / "big", {})
            receipt = store.put_part(upload, 1, Body.of(data))
            store.complete_upload(upload, [receipt], len(data), crc64nvme(data))
            assert store.read_small(prefix / "big") == data

    def test_an_aborted_upload_takes_no_part(self, prefix: ObjectPath) -> None:
        store: ObjectStore = prefix.store
        upload = store.create_upload(prefix / "big", {})
        etag = store.put_part(upload, 1, Body.of(b"x"))
        store.abort_upload(upload)
        store.abort_upload(upload)
        if store.scheme == "az":  # it notices at the end only
            store.put_part(upload, 1, Body.of(b"x"))
        else:
            with pytest.raises(StorageError):
                store.put_part(upload, 1, Body.of(b"x"))
        with pytest.raises(StorageError):
            store.complete_upload(upload, [etag], 1, crc64nvme(b"x"))
        assert not store.path_exists(prefix / "big")

    def test_a_reader_of_an_object_that_is_replaced_is_told(self, prefix: ObjectPath) -> None:
        path, into = prefix / "a", memoryview(bytearray(10))
        prefix.store.put_object(path, Body.of(bytes(3 * 2**20)))
        with prefix.store.open_reader(path) as reader:
            reader.read(0, into)
            prefix.store.put_object(path, Body.of(bytes([1]) * (3 * 2**20)))
            with pytest.raises(CheckpointReplacedError, match="was replaced while it was being read"):
                reader.read(2**21, into)

    def test_an_object_is_written_at_once(self, prefix: ObjectPath) -> None:
        etag = prefix.store.put_object(prefix / "a", Body.of(b"12"))
        assert prefix.store.read_small(prefix / "a") == b"12"
        assert prefix.store.find_version(prefix / "a") == etag

    def test_a_checkpoint_with_a_file_of_two_parts_is_saved_and_loaded(self, prefix: ObjectPath) -> None:
        weights = torch.arange(5 * 2**20, dtype=torch.float32)
        rankless.save_checkpoint(prefix, "s", {"weights": weights}, step=1)
        model = {"weights": torch.zeros_like(weights)}
        assert rankless.restore(prefix, model=model).verified
        assert torch.equal(model["weights"], weights)

    def test_removal_of_a_missing_object_is_no_error(self, prefix: ObjectPath) -> None:
        prefix.store.remove_file(prefix / "none")
