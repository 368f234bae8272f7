"""Pins of checkpoints in an object store: no retention removes what a living process has pinned."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import rankless
from rankless import evaluation
from rankless.ondisk.hidden_names import HiddenName
from rankless.run import cleanup, lease, object_removal
from rankless.storage.http.connection import HttpResponse
from tests.helpers.fake_azure import REQUEST_ID, FakeAzure
from tests.helpers.fake_http import FakeStore
from tests.helpers.fake_s3 import AWS, GOOGLE, FakeS3, failure
from tests.helpers.object_histories import (
    OPERATIONS,
    Start,
    StopAt,
    check_all,
    check_nothing_is_left,
    choose_moments,
    do_nothing,
    every_moment,
    run_path,
    save,
    state,
    store_with_two_checkpoints,
)
from tests.helpers.pairwise import first_of


@pytest.fixture(params=[lambda: FakeS3(AWS), lambda: FakeS3(GOOGLE), FakeAzure], ids=["aws", "google", "azure"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeStore]:
    with store_with_two_checkpoints(request.param()) as fake:
        yield fake


def pins(fake: FakeStore) -> list[str]:
    return [key for key in fake.objects if key.endswith((".pin", ".lock"))]


def test_a_pinned_checkpoint_stays_until_the_end_of_the_block(fake: FakeStore) -> None:
    with rankless.pin(run_path(), "s1") as checkpoint:
        assert len(pins(fake)) == 1
        save(3, keep=1)
        assert check_all().keys() == {"s1", "s3"}
        assert checkpoint["model/net/small"].tolist() == [1.0]
        cleanup.clean_up(run_path())
        save(4, keep=1)
        assert check_all().keys() == {"s1", "s4"}
    assert not pins(fake)
    save(5, keep=1)
    assert check_all().keys() == {"s5"}


def test_a_pin_of_a_dead_process_ends_after_an_hour(fake: FakeStore) -> None:
    with rankless.pin(run_path(), "s1"):
        (key,) = pins(fake)
        for age, kept in ((3500, {"s1", "s3"}), (3700, {"s3"})):
            fake.objects[key] = replace(fake.objects[key], time=time.time() - age)
            save(3, overwrite=True, keep=1)
            assert check_all().keys() == kept
        assert not pins(fake)


@pytest.mark.parametrize("hours", [-2, 2])
def test_the_clock_of_the_holder_does_not_matter(fake: FakeStore, hours: int) -> None:
    with ExitStack() as stack:
        with mock.patch.object(lease, "time", mock.Mock(time=lambda: time.time() + 3600 * hours)):
            stack.enter_context(rankless.pin(run_path(), "s1"))
        save(3, keep=1)
        assert check_all().keys() == {"s1", "s3"}
        (key,) = pins(fake)
        fake.objects[key] = replace(fake.objects[key], time=time.time() - 3700)
        save(4, keep=1)
        assert check_all().keys() == {"s4"}


def test_a_checkpoint_is_opened_and_pinned_by_its_tag_with_few_requests(fake: FakeStore) -> None:
    """Each evaluation does so. One request lists the pointers of the tag, and one reads each file's header."""
    fake.requests.clear()
    assert rankless.open(run_path(), "s1").step == 1
    assert len(fake.requests) <= 5
    fake.requests.clear()
    with rankless.pin(run_path(), "s1"):
        pass
    assert len(fake.requests) <= 11


def test_a_tag_is_preferred_to_an_alias(fake: FakeStore) -> None:
    rankless.set_alias(run_path(), "s3", "s1")
    assert rankless.open(run_path(), "s3").step == 1
    save(3)
    assert rankless.open(run_path(), "s3").step == 3


class TestKeysThatMayNotDelete:
    """Saves succeed, and what cannot be removed stays. It blocks nobody."""

    @pytest.fixture(autouse=True)
    def _refuse(self, fake: FakeStore) -> None:
        fake.on_request = refuse_deletions

    def test_the_locks_of_removals_that_failed_block_no_pin(self, fake: FakeStore) -> None:
        for step in (3, 4):
            with pytest.warns(UserWarning, match="could not be removed"):
                save(step, keep=1)
        assert any(key.endswith(".lock") for key in fake.objects)
        with mock.patch.object(evaluation, "_ATTEMPTS", 1), rankless.pin(run_path(), "s1") as checkpoint:
            assert checkpoint.step == 1

    def test_what_may_not_be_deleted_keeps_no_others(self, fake: FakeStore) -> None:
        save(3)
        fake.on_request = lambda request, stage: refuse_deletions(request, stage) if "/s1" in request.key else None
        with pytest.warns(UserWarning, match="could not be removed"):
            save(4, keep=1)
        assert check_all().keys() >= {"s1", "s4"}
        assert not check_all().keys() & {"s2", "s3"}

    def test_a_pin_that_is_over_protects_nothing(self, fake: FakeStore) -> None:
        with rankless.pin(run_path(), "s1"):
            pass
        assert len(pins(fake)) == 1
        fake.on_request = do_nothing
        save(3, keep=1)
        assert check_all().keys() == {"s3"}
        assert not pins(fake)


