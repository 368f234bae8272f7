"""How the client of Google Cloud Storage meets failures, of the server, of the connection, and of its credentials."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest
from awscrt.checksums import crc32c, crc64nvme

import rankless
from rankless import GCS
from rankless.errors import StorageError
from rankless.storage.body import Body
from rankless.storage.gcs.object_checksums import PartChecksums, encode_crc32c, find_crc32c
from rankless.storage.http import retries
from rankless.storage.http.connection import HttpResponse
from rankless.storage.location import parse_location
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_http import BUCKET, Answers, disconnect
from tests.helpers.fake_s3 import GOOGLE, FakeS3, failure, gcs_at
from tests.helpers.token_server import TokenServer


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    store = FakeS3(GOOGLE)
    with store.connected(), mock.patch.object(retries, "_FIRST_WAIT", 1e-3):
        yield store


@pytest.fixture
def folder(fake: FakeS3) -> ObjectPath:
    path = gcs_at("http://fake").path(f"{BUCKET}/run")
    path.store.replace_small(path / "a", b"content")
    fake.requests.clear()
    return path


def test_a_missing_permission_is_named(fake: FakeS3, folder: ObjectPath) -> None:
    fake.on_request = lambda request, stage: failure(403, "AccessDenied")  # noqa: ARG005
    for call, permission in (
        (lambda: folder.store.read_small(folder / "a"), "storage.objects.get"),
        (lambda: folder.store.is_file(folder / "a"), "storage.objects.list to see"),
        (lambda: folder.store.replace_small(folder / "a", b""), "storage.objects.create"),
        (lambda: folder.store.create_upload(folder / "a", {}), "storage.multipartUploads.create"),
        (lambda: folder.store.list_names(folder), "storage.objects.list"),
        (lambda: folder.store.remove_file(folder / "a"), "storage.objects.delete"),
        (lambda: folder.store.list_uploads(folder), "storage.multipartUploads.list"),
    ):
        with pytest.raises(StorageError, match=permission) as error:
            call()
        assert error.value.errno == errno.EACCES


def test_requests_are_those_of_the_xml_api(fake: FakeS3) -> None:
    seen: list[tuple[str, str, Mapping[str, str]]] = []
    store = gcs_at("http://fake", project="payer", headers={"x-goog-storage-class": "NEARLINE"})

    def handle(method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        seen.append((method, target, headers))
        return FakeS3.handle(fake, method, target, headers, body)

    with mock.patch.object(fake, "handle", handle):
        store.create_object(store.path(f"{BUCKET}/a b"), b"x")
        store.list_names(store.path(BUCKET))
    common = {"authorization": "Bearer token", "x-goog-user-project": "payer"}
    created = {"x-goog-hash": encode_crc32c(crc32c(b"x")), "x-goog-if-generation-match": "0"}
    listed = "/bucket?delimiter=%2F&encoding-type=url&list-type=2&max-keys=1000&prefix="
    assert seen == [
        ("PUT", "/bucket/a%20b", {**common, **created, "x-goog-storage-class": "NEARLINE"}),
        ("GET", listed, common),
    ]


class TestUploads:
    def upload(self, folder: ObjectPath, hashed: bytes | None = None) -> bytes:
        data = bytes(range(256)) * (6 * 2**12)
        store = folder.store
        upload = store.create_upload(folder / "big", {"rankless": "id"})
        receipts = [
            store.put_part(upload, number, Body.of(part))
            for number, part in ((1, data[: 5 * 2**20]), (2, data[5 * 2**20 :]))
        ]
        store.complete_upload(upload, receipts, len(data), crc64nvme(hashed or data))
        return data

    def test_the_object_is_compared_with_its_parts(self, fake: FakeS3, folder: ObjectPath) -> None:
        data = self.upload(folder)
        assert folder.store.read_small(folder / "big") == data
        assert [request.kind for request in fake.requests[-3:-1]] == ["complete", "head"]
        assert fake.objects["run/big"].notes == {"rankless": "id"}

    @pytest.mark.parametrize("stage", ["before", "after"])
    def test_a_lost_reply_of_the_completion_is_decided_by_the_object(
        self, fake: FakeS3, folder: ObjectPath, stage: str
    ) -> None:
        fake.on_request = Answers(disconnect, kind="complete", stage=stage)
        assert self.upload(folder) == folder.store.read_small(folder / "big")

    def test_a_lost_reply_does_not_hide_other_bytes(self, fake: FakeS3, folder: ObjectPath) -> None:
        def corrupt_and_disconnect() -> None:
            fake.objects["run/big"].data = bytes(len(fake.objects["run/big"].data))
            disconnect()

        fake.on_request = Answers(corrupt_and_disconnect, kind="complete", stage="after")
        with pytest.raises(StorageError, match="run/big has other bytes than were sent"):
            self.upload(folder)

    def test_an_error_inside_a_success_is_repeated(self, fake: FakeS3, folder: ObjectPath) -> None:
        error = HttpResponse(200, {}, b"  <?xml version='1.0'?><Error><Code>InternalError</Code></Error>")
        fake.on_request = Answers(error, kind="complete")
        assert self.upload(folder) == folder.store.read_small(folder / "big")

    @pytest.mark.parametrize(
        "changed",
        [
            {"x-goog-hash": "crc32c=AAAAAA==", "content-length": str(6 * 2**20)},
            {"x-goog-hash": "", "content-length": "7"},
        ],
    )
    def test_another_object_in_the_store_is_an_error(
        self, fake: FakeS3, folder: ObjectPath, changed: dict[str, str]
    ) -> None:
        described = {"etag": "e", "x-goog-generation": "1", **changed}
        fake.on_request = Answers(HttpResponse(200, described), kind="head")
        with pytest.raises(StorageError, match="other bytes than were sent"):
            self.upload(folder)

    def test_parts_with_other_bytes_than_the_fragments_are_an_error(self, folder: ObjectPath) -> None:
        with pytest.raises(StorageError, match="other bytes than were hashed"):
            self.upload(folder, hashed=b"something else")

    def test_an_object_that_disappears_is_an_error(self, fake: FakeS3, folder: ObjectPath) -> None:
        fake.on_request = Answers(failure(404, "NoSuchKey"), kind="head")
        with pytest.raises(StorageError, match="is not there after the server has confirmed it"):
            self.upload(folder)

    def test_bytes_that_change_on_their_way_are_an_error(self, fake: FakeS3, folder: ObjectPath) -> None:
        def change(method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
            return FakeS3.handle(fake, method, target, headers, body[:-1] + b"!")

        upload = folder.store.create_upload(folder / "big", {})
        with mock.patch.object(fake, "handle", change):
            with pytest.raises(StorageError, match=r"other bytes of .* than were sent"):
                folder.store.put_part(upload, 1, Body.of(b"x"))
            with pytest.raises(StorageError, match=r"other bytes of .* than were sent"):
                folder.store.replace_small(folder / "a", b"x")


class TestCreation:
    def test_a_store_that_is_busy_is_asked_again(self, fake: FakeS3, folder: ObjectPath) -> None:
        fake.on_request = Answers(failure(429, "SlowDown"), failure(503, "ServiceUnavailable"), kind="put")
        assert folder.store.create_object(folder / "1", b"mine")


def test_checksums_in_several_headers_are_all_found() -> None:
    with FakeS3(GOOGLE).served() as url:
        path = gcs_at(url).path(f"{BUCKET}/a")
        path.store.replace_small(path, b"hello world")
        found = gcs_at(url)._head(path)
    assert found is not None
    assert found.headers["x-goog-hash"] == "crc32c=yZRlqg==, md5=XrY7u+Ae7tCTyyK7j1rNww=="


class TestTokens:
    def test_a_function_is_asked_again_if_its_token_is_refused(self, fake: FakeS3, folder: ObjectPath) -> None:
        given = iter(["old", "token"])
        store = gcs_at("http://fake", credentials=lambda: next(given))
        assert store.read_small(store.path(f"{BUCKET}/run/a")) == b"content"

    def test_a_token_that_is_always_refused_is_an_error(self, fake: FakeS3) -> None:
        store = gcs_at("http://fake", credentials=lambda: "wrong")
        with pytest.raises(StorageError, match="AuthenticationRequired; the server does not accept") as error:
            store.read_small(store.path(f"{BUCKET}/a"))
        assert error.value.errno == errno.EACCES
        assert len(fake.requests) == 4

    def test_one_token_of_a_key_file_serves_all_threads(self, fake: FakeS3, folder: ObjectPath, tmp_path: Path) -> None:
        fake.tokens.add("token-1")
        with TokenServer().served() as tokens:
            path = gcs_at("http://fake", credentials=tokens.write_key(tmp_path)).path(f"{BUCKET}/run/a")
            results: list[bytes] = []
            threads = [threading.Thread(target=lambda: results.append(path.store.read_small(path))) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert results == [b"content"] * 8
        assert tokens.issued == 1

    def test_a_token_is_replaced_before_it_expires(self, fake: FakeS3, folder: ObjectPath, tmp_path: Path) -> None:
        fake.tokens |= {"token-1", "token-2"}
        with TokenServer(seconds=100).served() as tokens:
            path = gcs_at("http://fake", credentials=tokens.write_key(tmp_path)).path(f"{BUCKET}/run/a")
            for _ in range(2):
                assert path.store.read_small(path) == b"content"
        assert tokens.issued == 2
        assert len(fake.requests) == 2

    def test_a_refused_token_is_replaced(self, fake: FakeS3, folder: ObjectPath, tmp_path: Path) -> None:
        fake.tokens = {"token-2"}
        with TokenServer().served() as tokens:
            path = gcs_at("http://fake", credentials=tokens.write_key(tmp_path)).path(f"{BUCKET}/run/a")
            for _ in range(2):
                assert path.store.read_small(path) == b"content"
        assert (tokens.issued, len(fake.requests)) == (2, 3)

    def test_a_busy_server_of_tokens_is_asked_again(self, fake: FakeS3, folder: ObjectPath, tmp_path: Path) -> None:
        fake.tokens = {"token-1"}
        with TokenServer().served() as tokens, mock.patch("time.sleep"):
            tokens.statuses = [503] * 4
            path = gcs_at("http://fake", credentials=tokens.write_key(tmp_path)).path(f"{BUCKET}/run/a")
            assert path.store.read_small(path) == b"content"

    def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(self, tmp_path: Path) -> None:
        fake = FakeS3(GOOGLE)
        fake.tokens = {"token-1", "token-2"}
        with TokenServer().served() as tokens, fake.served() as url:
            tokens.first_may_answer.clear()
            path = gcs_at(url, credentials=tokens.write_key(tmp_path)).path(f"{BUCKET}/a")
            writer = threading.Thread(target=path.store.replace_small, args=(path, b"x"))
            writer.start()
            assert tokens.was_asked.wait(10)
            child = os.fork()  # the thread holds the lock of the token
            if not child:
                os._exit(0 if not path.store.is_file(path) else 1)
            assert os.waitstatus_to_exitcode(wait_for(child)) == 0
            tokens.first_may_answer.set()
            writer.join()
        assert fake.objects["a"].data == b"x"

    @pytest.mark.parametrize("content", [None, "no json", "{}"])
    def test_a_key_file_that_cannot_be_read_is_an_error(
        self, fake: FakeS3, tmp_path: Path, content: str | None
    ) -> None:
        if content is not None:
            (tmp_path / "key").write_text(content)
        store = gcs_at("http://fake", credentials=str(tmp_path / "key"))
        started = time.monotonic()
        with pytest.raises(StorageError, match="gcloud auth application-default login") as error:
            store.read_small(store.path(f"{BUCKET}/a"))
        assert error.value.errno == errno.EACCES
        assert time.monotonic() - started < 2

    def test_without_the_library_the_error_says_what_to_install(self, fake: FakeS3) -> None:
        store = gcs_at("http://fake", credentials=None)
        missing = dict.fromkeys(("google.auth", "google.auth.exceptions", "google.oauth2"))
        with (
            mock.patch.dict(sys.modules, missing),
            pytest.raises(StorageError, match=r"pip install 'google-auth\[requests\]'"),
        ):
            store.read_small(store.path(f"{BUCKET}/a"))


def wait_for(child: int) -> int:
    """Return the status of a process, which is killed if it does not end."""
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(child, 9)
    return os.waitpid(child, 0)[1]


READ = """
import sys
import google.oauth2.credentials
from rankless import GCS
google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT = sys.argv[2]
path = GCS(sys.argv[1]).path("bucket/a")
print(path.store.read_small(path).decode())
"""


def login(tokens: TokenServer, folder: Path) -> dict[str, str]:
    return {"CLOUDSDK_CONFIG": str(Path(tokens.write_login(folder)).parent)}


def key(tokens: TokenServer, folder: Path) -> dict[str, str]:
    return {"GOOGLE_APPLICATION_CREDENTIALS": tokens.write_key(folder)}


def host(tokens: TokenServer, folder: Path) -> dict[str, str]:
    address = tokens.url.removeprefix("http://")
    return {"GCE_METADATA_HOST": address, "GCE_METADATA_IP": address}


@pytest.mark.parametrize("credentials", [key, login, host])
def test_credentials_of_the_tools_of_google_are_found(
    tmp_path: Path, credentials: Callable[[TokenServer, Path], dict[str, str]]
) -> None:
    fake, payers = FakeS3(GOOGLE), set()
    fake.tokens |= {f"token-{number}" for number in range(1, 5)}

    def handle(method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        payers.add(headers.get("x-goog-user-project"))
        return FakeS3.handle(fake, method, target, headers, body)

    with TokenServer().served() as tokens, fake.served() as url:
        gcs_at(url).replace_small(gcs_at(url).path(f"{BUCKET}/a"), b"content")
        environment = os.environ | {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path / "none")}
        environment |= {"PATH": "/nowhere"} | credentials(tokens, tmp_path)
        with mock.patch.object(fake, "handle", handle):
            done = subprocess.run(
                [sys.executable, "-c", READ, url, f"{tokens.url}/login"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
    assert done.stdout == "content\n", done.stderr
    assert payers == ({"payer"} if credentials is login else {None})


class TestPaths:
    def test_the_environment_says_which_store_a_url_means(self) -> None:
        with mock.patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": "localhost:9023"}):
            path = parse_location("gs://bucket/run")
        assert str(path) == "gs://bucket/run"
        assert isinstance(path, ObjectPath)
        assert path.store.endpoint == "http://localhost:9023"  # type: ignore[attr-defined]
        with mock.patch.dict(os.environ, clear=True):
            assert GCS.from_environment() == GCS("https://storage.googleapis.com")

    def test_an_emulator_gets_no_token(self, fake: FakeS3) -> None:
        fake.tokens.clear()
        with mock.patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": "http://fake"}):
            store = GCS.from_environment()
        with pytest.raises(StorageError, match="AuthenticationRequired"):
            store.read_small(store.path(f"{BUCKET}/a"))

    def test_the_public_name(self) -> None:
        assert rankless.GCS is GCS


class TestChecksums:
    def test_those_of_parts_are_combined(self) -> None:
        data = os.urandom(10_000)
        for cuts in ((0, 10_000), (0, 1, 10_000), (0, 3_000, 3_000, 9_999, 10_000)):
            parts = [data[start:stop] for start, stop in itertools.pairwise(cuts)]
            records = [PartChecksums.of(Body.of(part)).record for part in parts]
            assert PartChecksums.combine(records) == (len(data), crc32c(data), crc64nvme(data))

    @pytest.mark.parametrize(
        ("header", "found"),
        [
            ("crc32c=yZRlqg==", "crc32c=yZRlqg=="),
            ("md5=XrY7u+Ae7tCTyyK7j1rNww==, crc32c=yZRlqg==", "crc32c=yZRlqg=="),
            ("crc32c=yZRlqg==,md5=XrY7u+Ae7tCTyyK7j1rNww==", "crc32c=yZRlqg=="),
            ("md5=XrY7u+Ae7tCTyyK7j1rNww==", ""),
            ("", ""),
        ],
    )
    def test_that_of_an_object_is_found_among_others(self, header: str, found: str) -> None:
        assert find_crc32c(header) == found
        assert encode_crc32c(crc32c(b"hello world")) == "crc32c=yZRlqg=="
