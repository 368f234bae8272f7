"""Answers of object stores that are wrong, or those of a proxy: nothing committed is lost, and no error is raw."""

from __future__ import annotations

import json
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.cli.prune import prune
from rankless.engine.io import upload_parts
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, RanklessError, StorageError
from rankless.formats import native
from rankless.load import selection
from rankless.run import cleanup, object_removal, pointers
from rankless.save import object_publication
from rankless.storage.http import connection
from rankless.storage.http.connection import Address, HttpRequest, HttpResponse
from tests.helpers.fake_azure import REQUEST_ID, FakeAzure
from tests.helpers.fake_http import BUCKET, Answers, FakeStore
from tests.helpers.fake_s3 import AWS, FakeS3, failure
from tests.helpers.fake_stores import FAKES, age
from tests.helpers.object_histories import (
    OLD,
    brief_retries,
    check_all,
    check_nothing_is_left,
    do_nothing,
    run_path,
    save,
    state,
    store_with_two_checkpoints,
)
from tests.helpers.pairwise import first_of

PAGE = HttpResponse(200, {"content-length": "4"}, b"page")


@pytest.fixture(params=FAKES)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeStore]:
    with (
        store_with_two_checkpoints(FAKES[request.param]()) as fake,
        mock.patch.object(pointers, "_ATTEMPT_SECONDS", 0.001),
        mock.patch.object(native, "_ABSENCE_SECONDS", 0.001),
    ):
        yield fake


def answer_to(kind: str, part: str, answer: HttpResponse) -> Callable[[Any, str], HttpResponse | None]:
    return lambda request, stage: answer if (request.kind, stage) == (kind, "before") and part in request.key else None


def stop_answers(fake: FakeStore) -> None:
    fake.on_request = lambda request, stage: None  # noqa: ARG005
    pointers._pointers.clear()


