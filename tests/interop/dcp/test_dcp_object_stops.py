"""DCP saves that stop for hours at any request, while another process saves, dies or cleans up.

The metadata never names files that are missing: the save that was stopped fails, or its checkpoint is whole.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rankless.dcp import FileSystemReader, FileSystemWriter, save_output_objects
from rankless.engine.io import upload_files
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import BUCKET, FakeStore
from tests.helpers.fake_s3 import AWS, GOOGLE, RGW_20, FakeS3
from tests.helpers.object_histories import CutAt, Moment, Start, do_nothing, every_moment, fast_small_parts

pytestmark = pytest.mark.filterwarnings("ignore")

STORES: dict[str, Callable[[], FakeStore]] = {
    "aws": lambda: FakeS3(AWS),
    "rgw-20": lambda: FakeS3(RGW_20),
    "google": lambda: FakeS3(GOOGLE),
    "azure": FakeAzure,
}

#: For how many hours a save stops: when its files may be removed if their checksums are there, and in any case.
HOURS = (2.0, 50.0)


@pytest.fixture(params=STORES)
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeStore]:
    fake, folder = STORES[request.param](), tmp_path / "temporary"
    folder.mkdir()
    with (
        fake.connected(),
        fast_small_parts(),
        mock.patch.object(upload_files, "PART_BYTES", 4096),
        mock.patch("tempfile.gettempdir", return_value=str(folder)),
    ):
        save(fake, 1)
        yield fake


def place(fake: FakeStore) -> ObjectPath:
    return fake.store_at("http://fake", retry_seconds=1.0).path(f"{BUCKET}/run/c")


def save(fake: FakeStore, value: float, **options: object) -> None:
    state = {"weight": torch.full((1500,), value), "step": int(value)}
    dcp.save(state, storage_writer=FileSystemWriter(place(fake), **options), no_dist=True)  # type: ignore[arg-type]


def load(fake: FakeStore) -> float:
    loaded = {"weight": torch.zeros(1500), "step": -1}
    dcp.load(loaded, storage_reader=FileSystemReader(place(fake)), no_dist=True)
    assert isinstance(loaded["weight"], torch.Tensor)
    assert {*loaded["weight"].tolist()} == {float(str(loaded["step"]))}
    return float(str(loaded["step"]))


@contextmanager
def another_process() -> Iterator[None]:
    with mock.patch.object(save_output_objects, "_saved_here", set()):
        yield


@contextmanager
def hours_later(fake: FakeStore, hours: float) -> Iterator[None]:
    """Let the clocks of the store and of all processes go forward."""
    clock = mock.Mock(time=lambda: time.time() + hours * 3600)
    fake.clock = clock.time
    with mock.patch.object(save_output_objects, "time", clock):
        yield
    fake.clock = time.time


class StopAt:
    """The first save stops at a moment, and something else happens meanwhile."""

    def __init__(self, fake: FakeStore, moment: Moment, meanwhile: Callable[[], None]) -> None:
        self._fake, self._moment, self._meanwhile = fake, moment, meanwhile
        self._numbers = itertools.count()
        self.has_stopped = False

    def __call__(self, request: object, stage: str) -> None:
        number, stop_stage = self._moment
        if stage == stop_stage and next(self._numbers) == number and not self.has_stopped:
            self.has_stopped = True
            self._fake.on_request = do_nothing
            with another_process():
                self._meanwhile()
            self._fake.on_request = do_nothing


def check_stop(fake: FakeStore, moment: Moment, hours: float, meanwhile: Callable[[], None]) -> str:
    """Save 2 stops; then the last save must find a whole checkpoint, and leave nothing else. Return what happened."""
    clocks = hours_later(fake, hours)
    entered = []

    def others() -> None:
        entered.append(clocks.__enter__())
        meanwhile()

    stop = StopAt(fake, moment, others)
    fake.on_request = stop
    outcome = "failed"
    try:
        with suppress(CheckpointException):
            save(fake, 2)
            outcome = "saved"
        assert stop.has_stopped
        found = load(fake)
        assert found in {1.0, 2.0, 3.0}
        assert outcome == "failed" or found in {2.0, 3.0}
    finally:
        fake.on_request = do_nothing
        if entered:
            clocks.__exit__(None, None, None)
    with hours_later(fake, hours + 100):
        save(fake, 4)
        save(fake, 5)
        assert load(fake) == 5
    assert len(fake.objects) == 3
    assert not fake.uploads
    return f"{outcome}, {found:g}"


def count_requests(start: Start) -> int:
    fake = start.restore()
    save(fake, 2)
    return len(fake.requests)


@pytest.mark.parametrize("hours", HOURS)
def test_a_save_that_stops_while_another_one_saves(fake: FakeStore, hours: float) -> None:
    start = Start(fake)
    outcomes = set()
    for moment in every_moment(count_requests(start)):
        start.restore()
        outcomes.add(check_stop(fake, moment, hours, lambda: save(fake, 3)))
    assert {"failed, 3", "saved, 3"} <= outcomes


def test_a_save_that_stops_at_its_commit_while_another_one_dies(fake: FakeStore) -> None:
    """The other one may have removed files before it dies: for each number of hours at other moments."""
    start = Start(fake)
    for number, hours in enumerate(HOURS):
        start.restore()
        with hours_later(fake, hours):
            save(fake, 3)
        requests = len(fake.requests)
        for moment in every_moment(requests)[number :: len(HOURS)]:

            def die(cut: Moment = moment) -> None:
                fake.on_request = CutAt(*cut)
                with suppress(CheckpointException):
                    save(fake, 3)
                fake.on_request = do_nothing

            start.restore()
            check_stop(fake, find_commit(start), hours, die)


def find_commit(start: Start) -> Moment:
    """Return the moment right before the request that writes the metadata."""
    fake = start.restore()
    save(fake, 2)
    (number,) = (
        number
        for number, request in enumerate(fake.requests)
        if request.kind == "put" and request.key.endswith(".metadata")
    )
    start.restore()
    return number, "before"


def test_a_save_whose_place_was_taken_a_moment_ago_replaces_it(fake: FakeStore) -> None:
    """The last one stays."""
    start = Start(fake)
    assert check_stop(fake, find_commit(start), 0.0, lambda: save(fake, 3)) == "saved, 2"


def test_a_save_that_stops_for_days_after_its_commit_was_refused_fails(fake: FakeStore) -> None:
    """A third save has removed its files meanwhile."""
    start = Start(fake)
    commit, _ = find_commit(start)
    numbers = itertools.count()
    with ExitStack() as later:

        def stop_for_days(request: Any, stage: str) -> None:
            if stage == "before" and request.kind == "head" and request.key.endswith(".metadata"):
                fake.on_request = do_nothing
                later.enter_context(hours_later(fake, 50.0))
                with another_process():
                    save(fake, 4)

        def take_place(request: Any, stage: str) -> None:
            if stage == "before" and next(numbers) == commit:
                fake.on_request = do_nothing
                with another_process():
                    save(fake, 3)
                fake.on_request = stop_for_days

        start.restore()
        fake.on_request = take_place
        with pytest.raises(CheckpointException):
            save(fake, 2)
        assert load(fake) == 4
