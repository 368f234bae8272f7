"""How the client of S3 meets failures, of the server and of the connection."""

from __future__ import annotations

import base64
import errno
import os
import pickle
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from pathlib import Path
from unittest import mock

import pytest
import torch
from awscrt.checksums import crc64nvme

import rankless
from rankless import S3
from rankless.engine.io.upload_target import PART_BYTES, check_file_size
from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, InvalidArgumentError, StorageError
from rankless.storage.body import Body
from rankless.storage.http import retries
from rankless.storage.http.connection import ConnectionPool, HttpRequest, HttpResponse, parse_address
from rankless.storage.location import parse_location
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_http import BUCKET, Answers, disconnect
from tests.helpers.fake_s3 import AWS, PROFILES, FakeS3, Profile, failure, store_at, store_for


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    store = FakeS3()
    with store.connected(), mock.patch.object(retries, "_FIRST_WAIT", 1e-3):
        yield store


@pytest.fixture
def folder(fake: FakeS3) -> ObjectPath:
    path = store_at("http://fake").path(f"{BUCKET}/run")
    path.store.replace_small(path / "a", b"content")
    fake.requests.clear()
    return path


def test_repetition_ends(fake: FakeS3, folder: ObjectPath) -> None:
    store = store_at("http://fake", retry_seconds=0.2)
    fake.on_request = lambda request, stage: failure(503, "SlowDown")  # noqa: ARG005
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"could not read s3://bucket/run/a: SlowDown"):
        store.read_small(store.path(f"{BUCKET}/run/a"))
    assert time.monotonic() - started < 5


def test_a_missing_permission_is_named(fake: FakeS3, folder: ObjectPath) -> None:
    fake.on_request = lambda request, stage: failure(403, "AccessDenied")  # noqa: ARG005
    for call, permission in (
        (lambda: folder.store.read_small(folder / "a"), "s3:GetObject"),
        (lambda: folder.store.replace_small(folder / "a", b""), "s3:PutObject"),
        (lambda: folder.store.list_names(folder), "s3:ListBucket"),
        (lambda: folder.store.remove_file(folder / "a"), "s3:DeleteObject"),
        (lambda: folder.store.list_uploads(folder), "s3:ListBucketMultipartUploads"),
    ):
        with pytest.raises(StorageError, match=permission) as error:
            call()
        assert error.value.errno == errno.EACCES