class TestUnreadablePointers:
    """A pointer that cannot be read may name any checkpoint of its tag."""

    @first_of(
        5,
        ("member", "value"),
        [
            ("id", "0123456789abcdef\n"),
            ("sequence", 2**80),
            ("time", 1e308),
            ("nbytes", -5),
            ("saved_as", "../other"),
            ("checkpoint", "0123456789abcdef\n"),
            ("run", "a"),
            ("sequence", -1),
            ("time", -1),
            ("world_size", -1),
            ("step", 2**80),
        ],
    )
    def test_a_pointer_with_a_value_out_of_range_is_corrupt(self, fake: FakeStore, member: str, value: object) -> None:
        (key,) = (key for key in fake.objects if ".tags/s2/" in key)
        stored = fake.objects[key]
        changed = {**json.loads(stored.data), "sequence": 9, member: value}
        fake.objects[key] = replace(stored, data=json.dumps(changed).encode(), etag='"changed"')
        pointers._pointers.clear()
        with pytest.warns(UserWarning, match="s2 is corrupt"):
            assert rankless.restore(run_path(), model={"net": state(0)}).tag == "s1"
        with pytest.raises(CorruptCheckpointError, match=r"\.tags/s2/1"):
            rankless.restore(run_path(), "s2", model={"net": state(0)})
        save(3)
        assert [(info.tag, info.sequence) for info in rankless.list_checkpoints(run_path())][1:] == [
            ("s1", 1),
            ("s3", 3),  # the history knows that s2 has begun
        ]

    @pytest.mark.parametrize("content", [b"", b"page", b'{"id": "0123456789abcdef", "version": 2}'])
    def test_a_clean_up_keeps_the_checkpoints_of_a_corrupt_pointer(self, fake: FakeStore, content: bytes) -> None:
        age(fake)
        (key,) = (key for key in fake.objects if ".tags/s1/" in key)
        pointer, objects = fake.objects[key], dict(fake.objects)
        fake.objects[key] = replace(pointer, data=content)
        cleanup.clean_up(run_path())
        fake.objects[key] = pointer
        assert fake.objects.keys() == objects.keys()
        pointers._pointers.clear()
        assert check_all() == {"s1": 1, "s2": 2}

    @first_of(1, "answer", [PAGE, HttpResponse(404, {}, b"<html>none</html>"), failure(403, "AccessDenied")])
    def test_a_clean_up_keeps_the_checkpoints_if_the_answer_is_wrong(
        self, fake: FakeStore, answer: HttpResponse
    ) -> None:
        age(fake)
        objects = dict(fake.objects)
        fake.on_request = answer_to("get", ".tags/s1/", answer)
        try:
            with brief_retries():
                cleanup.clean_up(run_path())
        except RanklessError as error:
            assert "s1" in str(error)
        stop_answers(fake)
        assert fake.objects.keys() == objects.keys()
        assert check_all() == {"s1": 1, "s2": 2}

    def test_a_pointer_that_becomes_unreadable_during_a_clean_up_keeps_the_folder(self, fake: FakeStore) -> None:
        """The folder was listed as abandoned, because its pointer was created after the list of the tags."""
        (folder,) = {run_path() / key.split("/")[1] for key in fake.objects if key.split("/")[1].startswith("s1.")}
        (key,) = (key for key in fake.objects if ".tags/s1/" in key)
        pointer, objects = fake.objects[key], dict(fake.objects)
        fake.objects[key] = replace(pointer, data=b"")
        pointers._pointers.clear()
        with pytest.raises(CorruptCheckpointError):
            object_removal.discard_abandoned(folder)
        fake.objects[key] = pointer
        assert fake.objects.keys() == objects.keys()

    def test_a_save_keeps_its_files_if_the_pointer_is_read_back_as_a_page(self, fake: FakeStore) -> None:
        fake.on_request = answer_to("get", ".tags/s3/", PAGE)
        with brief_retries(), pytest.raises(RanklessError):
            save(3)
        stop_answers(fake)
        assert check_all() == {"s1": 1, "s2": 2, "s3": 3}
        check_nothing_is_left(fake)

    @pytest.mark.parametrize("options", [{}, {"tag": "s2", "value": 3, "overwrite": True}])
    def test_a_save_keeps_its_files_if_lists_lack_its_pointer_and_answers_are_wrong(
        self, fake: FakeStore, options: dict[str, Any]
    ) -> None:
        """The second attempt learns that the pointer exists. It is its own one, of the first attempt."""
        age(fake)
        fake.list_lag = 0.05
        fake.on_request = answer_to("get", f".tags/{options.get('tag', 's3')}/{2 if options else 1}", PAGE)
        with (
            brief_retries(),
            mock.patch.object(object_publication, "_PUBLISH_SECONDS", 0.01),
            pytest.raises(RanklessError),
        ):
            save(3, **options)
        fake.list_lag = 0.0
        stop_answers(fake)
        assert check_all() == {**OLD, options.get("tag", "s3"): 3}
        check_nothing_is_left(fake)

    @pytest.mark.parametrize("status", [200, 204, 404])
    def test_the_files_of_a_checkpoint_stay_as_long_as_its_pointer(self, fake: FakeStore, status: int) -> None:
        fake.on_request = answer_to("delete", ".tags/", HttpResponse(status, {"content-length": "0"}))
        with brief_retries(), pytest.warns(UserWarning, match="could not be removed"):
            save(3, keep=1)
        stop_answers(fake)
        assert check_all() == {"s1": 1, "s2": 2, "s3": 3}


