"""Saves into an object store whose pointers are created, removed and created again by other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, RanklessError, StorageError, SupersededError, TagExistsError
from rankless.run import claims, unnamed_checkpoints
from rankless.run.catalog import list_stale_directories
from rankless.run.cleanup import clean_up, delete_checkpoints, seems_alive
from rankless.save import object_publication
from rankless.storage.http.connection import HttpResponse
from rankless.storage.object_path import make_object_path
from tests.helpers.fake_http import BUCKET, FakeStore, disconnect
from tests.helpers.fake_s3 import AWS, FakeS3, failure
from tests.helpers.fake_stores import age
from tests.helpers.object_histories import (
    Start,
    check_all,
    check_nothing_is_left,
    do_nothing,
    run_path,
    save,
    state,
    store_with_two_checkpoints,
)


@pytest.fixture
def fake() -> Iterator[FakeStore]:
    with store_with_two_checkpoints(FakeS3(AWS)) as store:
        yield store


class PausedCall:
    """A call in another thread that stops before a request, until it is resumed."""

    def __init__(self, fake: FakeStore, call: Callable[[], object], stops: Callable[[Any], bool]) -> None:
        self._call, self._reached, self._go_on = call, threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

        def stop(request: Any, stage: str) -> None:
            if threading.current_thread() is self._thread and stage == "before" and stops(request):
                self._reached.set()
                self._go_on.wait(60)

        fake.on_request = stop
        self._thread.start()
        assert self._reached.wait(30)

    def _run(self) -> None:
        try:
            self._call()
        except RanklessError as error:
            self.error = error

    def resume(self) -> None:
        self._go_on.set()
        self._thread.join()


def creates_pointer(request: Any) -> bool:
    return request.kind == "put" and "/.tags/" in request.key


def remove(tag: str) -> None:
    list(delete_checkpoints([info for info in rankless.list_checkpoints(run_path()) if info.tag == tag]))


class LostThenConflict:
    """The answer to the first pointer is lost, that to the second attempt is a conflict."""

    def __init__(self) -> None:
        self.answers = [disconnect, lambda: failure(409, "ConditionalRequestConflict")]

    def __call__(self, request: Any, stage: str) -> HttpResponse | None:
        due = "after" if len(self.answers) == 2 else "before"
        if not creates_pointer(request) or not self.answers or stage != due:
            return None
        return self.answers.pop(0)()  # type: ignore[return-value]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_pointer_whose_answer_was_lost_before_a_conflict_is_found(fake: FakeStore, overwrite: bool) -> None:
    fake.on_request = LostThenConflict()
    save(2 if overwrite else 3, value=3, overwrite=overwrite)
    assert check_all() == ({"s1": 1, "s2": 3} if overwrite else {"s1": 1, "s2": 2, "s3": 3})
    check_nothing_is_left(fake)


def test_a_failure_after_the_commit_leaves_the_checkpoint(fake: FakeStore) -> None:
    """Also if the pointer was only found to be that of the save, because the store had said that it exists."""
    with (
        mock.patch("rankless.save.object_output.CheckpointInfo") as late,
        mock.patch.object(type(fake.store_at("http://fake")), "create_object", _create_and_deny),
    ):
        late.of.side_effect = StorageError(5, "late")
        with pytest.raises(StorageError, match="late"):
            save(3)
    assert check_all() == {"s1": 1, "s2": 2, "s3": 3}


def _create_and_deny(store: Any, path: Any, data: bytes) -> bool:
    store.replace_small(path, data)
    return False


def test_a_writer_that_removes_what_it_has_replaced_leaves_a_later_checkpoint(fake: FakeStore) -> None:
    """The tag was removed and saved again meanwhile, so its pointer has the number of the replaced one."""
    paused = PausedCall(fake, lambda: save(2, value=3, overwrite=True), lambda request: request.kind == "delete")
    remove("s2")
    save(2, value=4)
    paused.resume()
    assert check_all() == {"s1": 1, "s2": 4}


def test_a_writer_that_was_overtaken_by_an_overwrite_is_refused(fake: FakeStore) -> None:
    """The pointer with the number that it wants to create was there, and was removed by the overwrite."""
    paused = PausedCall(fake, lambda: save(3), creates_pointer)
    save(3, value=4)
    save(3, value=5, overwrite=True)
    paused.resume()
    assert isinstance(paused.error, TagExistsError)
    assert check_all() == {"s1": 1, "s2": 2, "s3": 5}
    check_nothing_is_left(fake)


def test_a_pointer_that_arrives_late_names_a_whole_checkpoint(fake: FakeStore) -> None:
    """The save has failed by then: it must not have removed its files."""
    late: list[Callable[[], object]] = []
    handle = fake.handle

    def delay(method: str, target: str, headers: Any, body: bytes) -> HttpResponse:
        if method == "PUT" and "/.tags/" in target:
            late.append(lambda: handle(method, target, headers, body))
            disconnect()
        return handle(method, target, headers, body)

    fake.handle = delay  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        save(3)
    fake.handle = handle  # type: ignore[method-assign]
    late[0]()
    assert check_all() == {"s1": 1, "s2": 2, "s3": 3}


def test_a_checkpoint_that_is_replaced_while_it_is_opened_by_its_tag_is_opened(fake: FakeStore) -> None:
    start = Start(fake)
    start.restore()
    rankless.open(run_path(), "s2")
    for number in range(len(fake.requests)):
        opened: list[float | None] = []
        answers = iter([False] * number + [True])
        opening = PausedCall(
            start.restore(),
            lambda opened=opened: opened.append(rankless.open(run_path(), "s2").step),  # type: ignore[misc]
            lambda _, answers=answers: next(answers, False),  # type: ignore[misc]
        )
        save(2, value=3, overwrite=True)
        opening.resume()
        assert opening.error is None, number
        assert opened in ([2], [3]), number


def test_a_clean_up_by_a_host_with_a_wrong_clock_leaves_a_save_in_progress(fake: FakeStore) -> None:
    fake.clock = lambda: time.time() - 2 * 86_400
    age(fake)
    alive, removed = list[bool](), list[Path]()

    def clean_up_once(request: Any, stage: str) -> None:
        if (request.kind, stage) == ("part", "before"):
            fake.on_request = do_nothing
            alive.extend(seems_alive(folder.path, folder.time) for folder in list_stale_directories(run_path()))
            removed.extend(clean_up(run_path()))

    fake.on_request = clean_up_once
    save(3)
    assert (alive, removed) == ([True], [])
    assert check_all() == {"s1": 1, "s2": 2, "s3": 3}


def test_a_checkpoint_that_has_lost_its_files_does_not_hide_the_one_before(fake: FakeStore) -> None:
    for key in [key for key in fake.objects if "/s2." in key]:
        del fake.objects[key]
    model = state(0)
    with pytest.warns(UserWarning, match=r"loaded 's1'.*s2 is corrupt"):
        restored = rankless.restore(run_path(), model={"net": model})
    assert restored.step == 1
    with pytest.raises(CorruptCheckpointError, match="has no manifest, but its tag still names it"):
        rankless.restore(run_path(), "s2", model={"net": model})
    with pytest.raises(CorruptCheckpointError, match="has no manifest, but its tag still names it"):
        rankless.open(run_path())


@pytest.mark.parametrize("earlier", [[], ["step_1"]], ids=["first save", "later save"])
def test_a_job_whose_files_the_next_one_has_removed_is_superseded(earlier: list[str]) -> None:
    """It was stopped for long. To advise it to save again would not help."""
    fake = FakeS3(AWS)
    with fake.connected():
        path = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/run")
        directory = rankless.RunDirectory(path)
        for tag in earlier:
            directory.save(tag, {"w": torch.ones(2)}, step=1)
        find_damage = object_publication.find_damage

        def stop(*arguments: Any) -> str | None:
            with (
                mock.patch.object(object_publication, "find_damage", find_damage),
                mock.patch.object(claims, "_claimed", {}),  # as in another process
            ):
                other = rankless.RunDirectory(path)
                other.restore(None, {"w": torch.zeros(2)}, resume=True)
                other.save("step_2b", {"w": torch.ones(2)}, step=2)
            return "2 of 2 files are not there"

        with (
            mock.patch.object(object_publication, "find_damage", stop),
            pytest.raises(SupersededError, match="another job has continued the run"),
        ):
            directory.save("step_2", {"w": torch.ones(2)}, step=2)


def test_a_job_that_stops_right_after_its_commit_deletes_nothing_when_it_wakes_up() -> None:
    """Another one has gone back meanwhile, and has saved under the tag: what the first has saved got another tag."""
    fake = FakeS3(AWS)
    with fake.connected():
        path = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/run")
        directory = rankless.RunDirectory(path)
        directory.save("step_1", {"w": torch.ones(2)}, step=1)
        find_highest_number = object_publication.find_highest_number

        def stop(*arguments: Any) -> Any:
            with (
                mock.patch.object(object_publication, "find_highest_number", find_highest_number),
                mock.patch.object(claims, "_claimed", {}),  # as in another process
            ):
                other = rankless.RunDirectory(path)
                with pytest.warns(UserWarning, match="goes back to 'step_1'"):
                    other.restore("step_1", {"w": torch.zeros(2)}, resume=True)
                other.save("step_2", {"w": torch.ones(2) * 3}, step=2)
            return find_highest_number(*arguments)

        with (
            mock.patch.object(object_publication, "find_highest_number", stop),
            pytest.raises((SupersededError, TagExistsError)),
        ):
            directory.save("step_2", {"w": torch.ones(2) * 2}, step=2)
        tags = [info.tag for info in rankless.list_checkpoints(path)]
        values = {tag: float(rankless.open(path, tag)["model/w"][0]) for tag in tags}
        assert values == {"step_1": 1, "step_2@1": 2, "step_2": 3}


def test_a_job_that_gives_up_its_first_checkpoint_leaves_it_if_another_one_has_given_it_a_tag() -> None:
    """In a run without any pointer, as a copy without hidden names, a save gives all whole checkpoints their tags."""
    fake = FakeS3(AWS)
    with fake.connected():
        path = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/run")
        publish = object_publication.ObjectPublication.publish

        def stop(*_: Any, **__: Any) -> None:
            with (
                mock.patch.object(object_publication.ObjectPublication, "publish", publish),
                pytest.warns(UserWarning, match="wrote those of its 1 whole checkpoint"),
            ):
                rankless.save_checkpoint(path, "other", {"w": torch.ones(2)})
            raise SupersededError("another job has continued the run")

        with (
            mock.patch.object(object_publication.ObjectPublication, "publish", stop),
            pytest.raises(SupersededError),
        ):
            rankless.RunDirectory(path).save("first", {"w": torch.ones(2) * 2})
        tags = {info.tag for info in rankless.list_checkpoints(path)}
        assert tags == {"first", "other"}
        assert rankless.open(path, "first")["model/w"][0] == 2
        assert not [key for key in fake.objects if "removed" in key.lower()]


def test_a_checkpoint_that_its_own_save_is_deleting_gets_no_tag() -> None:
    fake = FakeS3(AWS)
    with fake.connected():
        path = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/run")
        rankless.save_checkpoint(path, "first", {"w": torch.ones(2)})
        for key in [key for key in fake.objects if "/.tags/" in key or "/.history/" in key]:
            del fake.objects[key]
        (folder,) = {key.rpartition("/")[0] for key in fake.objects if key.endswith("manifest.json")}
        original = unnamed_checkpoints.is_still_whole

        def delete_meanwhile(whole: Any) -> bool:
            del fake.objects[f"{folder}/manifest.json"]
            return original(whole)

        with mock.patch.object(unnamed_checkpoints, "is_still_whole", delete_meanwhile):
            rankless.save_checkpoint(path, "other", {"w": torch.ones(2)})
        assert [info.tag for info in rankless.list_checkpoints(path)] == ["other"]