def test_a_pin_that_waits_in_vain_says_for_what(fake: FakeStore) -> None:
    lock = HiddenName("s1", rankless.list_checkpoints(run_path())[0].run, 16 * "0", "lock")
    with (
        lease.held_lease(run_path() / lock.name),
        mock.patch.object(evaluation, "_RETRY_SECONDS", 0.001),
        pytest.raises(rankless.CheckpointReplacedError, match="another process is removing it"),
        rankless.pin(run_path(), "s1"),
    ):
        pytest.fail("it was pinned")


def refuse_deletions(request: Any, stage: str) -> HttpResponse | None:
    return failure(403, "AccessDenied", **REQUEST_ID) if (request.kind, stage) == ("delete", "before") else None


def test_a_pin_is_renewed_while_its_holder_lives(fake: FakeStore) -> None:
    with mock.patch.object(lease, "_RENEWAL_SECONDS", 0.01), rankless.pin(run_path(), "s1"):
        (key,) = pins(fake)
        before = fake.objects[key].data
        deadline = time.monotonic() + 30
        while fake.objects[key].data == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_open_checkpoint_has_its_tag_and_the_metrics_that_were_added(fake: FakeStore) -> None:
    rankless.add_metrics(run_path(), "s1", {"loss": 0.5})
    checkpoint = rankless.open(run_path(), "s1")
    assert (checkpoint.tag, checkpoint.metrics) == ("s1", {"loss": 0.5})


def test_an_evaluator_in_a_loop_pins_what_it_reads(fake: FakeStore) -> None:
    seen = []
    for checkpoint in rankless.iterate_pinned(run_path(), timeout=0.5, poll_seconds=0.01):
        seen.append(checkpoint.tag)
        if len(seen) < 3:
            save(len(seen) + 2, keep=1)
        assert checkpoint["model/net/small"].tolist() == [float(seen[-1][1:])]
    assert seen == ["s2", "s3", "s4"]
    assert not pins(fake)


def test_a_pin_waits_for_a_removal_that_stalls(fake: FakeStore) -> None:
    stalled, resumed = threading.Event(), threading.Event()

    def stall(request: Any, stage: str) -> None:
        if request.kind == "delete" and ".tags/s1" in request.key and stage == "before":
            stalled.set()
            resumed.wait(60)

    fake.on_request = stall
    thread = threading.Thread(target=attempt, args=("retention", {}))
    thread.start()
    assert stalled.wait(30)
    with (
        mock.patch.object(evaluation, "_RETRY_SECONDS", 0.001),
        pytest.raises(rankless.NoCheckpointError),
        rankless.pin(run_path(), "s1"),
    ):
        pytest.fail("a checkpoint was pinned that is being removed")
    resumed.set()
    thread.join()
    fake.on_request = do_nothing
    check_nothing_is_left(fake)


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize("content", [b'{"id": "\xff\xfe"}', b'{"x":' + b"[" * 200_000, b"", bytes(2000)])
def test_garbage_in_the_place_of_pointers_and_pins_stops_no_other_checkpoint(fake: FakeStore, content: bytes) -> None:
    run = run_path()
    run.store.replace_small(run / ".tags/s2/9", content)
    run.store.replace_small(run / f".s1.{16 * '0'}.{16 * '1'}.pin", content)
    model = state(0)
    with pytest.warns(UserWarning, match="corrupt"):
        assert rankless.restore(run, model={"net": model}).tag == "s1"
    with mock.patch.object(object_removal, "ABANDONED_SECONDS", -1.0):
        cleanup.clean_up(run)
    assert not pins(fake)


def load_pinned() -> None:
    """Pin the oldest checkpoint, and read all of it. What was pinned must be there."""
    with rankless.pin(run_path(), "s1") as checkpoint:
        model = state(0)
        try:
            assert rankless.restore(checkpoint.path, model={"net": model}).verified
        except rankless.RanklessError as error:
            raise AssertionError("a pinned checkpoint cannot be read") from error
        assert {float(value) for tensor in model.values() for value in tensor} == {1.0}


def attempt(operation: str, results: dict[str, BaseException | None]) -> None:
    results[operation] = None
    try:
        load_pinned() if operation == "pin" else OPERATIONS[operation]()
    except BaseException as error:  # noqa: BLE001 - compared by the test
        results[operation] = error


@first_of(1, "more", [0, 3, 6])  # with the thirds, these are all moments
@first_of(
    1,
    ("first", "second", "third"),
    [(*order, third) for order in [("pin", "retention"), ("retention", "pin")] for third in range(3)],
)
def test_a_pin_and_a_removal_that_meet_anywhere_leave_a_whole_checkpoint_or_none(
    fake: FakeStore, first: str, second: str, third: int, more: int
) -> None:
    start = Start(fake)
    with mock.patch.object(evaluation, "_RETRY_SECONDS", 0.001):
        start.restore()
        attempt(first, {})
        for moment in choose_moments(every_moment(len(fake.requests)), third + more):
            start.restore()
            stop = fake.on_request = StopAt(*moment)
            results: dict[str, BaseException | None] = {}
            thread = threading.Thread(target=attempt, args=(first, results))
            thread.start()
            while not stop.reached.wait(0.1):
                assert thread.is_alive(), results
            attempt(second, results)
            stop.resume()
            thread.join()
            fake.on_request = do_nothing
            where = (moment, results)
            assert results["retention"] is None, where
            assert results["pin"] is None or isinstance(results["pin"], rankless.NoCheckpointError), where
            assert check_all()["s3"] == 3, where
            check_nothing_is_left(fake)