class TestPointersThatCannotBeReadForAMoment:
    """The newest checkpoint is unknown then: no load goes back, no save takes its number, no retention removes it."""

    ANSWERS = (
        failure(403, "AccessDenied"),
        failure(404, "NoSuchKey", **REQUEST_ID),
        replace(PAGE, headers={**PAGE.headers, **REQUEST_ID, "etag": '"page"'}),
    )

    @pytest.fixture(params=ANSWERS, ids=["refused", "not found", "a page"])
    def answer(self, request: pytest.FixtureRequest, fake: FakeStore) -> Iterator[None]:
        pointers._pointers.clear()
        fake.on_request = answer_to("get", ".tags/s2/", request.param)
        with brief_retries():
            yield

    @pytest.mark.usefixtures("answer")
    def test_a_load_raises(self) -> None:
        for tag in (None, "s2"):
            with pytest.raises(StorageError, match=r"\.tags/s2/1"):
                rankless.restore(run_path(), tag, model={"net": state(0)})
        with pytest.raises(StorageError, match=r"\.tags/s2/1"):
            rankless.open(run_path(), "s2")
        with pytest.raises(StorageError, match=r"\.tags/s2/1"):
            rankless.has_checkpoint(run_path())

    @pytest.mark.usefixtures("answer")
    def test_the_list_names_the_tag(self) -> None:
        statuses = {info.tag: info.status for info in rankless.list_checkpoints(run_path())}
        assert statuses == {"s1": "complete", "s2": "unreadable"}

    @pytest.mark.usefixtures("answer")
    def test_a_save_raises_and_the_next_one_continues_the_numbers(self, fake: FakeStore) -> None:
        with pytest.raises(StorageError, match=r"\.tags/s2/1"):
            save(3, keep=1)
        stop_answers(fake)
        assert check_all() == OLD
        save(3)
        assert [info.sequence for info in rankless.list_checkpoints(run_path())] == [1, 2, 3]

    @pytest.mark.usefixtures("answer")
    def test_retention_removes_nothing(self, fake: FakeStore) -> None:
        wrong, fake.on_request = fake.on_request, do_nothing

        def answer_wrongly_after_the_commit(request: Any, stage: str) -> HttpResponse | None:
            if (request.kind, stage) == ("put", "after") and ".tags/s3/" in request.key:
                pointers._pointers.clear()
                fake.on_request = wrong
            return None

        fake.on_request = answer_wrongly_after_the_commit
        with pytest.warns(UserWarning, match="could not be removed"):
            save(3, keep=1)
        stop_answers(fake)
        assert check_all() == {**OLD, "s3": 3}

    def test_a_tag_is_gone_if_only_a_list_that_lags_has_its_pointer(self, fake: FakeStore) -> None:
        fake.objects = {key: stored for key, stored in fake.objects.items() if "/s2." not in key}
        pointers._pointers.clear()
        fake.on_request = answer_to("get", ".tags/s2/", failure(404, "NoSuchKey", **REQUEST_ID))
        assert check_all() == {"s1": 1}
        save(3)
        assert check_all() == {"s1": 1, "s3": 3}


@pytest.mark.usefixtures("fake")
def test_a_checkpoint_that_is_corrupt_is_not_said_to_have_been_read_wrong() -> None:
    path = rankless.list_checkpoints(run_path())[-1].path / "manifest.json"
    store = run_path().store
    store.replace_small(path, store.read_small(path).replace(b"s2", b"sX"))
    with pytest.warns(UserWarning) as caught:  # noqa: PT030 - all warnings are compared
        assert rankless.restore(run_path(), model={"net": state(0)}).tag == "s1"
    assert [str(warning.message)[:40] for warning in caught if "loaded" in str(warning.message)] == [
        "loaded 's1' and ignored other checkpoint"
    ]


class TestManifestsThatAreNotFound:
    """A replica that lags answers 404 once; a lifecycle rule removes the manifest for good."""

    MISSING = failure(404, "NoSuchKey", **REQUEST_ID)

    @staticmethod
    def restore(tag: str | None = None) -> str:
        return rankless.restore(run_path(), tag, model={"net": state(0)}).tag

    def miss(self, fake: FakeStore, times: int) -> list[HttpResponse]:
        """Let the manifest of ``s2`` be missing so often. Return the answers that are left."""
        misses = [self.MISSING] * times

        def answer(request: Any, stage: str) -> HttpResponse | None:
            is_manifest = (request.kind, stage) == ("get", "before") and request.key.endswith("manifest.json")
            return misses.pop() if is_manifest and "/s2." in request.key and misses else None

        fake.on_request = answer
        return misses

    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_a_load_reads_it_again(self, fake: FakeStore, times: int) -> None:
        misses = self.miss(fake, times)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="loaded .* and ignored")
            assert self.restore() == "s2"
        assert not misses

    def test_a_pin_reads_it_again(self, fake: FakeStore) -> None:
        misses = self.miss(fake, 1)
        with rankless.pin(run_path(), "s2") as checkpoint:
            assert checkpoint.step == 2
        assert not misses

    @pytest.mark.parametrize("kinds", [("get",), ("get", "head")])
    def test_a_lost_one_is_an_error_that_says_so(self, fake: FakeStore, kinds: tuple[str, ...]) -> None:
        """Also if the server finds it, but cannot give it."""
        fake.on_request = lambda request, stage: (
            self.MISSING if stage == "before" and request.kind in kinds and "manifest.json" in request.key else None
        )
        for tag in (None, "s2"):
            fake.requests.clear()
            with pytest.raises(CorruptCheckpointError, match="no manifest, but its tag still names it"):
                self.restore(tag)
            assert len(fake.requests) < 80
        with pytest.raises(CorruptCheckpointError, match="no manifest, but its tag still names it"):
            rankless.open(run_path())

    def test_attempts_without_a_change_between_them_are_bounded(self, fake: FakeStore) -> None:
        """Also if the pointer cannot tell that the checkpoint is still named."""
        fake.objects = {key: stored for key, stored in fake.objects.items() if "manifest.json" not in key}
        with (
            mock.patch("rankless.run.object_run.is_named", return_value=False),
            mock.patch.object(selection, "_LONGEST_RETRY_SECONDS", 0.001),
            pytest.raises(RanklessError),
        ):
            self.restore()
        assert len(fake.requests) < 1000

    def test_a_load_takes_the_one_before_a_lost_one(self, fake: FakeStore) -> None:
        fake.objects = {key: stored for key, stored in fake.objects.items() if not ("/s2." in key and "manif" in key)}
        with pytest.warns(UserWarning, match="s2 is corrupt"):
            assert self.restore() == "s1"


