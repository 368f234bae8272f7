"""How the client of Azure Blob Storage signs requests, and how it meets failures of the server and the connection."""

from __future__ import annotations

import base64
import errno
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import pytest
from awscrt.checksums import crc64nvme

from rankless import Azure
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from rankless.storage.azure.azure_dialect import split_endpoint
from rankless.storage.azure.environment import parse_connection_string
from rankless.storage.body import Body
from rankless.storage.http import retries
from rankless.storage.http.connection import Address, HttpResponse
from rankless.storage.location import parse_location
from rankless.storage.object_path import ObjectPath, make_object_path
from rankless.storage.store import Upload
from tests.helpers.fake_azure import ACCOUNT, KEY, REQUEST_ID, FakeAzure, Recorded
from tests.helpers.fake_http import BUCKET, Answers, LoseOnce, disconnect
from tests.helpers.object_histories import Crash

SAS = "sv=2021-12-02&sp=rwdl&sig=abc%2B"


@pytest.fixture
def fake() -> Iterator[FakeAzure]:
    store = FakeAzure()
    with store.connected(), mock.patch.object(retries, "_FIRST_WAIT", 1e-3):
        yield store


@pytest.fixture
def folder(fake: FakeAzure) -> ObjectPath:
    path = fake.store_at("http://fake").path(f"{BUCKET}/run")
    path.store.replace_small(path / "a", b"content")
    fake.requests.clear()
    return path


def refuse(status: int, code: str) -> Callable[[object, str], HttpResponse]:
    return lambda request, stage: FakeAzure().failure(status, code)  # noqa: ARG005


def test_an_error_names_the_object_and_has_one_line(fake: FakeAzure, folder: ObjectPath) -> None:
    with pytest.raises(StorageError, match=r"could not read az://bucket/run/b: BlobNotFound RequestId:1$") as error:
        folder.store.read_small(folder / "b")
    assert error.value.errno == errno.ENOENT


def test_a_missing_permission_is_named(fake: FakeAzure, folder: ObjectPath) -> None:
    fake.on_request = refuse(403, "AuthorizationPermissionMismatch")
    upload = Upload(folder / "big", "upload=12345678")
    for call, permission in (
        (lambda: folder.store.read_small(folder / "a"), "Storage Blob Data Reader, or r in"),
        (lambda: folder.store.list_names(folder), "Storage Blob Data Reader, or l in"),
        (lambda: folder.store.replace_small(folder / "a", b""), "Storage Blob Data Contributor, or w in"),
        (
            lambda: folder.store.put_part(upload, 1, Body((memoryview(b"x"),), 0)),
            "Storage Blob Data Contributor, or w in",
        ),
        (lambda: folder.store.remove_file(folder / "a"), "Storage Blob Data Contributor, or d in"),
    ):
        with pytest.raises(StorageError, match=permission) as error:
            call()
        assert error.value.errno == errno.EACCES


def test_a_missing_container_is_an_error_of_a_removal(fake: FakeAzure, folder: ObjectPath) -> None:
    store = folder.store
    with pytest.raises(StorageError, match=r"ContainerNotFound.*create it"):
        store.remove_file(make_object_path(store, "missing/a"))


