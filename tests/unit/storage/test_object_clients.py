"""What the clients of S3, Google Cloud Storage and Azure have in common when requests fail, and of their paths."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from rankless import GCS, S3, Azure
from rankless.errors import CheckpointReplacedError, InvalidArgumentError, StorageError
from rankless.storage.http import retries
from rankless.storage.http.connection import HttpResponse
from rankless.storage.location import parse_location
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import BUCKET, Answers, FakeStore, disconnect
from tests.helpers.fake_s3 import GOOGLE, FakeS3, failure

STORES: dict[str, Callable[[], FakeStore]] = {"s3": FakeS3, "gs": lambda: FakeS3(GOOGLE), "az": FakeAzure}

#: Answers after which a request may succeed later.
TEMPORARY: dict[str, list[Any]] = {
    "s3": [
        failure(503, "SlowDown"),
        failure(500, "InternalError"),
        failure(429, ""),
        failure(400, "RequestTimeout"),
        disconnect,
    ],
    "gs": [
        failure(503, "ServiceUnavailable"),
        failure(500, "InternalError"),
        failure(429, "SlowDown"),
        failure(408, "RequestTimeout"),
        disconnect,
    ],
    "az": [
        FakeAzure().failure(503, "ServerBusy"),
        FakeAzure().failure(500, "OperationTimedOut"),
        FakeAzure().failure(409, "InternalError"),
        disconnect,
    ],
}


@pytest.fixture(params=STORES)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeStore]:
    fake = STORES[request.param]()
    with fake.connected(), mock.patch.object(retries, "_FIRST_WAIT", 1e-3):
        yield fake


@pytest.fixture
def folder(fake: FakeStore) -> ObjectPath:
    path = fake.store_at("http://fake").path(f"{BUCKET}/run")
    path.store.replace_small(path / "a", b"content")
    fake.requests.clear()
    return path


def test_a_request_that_may_succeed_later_is_repeated(fake: FakeStore, folder: ObjectPath) -> None:
    for answer in TEMPORARY[folder.store.scheme]:
        fake.requests.clear()
        fake.on_request = Answers(answer, answer, answer)
        assert folder.store.read_small(folder / "a") == b"content"
        assert len(fake.requests) == 4


class TestConditionalWrites:
    """A lost reply is decided by the content, and another writer's is no success."""

    @pytest.mark.parametrize("stage", ["before", "after"])
    def test_a_lost_reply_of_a_creation(self, fake: FakeStore, folder: ObjectPath, stage: str) -> None:
        fake.on_request = Answers(disconnect, kind="put", stage=stage)
        assert folder.store.create_object(folder / "1", b"mine")

    def test_a_creation_by_another_writer(self, fake: FakeStore, folder: ObjectPath) -> None:
        def other_writer() -> None:
            folder.store.replace_small(folder / "1", b"other")
            disconnect()

        fake.on_request = Answers(other_writer, kind="put")
        assert not folder.store.create_object(folder / "1", b"mine")

    @pytest.mark.parametrize("stage", ["before", "after"])
    def test_a_lost_reply_of_a_replacement(self, fake: FakeStore, folder: ObjectPath, stage: str) -> None:
        version = folder.store.find_version(folder / "a")
        fake.on_request = Answers(disconnect, kind="put", stage=stage)
        assert folder.store.replace_version(folder / "a", str(version), b"mine")
        assert folder.store.read_small(folder / "a") == b"mine"

    def test_a_replacement_by_another_writer(self, fake: FakeStore, folder: ObjectPath) -> None:
        def other_writer() -> None:
            folder.store.replace_small(folder / "a", b"other")
            disconnect()

        version = folder.store.find_version(folder / "a")
        fake.on_request = Answers(other_writer, kind="put")
        assert not folder.store.replace_version(folder / "a", str(version), b"mine")
        assert folder.store.read_small(folder / "a") == b"other"

    def test_a_removal_by_another_process(self, fake: FakeStore, folder: ObjectPath) -> None:
        def remover() -> None:
            folder.store.remove_file(folder / "a")

        version = folder.store.find_version(folder / "a")
        fake.on_request = Answers(remover, kind="put")
        assert not folder.store.replace_version(folder / "a", str(version), b"mine")
        assert not folder.store.is_file(folder / "a")


def test_a_lost_reply_of_a_removal_is_no_error(fake: FakeStore, folder: ObjectPath) -> None:
    fake.on_request = Answers(disconnect, kind="delete", stage="after")
    folder.store.remove_file(folder / "a")
    assert not fake.objects


def test_a_version_that_was_replaced_between_two_reads_is_an_error(folder: ObjectPath) -> None:
    into = bytearray(3)
    with folder.store.open_reader(folder / "a") as reader:
        reader.read(0, memoryview(into))
        folder.store.replace_small(folder / "a", b"another")
        with pytest.raises(CheckpointReplacedError, match="was replaced while it was being read"):
            reader.read(3, memoryview(into))


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("rest", ["", "/key", "bucket//key", "bucket/../key", "bucket/."])
def test_wrong_urls_are_refused(scheme: str, rest: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{scheme}://bucket/name"):
        parse_location(f"{scheme}://{rest}")


@pytest.mark.parametrize("make", [S3, GCS, lambda endpoint: Azure("account", endpoint)])
@pytest.mark.parametrize("endpoint", ["localhost", "http://"])
def test_wrong_endpoints_are_refused(make: Callable[[str], object], endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match="endpoint"):
        make(endpoint)


def test_a_path_can_be_sent_to_another_process(fake: FakeStore) -> None:
    path = fake.store_at("http://a").path("b/c")
    assert pickle.loads(pickle.dumps(path)) == path  # noqa: S301 - what this test has written
    assert path != fake.store_at("http://b").path("b/c")


def test_the_error_of_a_function_for_credentials_is_not_repeated(fake: FakeStore) -> None:
    """It may contain a secret, which would be in the logs."""

    def fail() -> str:
        raise RuntimeError("the key s3cr3t has expired")

    store = fake.store_at("http://fake", credentials=fail)
    with pytest.raises(StorageError, match="has raised a RuntimeError") as caught:
        store.read_small(store.path(f"{BUCKET}/a"))
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None


def test_a_redirect_that_is_not_followed_says_where_it_leads(fake: FakeStore, folder: ObjectPath) -> None:
    answer = HttpResponse(307, {"location": "https://login.example:8443/b/a?sig=s3cr3t", "x-ms-request-id": "1"})
    fake.on_request = lambda request, stage: answer if stage == "before" else None  # noqa: ARG005
    with pytest.raises(StorageError, match=r"redirects to https://login\.example:8443, .*pass the endpoint") as caught:
        folder.store.read_small(folder / "a")
    assert "s3cr3t" not in str(caught.value)