def test_a_pointer_that_is_not_found_at_first_is_published(fake: FakeStore) -> None:
    misses = [failure(404, "NoSuchKey", **REQUEST_ID)] * 3

    def miss(request: Any, stage: str) -> HttpResponse | None:
        is_pointer = (request.kind, stage) == ("get", "before") and ".tags/s3/" in request.key
        return misses.pop() if is_pointer and misses else None

    fake.on_request = miss
    save(3)
    assert not misses
    assert check_all() == {**OLD, "s3": 3}


@pytest.mark.parametrize(
    ("part", "reason"), [(".tags/s3/", "s3/1 is not there after"), ("/model/", "(are|is) not there after")]
)
def test_a_proxy_that_confirms_what_it_does_not_store_is_named(fake: FakeStore, part: str, reason: str) -> None:
    def confirm(request: Any, stage: str) -> HttpResponse | None:
        if stage == "after" and request.kind in {"put", "complete"} and part in request.key:
            fake.objects.pop(request.key)
        return None

    fake.on_request = confirm
    with pytest.raises(StorageError, match=f"{reason} .*a proxy answers"):
        save(3)
    stop_answers(fake)
    assert check_all() == OLD


class TestListsThatLag:
    """A list is no proof that an object is missing."""

    @pytest.mark.parametrize("options", [{}, {"keep": 1}, {"tag": "s2", "value": 3, "overwrite": True}])
    def test_a_save_succeeds(self, fake: FakeStore, options: dict[str, Any]) -> None:
        age(fake)
        fake.list_lag = 3600.0
        save(3, **options)
        fake.list_lag = 0.0
        assert check_all()[options.get("tag", "s3")] == 3

    @pytest.mark.parametrize("listed", [[], ["s1"]])
    def test_a_save_is_later_than_what_its_job_has_loaded_and_saved(self, fake: FakeStore, listed: list[str]) -> None:
        """And it continues the same run, so retention removes nothing newer, and what is older at last."""
        directory = rankless.RunDirectory(run_path())
        directory.load(model={"net": state(0)})
        old = {key: stored for key, stored in fake.objects.items() if any(f"/{tag}" in key for tag in listed)}
        with mock.patch.object(fake, "listed_objects", return_value=old):
            for step in (3, 4):
                directory.save(f"s{step}", {"net": state(step)}, step=step, keep=1)
        assert rankless.open(run_path()).step == 4
        directory.save("s5", {"net": state(5)}, step=5, keep=1)
        assert check_all() == {"s5": 5}

    @pytest.mark.parametrize("options", [{"keep": 1}, {"tag": "s2", "value": 3, "overwrite": True, "keep": 1}])
    def test_a_checkpoint_is_removed_whose_pointer_lists_still_have(
        self, fake: FakeStore, options: dict[str, Any]
    ) -> None:
        before = dict(fake.objects)
        with mock.patch.object(fake, "listed_objects", side_effect=lambda: before | fake.objects):
            save(3, **options)
        tag = options.get("tag", "s3")
        assert check_all() == {tag: 3}
        assert {key.split("/")[1].split(".")[0] for key in fake.objects} == {"", tag}

    def test_a_file_that_was_confirmed_and_is_not_there_ends_the_save(self, fake: FakeStore) -> None:
        def lose_a_file(request: Any, stage: str) -> None:
            if (request.kind, stage) == ("put", "before") and ".tags/s3/" in request.key:
                fake.objects = {key: stored for key, stored in fake.objects.items() if "model/" not in key}

        fake.on_request = lose_a_file
        with pytest.raises(StorageError, match="not there after the server has confirmed them"):
            save(3)
        stop_answers(fake)
        assert "s3" not in {info.tag for info in rankless.list_checkpoints(run_path())}

    def test_a_mark_that_no_list_has_ends_the_save(self, fake: FakeStore) -> None:
        """Another process took the save for dead."""
        age(fake)
        fake.list_lag = 3600.0

        def mark(request: Any, stage: str) -> None:
            if (request.kind, stage) == ("put", "after") and ".tags/s3/" in request.key:
                (folder,) = {key.split("/")[1] for key in fake.objects if key.split("/")[1].startswith("s3.")}
                fake.on_request = do_nothing
                run_path().store.replace_small(run_path() / folder / ".removed", b"")

        fake.on_request = mark
        with pytest.raises(StorageError, match="another process deletes"):
            save(3)
        fake.list_lag = 0.0
        assert check_all() == OLD