class TestCredentials:
    def test_a_wrong_key_is_refused_once(self, fake: FakeAzure) -> None:
        store = fake.store_at("http://fake", credentials=base64.b64encode(b"wrong").decode())
        with pytest.raises(StorageError, match="AuthenticationFailed"):
            store.read_small(store.path(f"{BUCKET}/a"))
        assert len(fake.requests) == 1

    @pytest.mark.parametrize("hours", [-2, 2])
    def test_a_wrong_clock_of_this_host_is_corrected(self, fake: FakeAzure, hours: int) -> None:
        fake.clock = lambda: time.time() + hours * 3600
        store = fake.store_at("http://fake")
        store.replace_small(store.path(f"{BUCKET}/a"), b"content")
        assert store.read_small(store.path(f"{BUCKET}/a")) == b"content"
        assert len(fake.requests) == 3

    @pytest.mark.parametrize("prefix", ["", "?"])
    def test_a_shared_access_signature_is_part_of_the_query(self, fake: FakeAzure, prefix: str) -> None:
        store = fake.store_at("http://fake", credentials=prefix + SAS)
        store.replace_small(store.path(f"{BUCKET}/a"), b"content")
        assert store.list_names(store.path(BUCKET)) == {"a"}
        assert all(request.query["sig"] == "abc+" for request in fake.requests)
        assert not any("authorization" in request.headers for request in fake.requests)

    @pytest.mark.parametrize("refusal", [(401, "InvalidAuthenticationInfo"), (403, "AuthenticationFailed")])
    def test_an_expired_token_is_asked_for_again(self, fake: FakeAzure, refusal: tuple[int, str]) -> None:
        tokens = iter(["old", "new", "new"])
        store = fake.store_at("http://fake", credentials=lambda: next(tokens))
        fake.on_request = Answers(FakeAzure().failure(*refusal), kind="put")
        store.replace_small(store.path(f"{BUCKET}/a"), b"x")
        assert [request.headers["authorization"] for request in fake.requests] == ["Bearer old", "Bearer new"]

    def test_a_token_that_is_always_refused_is_an_error(self, fake: FakeAzure) -> None:
        store = fake.store_at("http://fake", credentials=lambda: "token")
        fake.on_request = refuse(401, "InvalidAuthenticationInfo")
        with pytest.raises(StorageError) as error:
            store.read_small(store.path(f"{BUCKET}/a"))
        assert error.value.errno == errno.EACCES

    def test_without_credentials_tokens_come_from_azure_identity(self, fake: FakeAzure) -> None:
        identity = ModuleType("azure.identity")
        identity.DefaultAzureCredential = lambda: "credential"  # type: ignore[attr-defined]
        identity.get_bearer_token_provider = lambda *args: lambda: "-".join(args)  # type: ignore[attr-defined]
        store = fake.store_at("http://fake", credentials=None)
        with mock.patch.dict(sys.modules, {"azure": ModuleType("azure"), "azure.identity": identity}):
            store.replace_small(store.path(f"{BUCKET}/a"), b"x")
        sent = fake.requests[0].headers["authorization"]
        assert sent == "Bearer credential-https://storage.azure.com/.default"

    def test_without_azure_identity_the_error_says_what_to_do(self, fake: FakeAzure) -> None:
        store = fake.store_at("http://fake", credentials=None, timeout=1.0)  # so it has a client of its own
        with (
            mock.patch.dict(sys.modules, {"azure": None, "azure.identity": None}),
            pytest.raises(StorageError, match=r"AZURE_STORAGE_KEY.*pip install azure-identity"),
        ):
            store.read_small(store.path(f"{BUCKET}/a"))

    def test_a_login_that_fails_says_why(self, fake: FakeAzure) -> None:
        def fail() -> str:
            raise RuntimeError("the login has expired")

        identity = ModuleType("azure.identity")
        identity.DefaultAzureCredential = lambda: "credential"  # type: ignore[attr-defined]
        identity.get_bearer_token_provider = lambda *_: fail  # type: ignore[attr-defined]
        store = fake.store_at("http://fake", credentials=None, timeout=2.0)  # so it has a client of its own
        with (
            mock.patch.dict(sys.modules, {"azure": ModuleType("azure"), "azure.identity": identity}),
            pytest.raises(StorageError, match="no token was given: the login has expired"),
        ):
            store.read_small(store.path(f"{BUCKET}/a"))