def test_a_bucket_of_another_region_is_found(fake: FakeS3, folder: ObjectPath) -> None:
    store = S3(credentials=("key", "secret"))
    seen = []

    def send(pool: object, address: object, request: object) -> HttpResponse:
        seen.append(address.host)  # type: ignore[attr-defined]
        if "eu-north-1" not in seen[-1]:
            return failure(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-north-1"})
        return fake.handle("GET", f"/{BUCKET}/run/a", {}, b"")

    with mock.patch("rankless.storage.http.connection.ConnectionPool.send", send):
        for _ in range(2):
            assert store.read_small(store.path(f"{BUCKET}/run/a")) == b"content"
    assert seen == ["bucket.s3.us-east-1.amazonaws.com", *2 * ["bucket.s3.eu-north-1.amazonaws.com"]]


def test_a_wrong_clock_of_this_host_is_corrected(fake: FakeS3, folder: ObjectPath) -> None:
    skewed = failure(403, "RequestTimeTooSkewed", date=formatdate(time.time() + 3600, usegmt=True))
    fake.on_request = Answers(skewed)
    assert folder.store.read_small(folder / "a") == b"content"
    assert len(fake.requests) == 2


@pytest.mark.parametrize(
    ("status", "code"), [(400, "ExpiredToken"), (400, "TokenRefreshRequired"), (403, "InvalidAccessKeyId")]
)
def test_credentials_that_are_not_accepted_any_more_are_asked_for_again(fake: FakeS3, status: int, code: str) -> None:
    asked = []

    def credentials() -> tuple[str, str, str]:
        asked.append(1)
        return ("key", "secret", "token")

    store = S3("http://fake", credentials=credentials)  # type: ignore[arg-type]
    fake.on_request = Answers(failure(status, code), kind="put")
    store.replace_small(store.path(f"{BUCKET}/a"), b"x")
    assert len(asked) >= 2


def test_without_credentials_the_error_says_what_to_do(fake: FakeS3) -> None:
    store = S3("http://fake", credentials=lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(StorageError, match=r"AWS_ACCESS_KEY_ID.*credentials must be the access key"):
        store.read_small(store.path(f"{BUCKET}/a"))


class TestUploads:
    def upload(self, folder: ObjectPath) -> bytes:
        data = b"x" * (6 * 2**20)
        store = folder.store
        upload = store.create_upload(folder / "big", {})
        etags = [
            store.put_part(upload, number, Body.of(part))
            for number, part in ((1, data[: 5 * 2**20]), (2, data[5 * 2**20 :]))
        ]
        store.complete_upload(upload, etags, len(data), crc64nvme(data))
        return data

    @pytest.mark.parametrize("profile", [AWS, Profile(forgets_uploads=False)])
    @pytest.mark.parametrize("stage", ["before", "after"])
    def test_a_lost_reply_of_the_completion_is_decided_by_the_object(
        self, fake: FakeS3, folder: ObjectPath, stage: str, profile: Profile
    ) -> None:
        fake.profile = profile
        fake.on_request = Answers(disconnect, kind="complete", stage=stage)
        data = self.upload(folder)
        assert folder.store.read_small(folder / "big") == data

    def test_an_error_inside_a_success_is_repeated(self, fake: FakeS3, folder: ObjectPath) -> None:
        error = HttpResponse(200, {}, b"  <?xml version='1.0'?><Error><Code>InternalError</Code></Error>")
        fake.on_request = Answers(error, kind="complete")
        data = self.upload(folder)
        assert folder.store.read_small(folder / "big") == data

    def test_another_checksum_of_the_store_is_an_error(self, fake: FakeS3, folder: ObjectPath) -> None:
        root, crc = "CompleteMultipartUploadResult", "<ChecksumCRC64NVME>AAAAAAAAAAA=</ChecksumCRC64NVME>"
        wrong = f"<{root}>{crc}</{root}>".encode()
        fake.on_request = Answers(HttpResponse(200, {}, wrong), kind="complete", stage="after")
        with pytest.raises(StorageError, match="other bytes than were sent"):
            self.upload(folder)

    def test_a_part_that_changed_on_its_way_is_an_error(self, fake: FakeS3, folder: ObjectPath) -> None:
        upload = folder.store.create_upload(folder / "big", {})
        with pytest.raises(StorageError, match=r"other bytes of .* than were sent"):
            folder.store.put_part(upload, 1, Body((memoryview(b"x"),), crc64nvme(b"y")))


class TestCreation:
    def test_a_conflict_is_tried_again(self, fake: FakeS3, folder: ObjectPath) -> None:
        fake.on_request = Answers(failure(409, "ConditionalRequestConflict"), kind="put")
        assert folder.store.create_object(folder / "1", b"mine")


class TestReads:
    def test_a_body_that_ends_too_early_is_read_again(self) -> None:
        fake = FakeS3()
        with fake.served() as url:
            store = store_at(url)
            path = store.path(f"{BUCKET}/a")
            store.replace_small(path, bytes(1000))
            fake.on_request = Answers(HttpResponse(206, {"content-range": "bytes 0-9/1000"}, b"short"))
            with pytest.raises(CorruptCheckpointError, match="truncated"):
                store.open_reader(path).read(0, memoryview(bytearray(10)))

    def test_a_checkpoint_that_is_removed_while_it_is_read_is_replaced(self, fake: FakeS3) -> None:
        run = store_at("http://fake").path(f"{BUCKET}/run")
        rankless.save_checkpoint(run, "a", {})
        checkpoint = rankless.open(run)
        fake.objects.clear()
        with pytest.raises(CheckpointReplacedError):
            list(checkpoint.values)


class TestPaths:
    def test_other_schemes_are_refused(self) -> None:
        for text in ("gcs://bucket/a", "hdfs://a/b"):
            with pytest.raises(InvalidArgumentError, match="in no store that rankless knows"):
                parse_location(text)

    def test_a_path_is_a_path_of_names_only(self) -> None:
        path = S3().path("bucket/run") / "a" / "b.json"
        assert (str(path), path.name, path.suffix, path.bucket, path.key) == (
            "s3://bucket/run/a/b.json",
            "b.json",
            ".json",
            "bucket",
            "run/a/b.json",
        )
        assert str(path.parent) == "s3://bucket/run/a"
        assert str(path.relative_to(path.parent.parent)) == "a/b.json"
        assert path == S3().path("s3://bucket/run/a/b.json") != Path("/bucket/run/a/b.json")
        assert S3("http://a").path("b/c") != S3("http://b").path("b/c")
        assert pickle.loads(pickle.dumps(path)) == path  # noqa: S301 - what this test has written
        for call in (lambda: os.stat(path), path.read_bytes, lambda: open(path), path.mkdir):  # noqa: PTH116, PTH123, SIM115
            with pytest.raises(InvalidArgumentError, match="object store"):
                call()

    @pytest.mark.parametrize("endpoint", ["localhost", "ftp://a", "http://", "http://a/b/c"])
    def test_wrong_endpoints_are_refused(self, endpoint: str) -> None:
        with pytest.raises(InvalidArgumentError, match="endpoint"):
            S3(endpoint)

    def test_addresses(self) -> None:
        assert parse_address("https://a.b:9000/").host_header == "a.b:9000"
        assert parse_address("http://a").port is None

    def test_the_environment_says_which_store_a_url_means(self) -> None:
        with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": "http://one", "AWS_REGION": "eu"}):
            store = S3.from_environment()
        assert (store.endpoint, store.region) == ("http://one", "eu")
        assert "secret" not in repr(S3(credentials=("key", "secret")))


def test_forked_processes_and_threads_have_connections_of_their_own() -> None:
    fake = FakeS3()
    with fake.served() as url:
        store = store_at(url)
        path = store.path(f"{BUCKET}/a")
        store.replace_small(path, b"x" * 1000)
        child = os.fork()
        if not child:
            os._exit(0 if store.read_small(path) == b"x" * 1000 else 1)
        results: list[bytes] = []
        threads = [threading.Thread(target=lambda: results.append(store.read_small(path))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert results == [b"x" * 1000] * 4


def test_a_proxy_for_http_gets_the_whole_url_and_the_name_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, seen = FakeS3(), []

    def forward(method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        seen.append((target, headers.get("Proxy-Authorization")))
        return FakeS3.handle(fake, method, target, headers, body)

    store = store_at("http://bucket.example:81")
    with mock.patch.object(fake, "handle", forward), fake.served() as proxy:
        monkeypatch.setenv("http_proxy", proxy.replace("http://", "http://ann:s%40fe@"))
        store.replace_small(store.path(f"{BUCKET}/a"), b"content")
        assert store.read_small(store.path(f"{BUCKET}/a")) == b"content"
    login = f"Basic {base64.b64encode(b'ann:s@fe').decode()}"
    assert set(seen) == {("http://bucket.example:81/bucket/a", login)}


def test_a_small_file_that_is_too_large_is_not_fetched(fake: FakeS3, folder: ObjectPath) -> None:
    folder.store.replace_small(folder / "large", bytes(1000))
    with pytest.raises(StorageError, match="has more than 10 bytes"):
        folder.store.read_small(folder / "large", 10)


def test_a_file_with_too_many_parts_is_refused(tmp_path: Path) -> None:
    check_file_size("a", 10_000 * PART_BYTES)
    with pytest.raises(InvalidArgumentError, match="pass a smaller max_shard_size"):
        check_file_size("a", 10_000 * PART_BYTES + 1)


@pytest.mark.parametrize("profile", [AWS, Profile(honours_conditions=False)])
def test_a_store_that_ignores_conditions_is_reported_once(profile: Profile) -> None:
    fake = FakeS3(profile)
    with fake.connected():
        run = rankless.RunDirectory(store_at("http://fake").path(f"{BUCKET}/run"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.save("a", {"w": torch.zeros(2)})
            run.save("b", {"w": torch.zeros(2)})
    messages = [str(warning.message) for warning in caught]
    assert ["ignores the condition" in message for message in messages] == ([] if profile is AWS else [True])


def test_components_are_loaded_from_an_object_store(fake: FakeS3, tmp_path: Path) -> None:
    store = store_at("http://fake")
    model, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    rankless.save_model(model, tmp_path / "hf", shard=True)
    rankless.save_model(model, tmp_path / "one.safetensors")
    for file in (*(tmp_path / "hf").iterdir(), tmp_path / "one.safetensors"):
        path = store.path(f"{BUCKET}/{file.relative_to(tmp_path)}")
        store.replace_small(path, file.read_bytes())
    for name in ("hf", "one.safetensors"):
        torch.nn.init.zeros_(fresh.weight)
        rankless.load_model(fresh, store.path(f"{BUCKET}/{name}"))
        assert torch.equal(fresh.weight, model.weight)
    run = store.path(f"{BUCKET}/run")
    rankless.save_checkpoint(run, "a", model)
    torch.nn.init.zeros_(fresh.weight)
    rankless.load_model(fresh, run)
    assert torch.equal(fresh.weight, model.weight)


class ChangedOnTheWay:
    """Changes a byte of the first bodies that are sent with PUT."""

    def __init__(self, fake: FakeS3, times: int) -> None:
        self.handle, self.times = fake.handle, times

    def __call__(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        if method == "PUT" and self.times:
            self.times -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        return self.handle(method, target, headers, body)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_body_that_is_changed_on_its_way_is_sent_again(profile: Profile, in_parts: bool) -> None:
    """Also to servers that check no CRC: their ETag tells what they have received."""
    fake = FakeS3(profile)
    path, data = store_for(profile)("http://fake").path(f"{BUCKET}/a"), memoryview(bytes(range(256)))
    with fake.connected(), mock.patch.object(fake, "handle", ChangedOnTheWay(fake, 2)):
        if in_parts:
            upload = path.store.create_upload(path, {})
            receipt = path.store.put_part(upload, 1, Body.of(data))
            path.store.complete_upload(upload, [receipt], len(data), crc64nvme(data))
        else:
            path.store.put_object(path, Body.of(data))
    assert fake.objects["a"].data == data


def test_a_body_that_is_changed_each_time_is_refused(fake: FakeS3, folder: ObjectPath) -> None:
    with (
        mock.patch.object(fake, "handle", ChangedOnTheWay(fake, 3)),
        pytest.raises(StorageError, match="other bytes of s3://bucket/run/b than were sent, 3 times"),
    ):
        folder.store.replace_small(folder / "b", b"content")


def test_etags_that_are_no_md5_are_not_compared_for_long() -> None:
    """Some servers answer with another text that looks like one."""
    fake, sent = FakeS3(PROFILES["rgw-16"]), 0

    def answer(method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        nonlocal sent
        sent += 1
        response = FakeS3.handle(fake, method, target, headers, body)
        return HttpResponse(response.status, {**response.headers, "etag": f'"{sent:032x}"'}, response.body)

    store = store_at("http://fake", retry_seconds=3.0)
    with fake.connected(), mock.patch.object(fake, "handle", answer):
        for name in "abc":
            store.replace_small(store.path(f"{BUCKET}/{name}"), b"content")
    assert sent == 3 + 1 + 1


class TestForeignAnswers:
    """Answers of something else than the store, and those that are cut."""

    def test_an_answer_without_an_upload_id_is_asked_for_again(self, fake: FakeS3, folder: ObjectPath) -> None:
        fake.on_request = Answers(HttpResponse(200, {}), kind="create upload", stage="after")
        assert folder.store.create_upload(folder / "a", {}).id in fake.uploads
        assert [request.kind for request in fake.requests] == ["create upload"] * 2

    def test_a_page_of_a_proxy_is_no_list(self, fake: FakeS3, folder: ObjectPath) -> None:
        page = HttpResponse(200, {}, b"<html><body>Log in</body></html>")
        fake.on_request = Answers(page, HttpResponse(200, {}), kind="list")
        assert folder.store.list_names(folder) == {"a"}

    @pytest.mark.parametrize(
        "answer",
        [HttpResponse(200, {}), HttpResponse(204, {}), HttpResponse(206, {}), HttpResponse(200, {}, b"<html/>")],
    )
    def test_what_is_no_range_is_no_success(self, fake: FakeS3, folder: ObjectPath, answer: HttpResponse) -> None:
        folder.store.replace_small(folder / "b", bytes(100))
        fake.on_request = Answers(answer, answer)
        with folder.store.open_reader(folder / "b") as reader, pytest.raises((StorageError, CorruptCheckpointError)):
            reader.read(1, memoryview(bytearray(50)))

    def test_a_list_that_does_not_go_on_is_an_error(self, fake: FakeS3, folder: ObjectPath) -> None:
        same = HttpResponse(
            200, {}, b"<ListBucketResult><NextContinuationToken>x</NextContinuationToken></ListBucketResult>"
        )
        fake.on_request = lambda request, stage: same  # noqa: ARG005
        with pytest.raises(StorageError, match="could not list"):
            folder.store.list_names(folder)

    def test_headers_that_are_cut_are_no_answer(self) -> None:
        whole = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 4\r\n\r\ndata'
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                for answer in (whole[:20], whole[:45], whole):
                    with listener.accept()[0] as connection:
                        connection.recv(10_000)
                        connection.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            store = store_at(f"http://127.0.0.1:{listener.getsockname()[1]}")
            assert store.read_small(store.path(f"{BUCKET}/a")) == b"data"
            thread.join()


def test_keys_that_no_path_stands_for_are_left_out_of_lists(fake: FakeS3, folder: ObjectPath) -> None:
    for name in ("run//a", "run/./a", "run/sub/"):
        fake.objects[name] = fake.objects["run/a"]
    assert [str(info.path) for info in folder.store.list_objects(folder)] == ["s3://bucket/run/a"]


def test_a_url_that_became_a_path_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="pass it as a text"):
        rankless.save_checkpoint(Path("s3://bucket/run"), "a", {"w": torch.zeros(1)})


def test_a_password_in_an_endpoint_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        S3("http://user:secret@host")


def test_an_address_of_ipv6_is_connected_without_its_brackets() -> None:
    connection = ConnectionPool(None, 1.0)._open(parse_address("http://[::1]:9000"))
    assert (connection.http.host, connection.http.port) == ("::1", 9000)


@pytest.mark.parametrize(
    "wrong",
    [("key", "secret", "SESSION\n"), ("SESSION",), ["k", "s", "t", "SESSION"], b"SESSION", ("", "SESSION"), (None, "")],
)
def test_wrong_credentials_are_refused_without_naming_them(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError, match="credentials must be") as error:
        S3("http://fake", credentials=wrong)  # type: ignore[arg-type]
    assert "SESSION" not in str(error.value)
    store = S3("http://fake", credentials=lambda: wrong)  # type: ignore[arg-type, return-value]
    with pytest.raises(StorageError, match="credentials must be") as refusal:
        store.read_small(store.path(f"{BUCKET}/run/a"))
    assert "SESSION" not in str(refusal.value)


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_credentials_that_are_unknown_need_no_permission(fake: FakeS3, code: str) -> None:
    fake.on_request = Answers(*[failure(403, code)] * 9)
    store = S3("http://fake", credentials=("key", "secret"))
    with pytest.raises(StorageError, match=f"{code}; the server does not accept the credentials: pass others"):
        store.read_small(store.path(f"{BUCKET}/run/a"))


def test_a_connection_that_is_reset_while_it_is_made_is_an_error_of_the_system() -> None:
    pool = ConnectionPool(None, 1.0)
    with (
        mock.patch("socket.create_connection", side_effect=ConnectionResetError(errno.ECONNRESET, "reset")),
        pytest.raises(ConnectionResetError, match="reset"),
    ):
        pool.send(parse_address("http://127.0.0.1:9"), HttpRequest("GET", "/", {}, ()))