class TestAzure:
    @pytest.fixture
    def azure(self) -> Iterator[FakeAzure]:
        with store_with_two_checkpoints(FakeAzure()) as fake:
            assert isinstance(fake, FakeAzure)
            yield fake

    def test_a_lease_on_a_pointer_keeps_the_checkpoint(self, azure: FakeAzure) -> None:
        refused = azure.failure(412, "LeaseIdMissing")
        azure.on_request = answer_to("delete", ".tags/", refused)
        with pytest.warns(UserWarning, match="could not be removed"):
            save(3, keep=1)
        stop_answers(azure)
        assert check_all() == {"s1": 1, "s2": 2, "s3": 3}

    @pytest.mark.parametrize("status", [200, 204])
    def test_a_page_of_a_proxy_is_no_write(self, azure: FakeAzure, status: int) -> None:
        azure.on_request = Answers(HttpResponse(status, {"content-length": "0"}), kind="put")
        rankless.add_metrics(run_path(), "s1", {"loss": 1.0})
        assert rankless.open(run_path(), "s1").metrics == {"loss": 1.0}

    def test_a_save_that_fails_reports_why_although_its_abort_gets_a_wrong_answer(self, azure: FakeAzure) -> None:
        def refuse_all(request: Any, stage: str) -> HttpResponse | None:
            if stage == "before" and request.kind == "complete":
                return HttpResponse(201, REQUEST_ID)
            return azure.failure(403, "AuthorizationFailure") if (request.kind, stage) == ("put", "before") else None

        azure.on_request = refuse_all
        with brief_retries(), pytest.raises(StorageError):
            save(3)

    def test_a_list_that_does_not_go_on_is_an_error(self, azure: FakeAzure) -> None:
        azure.page = 2
        first = azure.handle  # the same page for each marker, as from a cache that ignores the query

        def cached(method: str, target: str, headers: Any, body: bytes) -> HttpResponse:
            return first(method, target.replace("marker=", "ignored="), headers, body)

        with (
            mock.patch.object(azure, "handle", cached),
            mock.patch.object(azure, "_is_allowed", return_value=True),
            pytest.raises(StorageError, match="could not list"),
        ):
            run_path().store.list_objects(run_path())

    def test_the_source_of_tokens_is_kept_unless_a_token_is_refused(self, azure: FakeAzure) -> None:
        made = []
        source = "rankless.storage.azure.azure_credentials._default_token_function"
        with mock.patch(source, side_effect=lambda: made.append(1) or (lambda: "t")):
            store = azure.store_at("http://tokens", credentials=None)
            for number in range(20):
                assert not store.is_file(store.path(f"{BUCKET}/none-{number}"))
        assert len(made) == 1