class TestUploads:
    def upload(self, folder: ObjectPath) -> bytes:
        data, store = b"abcdefg", folder.store
        upload = store.create_upload(folder / "big", {"rankless": "id"})
        names = [store.put_part(upload, number, Body.of(part)) for number, part in ((1, data[:4]), (2, data[4:]))]
        store.complete_upload(upload, names, len(data), crc64nvme(data))
        return data

    @pytest.mark.parametrize("stage", ["before", "after"])
    @pytest.mark.parametrize("number", range(5))
    def test_a_lost_reply_of_any_request_changes_nothing(
        self, fake: FakeAzure, folder: ObjectPath, number: int, stage: str
    ) -> None:
        fake.on_request = LoseOnce(number, stage)
        data = self.upload(folder)
        assert folder.store.read_small(folder / "big") == data
        assert fake.objects["run/big"].notes["x-ms-meta-rankless"] == "id"
        assert not fake.uploads

    @pytest.mark.parametrize("other", [b"another", b"abc"])
    def test_the_object_of_another_writer_is_no_success(
        self, fake: FakeAzure, folder: ObjectPath, other: bytes
    ) -> None:
        def write_other() -> None:
            folder.store.replace_small(folder / "big", other)
            disconnect()

        fake.on_request = Answers(write_other, kind="complete")
        with pytest.raises(StorageError, match="could not complete az://bucket/run/big"):
            self.upload(folder)
        assert folder.store.read_small(folder / "big") == other

    def test_a_part_that_changed_on_its_way_is_an_error(self, fake: FakeAzure, folder: ObjectPath) -> None:
        upload = folder.store.create_upload(folder / "big", {})
        with pytest.raises(StorageError, match="Crc64Mismatch"):
            folder.store.put_part(upload, 1, Body((memoryview(b"x"),), crc64nvme(b"y")))

    def test_another_size_of_the_parts_is_an_error(self, fake: FakeAzure, folder: ObjectPath) -> None:
        upload = folder.store.create_upload(folder / "big", {})
        name = folder.store.put_part(upload, 1, Body.of(b"x"))
        with pytest.raises(StorageError, match="has other blocks than were sent: save again"):
            folder.store.complete_upload(upload, [name], 2, crc64nvme(b"x"))
        assert not folder.store.path_exists(folder / "big")

    @pytest.mark.parametrize("stage", ["before", "after"])
    @pytest.mark.parametrize("number", range(2))
    def test_a_lost_reply_of_an_abort_leaves_nothing(
        self, fake: FakeAzure, folder: ObjectPath, number: int, stage: str
    ) -> None:
        upload = folder.store.create_upload(folder / "big", {})
        fake.on_request = LoseOnce(number, stage)
        folder.store.abort_upload(upload)
        assert fake.objects.keys() == {"run/a"}
        assert not fake.uploads

    def test_an_abort_that_died_before_its_end_is_finished_by_another_one(
        self, fake: FakeAzure, folder: ObjectPath
    ) -> None:
        upload = folder.store.create_upload(folder / "big", {"rankless": "x"})

        def die(request: Recorded, stage: str) -> None:
            if request.method == "DELETE":
                raise Crash

        fake.on_request = die
        with pytest.raises(Crash):
            folder.store.abort_upload(upload)
        fake.on_request = lambda request, stage: None  # noqa: ARG005
        assert fake.objects["run/big"].data == b""
        for left, _ in folder.store.list_uploads(folder):
            folder.store.abort_upload(left)
        assert fake.objects.keys() == {"run/a"}

    def test_an_abort_never_deletes_an_object(self, fake: FakeAzure, folder: ObjectPath) -> None:
        data = self.upload(folder)
        folder.store.abort_upload(Upload(folder / "big", "upload=12345678"))
        assert folder.store.read_small(folder / "big") == data

    def test_an_object_that_is_written_during_an_abort_stays(self, fake: FakeAzure, folder: ObjectPath) -> None:
        upload = folder.store.create_upload(folder / "big", {})
        fake.on_request = Answers(lambda: folder.store.replace_small(folder / "big", b"new"), kind="delete")
        folder.store.abort_upload(upload)
        assert folder.store.read_small(folder / "big") == b"new"

    def test_blocks_of_other_programs_are_no_uploads(self, fake: FakeAzure, folder: ObjectPath) -> None:
        crc = ("x-ms-content-crc64", base64.b64encode(crc64nvme(b"x").to_bytes(8, "little")).decode())
        for key, name in (("b", b"block 1"), ("c", b"\xff\xfe")):
            query = {"comp": "block", "blockid": base64.b64encode(name).decode()}
            folder.store._send("PUT", folder / key, "write", "", query, [crc], body=(memoryview(b"x"),))  # type: ignore[attr-defined]
        folder.store.replace_small(folder / "empty", b"")
        assert folder.store.list_uploads(folder) == []

    def test_headers_belong_to_the_requests_that_create(self, fake: FakeAzure) -> None:
        store = fake.store_at("http://fake", headers={"X-MS-Access-Tier": "Cool", "x-ms-encryption-scope": "scope"})
        folder = store.path(f"{BUCKET}/run")
        self.upload(folder)
        store.replace_small(folder / "a", b"")
        store.read_small(folder / "a")
        names = ("x-ms-access-tier", "x-ms-encryption-scope")
        sent = [(request.kind, *(name in request.headers for name in names)) for request in fake.requests]
        assert sent == [
            *3 * [("part", False, True)],
            ("list blocks", False, False),
            ("complete", True, True),
            ("put", True, True),
            ("get", False, False),
        ]


class TestCreation:
    def test_another_conflict_is_an_error(self, fake: FakeAzure, folder: ObjectPath) -> None:
        fake.on_request = refuse(409, "BlobImmutableDueToPolicy")
        with pytest.raises(StorageError, match="BlobImmutableDueToPolicy"):
            folder.store.create_object(folder / "1", b"mine")