SECRETS: list[Callable[[], object]] = [
    lambda: rankless.Azure("account", credentials="sv=1&sig=SECRET\x01"),
    lambda: rankless.Azure("account", endpoint="https://account.blob.core.windows.net/?sv=1&sig=SECRET"),
    lambda: rankless.Azure("account", endpoint="account.blob.core.windows.net?sig=SECRET"),
    lambda: rankless.S3(endpoint="https://user:SECRET@host"),
    lambda: rankless.GCS(endpoint="https://user:SECRET@host"),
    lambda: rankless.GCS(credentials='{"private_key": "SECRET"}'),
    lambda: rankless.GCS(credentials={"private_key": "SECRET"}),  # type: ignore[arg-type]
    lambda: rankless.S3(headers={"x-amz-server-side-encryption-customer-key": "SECRET\n"}),  # type: ignore[arg-type]
]


class TestArguments:
    @pytest.mark.parametrize("make", SECRETS)
    def test_an_error_contains_no_secret(self, make: Callable[[], object]) -> None:
        with pytest.raises(InvalidArgumentError) as error:
            make()
        assert "SECRET" not in str(error.value)

    def test_the_text_of_a_store_contains_no_secret(self) -> None:
        headers: Any = {"x-amz-server-side-encryption-customer-key": "SECRET"}
        for store in (
            rankless.S3(headers=headers, credentials=("key", "SECRET")),
            rankless.GCS(headers=headers),
            rankless.Azure("account", headers=headers, credentials="sv=1&sig=SECRET"),
        ):
            assert "SECRET" not in repr(store)

    def test_a_signature_from_a_file_may_end_with_a_line_break(self) -> None:
        assert rankless.Azure("account", credentials="?sv=1&sig=abc\n").credentials == "?sv=1&sig=abc"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("timeout", value) for value in (0, -1, float("nan"), float("inf"), "60", None, True)),
            *(("retry_seconds", value) for value in (-1, float("nan"), None, "60")),
            *(("headers", value) for value in (None, 3, {"a": 1}, {"a": "b\n"}, {"a": "\xe4"}, {"a": " b"}, [("a",)])),
            *(("ca_file", value) for value in ("/none/ca.pem", "/")),
        ],
    )
    def test_an_argument_that_cannot_be_used_is_named(self, name: str, value: object) -> None:
        for make in (rankless.S3, rankless.GCS, lambda **options: rankless.Azure("account", **options)):
            with pytest.raises(InvalidArgumentError, match="header" if name == "headers" else name):
                make(**{name: value})

    def test_headers_may_be_a_list_of_pairs(self) -> None:
        store = rankless.S3(headers=[("X-Amz-Storage-Class", "GLACIER_IR")])  # type: ignore[arg-type]
        assert store.headers == (("x-amz-storage-class", "GLACIER_IR"),)
        assert hash(store) == hash(rankless.S3(headers={"x-amz-storage-class": "GLACIER_IR"}))  # type: ignore[arg-type]

    @pytest.mark.parametrize("account", [None, "", "a/b"])
    def test_an_account_is_a_name(self, account: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="account"):
            rankless.Azure(account)

    @pytest.mark.parametrize("token", [None, b"token", "to\nken", "t\xf6ken"])
    def test_a_token_is_a_text_of_one_line(self, token: Any) -> None:
        for store in (rankless.GCS(credentials=lambda: token), rankless.Azure("account", credentials=lambda: token)):
            with pytest.raises(StorageError, match="must return a token") as error:
                store.read_small(store.path(f"{BUCKET}/a"))
            assert "ken" not in str(error.value).replace("token", "")


@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n", b""])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up(sent: bytes) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        stopped = threading.Event()

        def drip() -> None:
            connected, _ = server.accept()
            with connected:
                connected.sendall(sent)
                while not stopped.wait(0.05):
                    try:
                        connected.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        store = rankless.S3(
            f"http://127.0.0.1:{server.getsockname()[1]}", credentials=("k", "s"), timeout=0.2, retry_seconds=0
        )
        started = time.monotonic()
        with mock.patch.object(connection, "_MOST_TIMEOUTS", 3), pytest.raises(StorageError, match="too slowly"):
            store.read_small(store.path(f"{BUCKET}/a"))
        assert time.monotonic() - started < 20
        stopped.set()
        thread.join()