class TestReads:
    @pytest.mark.parametrize("body", [b"short", b""])
    def test_a_body_that_ends_too_early_is_an_error(self, body: bytes) -> None:
        fake = FakeAzure()
        with fake.served() as url:
            store = fake.store_at(url)
            path = store.path(f"{BUCKET}/a")
            store.replace_small(path, bytes(1000))
            fake.on_request = Answers(HttpResponse(206, {"content-range": "bytes 0-9/1000", **REQUEST_ID}, body))
            with pytest.raises(CorruptCheckpointError, match="truncated"):
                store.open_reader(path).read(0, memoryview(bytearray(10)))

    def test_an_empty_page_is_not_the_end_of_a_list(self, fake: FakeAzure, folder: ObjectPath) -> None:
        page = b"<EnumerationResults><Blobs/><NextMarker>run/</NextMarker></EnumerationResults>"
        for call in (
            lambda: folder.store.is_directory(folder),
            lambda: folder.store.list_names(folder) == {"a"},
            lambda: len(folder.store.list_objects(folder)) == 1,
        ):
            fake.on_request = Answers(HttpResponse(200, {}, page), kind="list")
            assert call()


class TestSettings:
    def test_a_url_means_the_account_of_the_environment(self) -> None:
        account = {"AZURE_STORAGE_ACCOUNT": "account"}
        for variables, credentials in (
            (account, None),
            (account | {"AZURE_STORAGE_KEY": KEY, "AZURE_STORAGE_SAS_TOKEN": SAS}, KEY),
            (account | {"AZURE_STORAGE_SAS_TOKEN": SAS}, SAS),
        ):
            with mock.patch.dict(os.environ, variables):
                path = parse_location("az://container/run")
            assert path == Azure("account", credentials=credentials).path("container/run")
            assert str(path) == "az://container/run"
        with mock.patch.dict(os.environ, {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=b;AccountKey={KEY}"}):
            assert Azure.from_environment() == Azure("b", "https://b.blob.core.windows.net", KEY)

    def test_without_an_account_the_error_says_what_to_set(self) -> None:
        with (
            mock.patch.dict(os.environ, {"AZURE_STORAGE_ACCOUNT": "", "AZURE_STORAGE_CONNECTION_STRING": ""}),
            pytest.raises(StorageError, match="AZURE_STORAGE_ACCOUNT"),
        ):
            parse_location("az://container/run")

    def test_connection_strings(self) -> None:
        parse = parse_connection_string
        text = f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey={KEY};EndpointSuffix=core.example"
        assert parse(text) == ("a", "http://a.blob.core.example", KEY)
        emulator = f"AccountName=dev;AccountKey={KEY};BlobEndpoint=http://127.0.0.1:10000/dev;"
        assert parse(emulator) == ("dev", "http://127.0.0.1:10000/dev", KEY)
        signature = f"BlobEndpoint=https://a.blob.core.windows.net/;SharedAccessSignature={SAS}"
        assert parse(signature) == ("a", "https://a.blob.core.windows.net/", SAS)
        with pytest.raises(InvalidArgumentError, match="no AccountName"):
            parse("UseDevelopmentStorage=true")

    def test_endpoints(self) -> None:
        assert split_endpoint("http://127.0.0.1:10000/dev/") == (Address("http", "127.0.0.1", 10000), "/dev")
        assert split_endpoint("https://a.blob.core.windows.net") == (
            Address("https", "a.blob.core.windows.net", None),
            "",
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"account": "a.b"}, "account"),
            ({"account": "a", "endpoint": "localhost"}, "endpoint"),
            ({"account": "a", "credentials": "no key"}, "credentials"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: dict[str, str], message: str) -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            Azure(**arguments)  # type: ignore[arg-type]

    def test_a_path_can_be_sent_to_another_process_and_shows_no_secret(self) -> None:
        path = Azure(ACCOUNT, credentials=KEY).path("container/run")
        assert pickle.loads(pickle.dumps(path)) == path  # noqa: S301 - what this test has written
        assert KEY not in repr(path.store)

    @pytest.mark.parametrize(
        "variables",
        [
            {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_KEY": KEY},
            {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName={ACCOUNT};AccountKey={KEY}"},
        ],
    )
    def test_a_key_of_the_environment_is_not_pickled_but_looked_up_again(self, variables: dict[str, str]) -> None:
        with mock.patch.dict(os.environ, variables, clear=True):
            path = Azure.from_environment().path("container/run")
            pickled = pickle.dumps(path)
            assert pickle.loads(pickled) == path  # noqa: S301 - what this test has written
        assert KEY.encode() not in pickled
        with mock.patch.dict(os.environ, {}, clear=True):
            store = pickle.loads(pickled).store  # noqa: S301
        assert (store.account, store.credentials) == (ACCOUNT, None)