class FlippedBit:
    """Changes a byte of one answer of many, if it has the bytes of a file."""

    def __init__(self, fake: FakeStore, number: int) -> None:
        self.send, self.number, self.count = fake.send, number, 0

    def __call__(self, address: Address, request: HttpRequest) -> HttpResponse:
        response = self.send(address, request)
        if request.method != "GET" or "/s" not in request.target or response.status not in {200, 206}:
            return response
        self.count += 1
        if self.count - 1 != self.number:
            return response
        data = bytearray(response.body if request.into is None else request.into)
        data[len(data) // 2] ^= 1
        if request.into is not None:
            request.into[:] = data
        return replace(response, body=response.body and bytes(data))


def test_bytes_that_change_on_their_way_are_read_again(fake: FakeStore) -> None:
    for number in range(1000):
        flipped = FlippedBit(fake, number)
        with mock.patch.object(fake, "send", flipped):
            assert check_all() == {"s1": 1, "s2": 2}
        if flipped.count <= number:
            break
    assert number > 6


@pytest.mark.parametrize("first", [b"garbage\r\n\r\n", b"HTTP/9\r\n\r\n", b"\r\n"])
def test_an_answer_without_a_status_is_no_answer(first: bytes) -> None:
    answers = [first, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\netag: e\r\n\r\nok"]
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            for answer in answers:
                connected, _ = server.accept()
                with connected:
                    connected.recv(65536)
                    connected.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        store = rankless.S3(f"http://127.0.0.1:{server.getsockname()[1]}", credentials=("k", "s"), timeout=10)
        assert store.read_small(store.path(f"{BUCKET}/a")) == b"ok"
        thread.join()


def test_first_parts_wait_for_their_headers_in_the_memory_of_the_tensors() -> None:
    """Otherwise a checkpoint of small files would be in memory twice."""
    fake, held = FakeS3(AWS), []
    tensors = {f"w{number}": torch.ones(2**18) for number in range(8)}

    def measure(uploaded: upload_parts.UploadedParts, *args: Any) -> Any:
        bodies = [assembly.make_body() for assembly in uploaded.held.values()]
        addresses = {tensor.data_ptr() for tensor in tensors.values()}
        held.extend(torch.frombuffer(body.pieces[-1], dtype=torch.uint8).data_ptr() in addresses for body in bodies)
        return send_held(uploaded, *args)

    send_held = upload_parts.UploadedParts.send_held
    with fake.connected(), mock.patch.object(upload_parts.UploadedParts, "send_held", measure):
        path = fake.store_at("http://fake").path(f"{BUCKET}/run")
        rankless.save_checkpoint(path, "s", tensors, max_shard_size=2**20)
    assert sum(held) == len(tensors)


def test_a_dry_run_names_what_a_prune_would_remove(fake: FakeStore, capsys: pytest.CaptureFixture[str]) -> None:
    upload = run_path().store.create_upload(run_path() / f"s9.{16 * '0'}" / "model.safetensors", {})
    with mock.patch("rankless.cli.prune.parse_location", return_value=run_path()):
        for dry_run in (True, False):
            prune("run", None, remains=True, dry_run=dry_run, as_json=False)
            output = capsys.readouterr().out
            assert "0 leftovers" in output
            assert f"kept s9.{16 * '0'}: something of it has changed" in output
        with mock.patch.object(object_removal, "ABANDONED_SECONDS", -1.0):
            for dry_run, verb in ((True, "would remove"), (False, "removed")):
                prune("run", None, remains=True, dry_run=dry_run, as_json=False)
                assert f"{verb} 0 checkpoints and 1 leftover" in capsys.readouterr().out
    assert upload.id not in [found.id for found, _ in run_path().store.list_uploads(run_path())]


@pytest.mark.parametrize(
    "url", ["S3://bucket/run", "gcs://bucket/run", "abfs://a/b", "http://host/run", "s3:/bucket/run"]
)
def test_the_url_of_an_unknown_store_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="s3://"):
        rankless.list_checkpoints(url)
