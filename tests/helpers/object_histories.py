"""Histories of saves into an object store that are cut, or stopped and resumed, at any request."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import RanklessError
from rankless.run import claims, cleanup, object_journal, object_removal, pointers, records_folder, stored_history
from rankless.run.catalog import list_stale_directories
from rankless.save import copied_files
from rankless.storage.http import retries
from rankless.storage.object_path import ObjectPath, make_object_path
from tests.helpers.fake_http import BUCKET, FakeStore, LoseOnce
from tests.helpers.small_parts import small_parts

#: Small parts, so that small checkpoints have several.
PART = 4096


#: Seconds for which a request is repeated.
RETRY_SECONDS = 5.0

#: A moment of an operation: the number of a request, and ``"before"`` or ``"after"`` its effect.
Moment = tuple[int, str]

#: The fake that the histories of this process are made with.
_fakes: list[FakeStore] = []


class Crash(BaseException):
    """The process dies."""


def run_path() -> ObjectPath:
    """Return the path of the run, of another store in each thread: saves of one path in one process wait in turn."""
    is_main = threading.current_thread() is threading.main_thread()
    seconds = RETRY_SECONDS if is_main else RETRY_SECONDS + 1
    return make_object_path(_fakes[-1].store_at("http://fake", retry_seconds=seconds), f"{BUCKET}/run")


def state(step: int) -> dict[str, torch.Tensor]:
    return {"big": torch.full((900,), float(step)), "small": torch.tensor([float(step)])}


def save(step: int, tag: str | None = None, value: int | None = None, **options: object) -> None:
    """Save as a new process would, which continues the run."""
    directory = rankless.RunDirectory(run_path())
    with suppress(RanklessError):
        directory.load(model={"net": state(0)})
    value = step if value is None else value
    directory.save(tag or f"s{step}", {"net": state(value)}, step=value, **options)  # type: ignore[arg-type]


class Adapted(torch.nn.Module):
    """A model with a frozen parameter, whose file the store copies in a second save."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.big = torch.nn.Parameter(torch.full((900,), value), requires_grad=False)
        self.small = torch.nn.Parameter(torch.tensor([value]))


def save_twice() -> None:
    """Save twice as a new process would, which continues the run. The store copies a file in the second save."""
    directory, model = rankless.RunDirectory(run_path(), frozen="apart"), {"net": Adapted(0.0)}
    with suppress(RanklessError):
        directory.load(model={"net": state(0)})
    with torch.no_grad():
        for parameter in model["net"].parameters():
            parameter.fill_(3.0)
    for tag in ("s3", "s3b"):
        directory.save(tag, model, step=3)


def clean_up() -> None:
    """Remove leftovers as if a day had passed."""
    with mock.patch.object(object_removal, "ABANDONED_SECONDS", -1.0):
        cleanup.clean_up(run_path(), with_whole=True)


def load_all() -> None:
    """Load all checkpoints of the list."""
    check_all()


OPERATIONS: dict[str, Callable[[], object]] = {
    "save": lambda: save(3),
    "overwrite": lambda: save(2, value=3, overwrite=True),
    "retention": lambda: save(3, keep=1),
    "copies": save_twice,
    "clean-up": clean_up,
    "load": load_all,
}

#: The checkpoints that are there before each operation.
OLD = {"s1": 1, "s2": 2}

#: The checkpoints that are there before each save, or after it, or when it has not yet removed what is not kept.
OUTCOMES: Mapping[str, list[dict[str, int]]] = {
    "save": [OLD, {**OLD, "s3": 3}],
    "overwrite": [OLD, {"s1": 1, "s2": 3}],
    "retention": [OLD, {**OLD, "s3": 3}, {"s2": 2, "s3": 3}, {"s3": 3}],
    "copies": [OLD, {**OLD, "s3": 3}, {**OLD, "s3": 3, "s3b": 3}],
}

#: The saves that create the same tag.
_NEW_TAGS = frozenset({"save", "retention"})


@contextmanager
def store_with_two_checkpoints(fake: FakeStore) -> Iterator[FakeStore]:
    _fakes.append(fake)
    claims._numberings.clear()  # another test of this process had the same path
    with fast_small_parts(), fake.connected():
        save(1)
        save(2)
        yield fake


@contextmanager
def fast_small_parts() -> Iterator[None]:
    with (
        small_parts(PART),
        mock.patch.object(copied_files, "MIN_COPY_BYTES", 0),
        mock.patch("rankless.storage.azure.azure_store._COPY_POLL_SECONDS", 0.0),
        mock.patch.object(retries, "_FIRST_WAIT", 1e-4),
        mock.patch("tests.helpers.fake_s3.MIN_PART", 1),
    ):
        yield


class Start:
    """The state of a fake at which histories begin."""

    def __init__(self, fake: FakeStore) -> None:
        self._fake, self._objects, self._uploads = fake, copy.copy(fake.objects), copy.deepcopy(fake.uploads)

    def restore(self) -> FakeStore:
        self._fake.objects, self._fake.uploads = copy.copy(self._objects), copy.deepcopy(self._uploads)
        self._fake.requests.clear()
        pointers._pointers.clear()  # each operation is that of a new process, and reads them again
        stored_history._entries.clear()
        self._fake.on_request = do_nothing
        return self._fake

    def count_requests(self, operation: str) -> int:
        fake = self.restore()
        OPERATIONS[operation]()
        return len(fake.requests)


def do_nothing(request: object, stage: str) -> None:
    pass


@contextmanager
def brief_retries() -> Iterator[None]:
    """Let stores give up soon: for answers that stay wrong."""
    with mock.patch(f"{__name__}.RETRY_SECONDS", 0.1):
        yield


def choose_moments(moments: Sequence[Moment], first: int) -> Sequence[Moment]:
    """Return each ninth moment, from the one with this number on."""
    return moments[first::9]


def every_moment(requests: int) -> list[Moment]:
    """Return the moments between two requests: after the effect of one is before the effect of the next one."""
    return [(0, "before"), *((number, "after") for number in range(requests))]


def every_reply(requests: int) -> list[Moment]:
    """Return the moments at which a connection can break: before and after the effect of each request."""
    return list(itertools.product(range(requests), ("before", "after")))


@dataclass
class CutAt:
    """The client dies at request ``number``, before its effect or after it. No request of it comes later."""

    number: int
    stage: str
    count: int = 0
    is_dead: bool = False

    def __call__(self, request: object, stage: str) -> None:
        if stage == "before":
            self.count += 1
        if self.is_dead or (self.count > self.number and stage == self.stage):
            self.is_dead = True
            raise Crash


class StopAt:
    """The thread that makes request ``number`` stops there until :meth:`resume`."""

    def __init__(self, number: int, stage: str) -> None:
        self.number, self.stage, self.count = number, stage, 0
        self.reached, self._resumed = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def __call__(self, request: object, stage: str) -> None:
        with self.lock:
            self.count += stage == "before"
            stops = not self.reached.is_set() and self.count > self.number and stage == self.stage
        if stops:
            self.reached.set()
            self._resumed.wait(60)

    def resume(self) -> None:
        self._resumed.set()


def check_crash(start: Start, operation: str, moment: Moment) -> None:
    """Let an operation die at a moment. It leaves the old or the new checkpoint, and the next save goes on."""
    fake = start.restore()
    fake.on_request = CutAt(*moment)
    with pytest.raises(Crash):
        OPERATIONS[operation]()
    fake.on_request = do_nothing
    found = check_all()
    assert found in OUTCOMES.get(operation, [OLD]), moment
    save(4)
    assert rankless.open(run_path()).step == 4
    check_nothing_is_left(fake)
    assert check_all() == {**found, "s4": 4}, moment


def check_lost_reply(start: Start, operation: str, moment: Moment) -> None:
    """Break the connection once. This changes nothing."""
    fake = start.restore()
    fake.on_request = LoseOnce(*moment)
    OPERATIONS[operation]()
    assert check_all() == OUTCOMES.get(operation, [OLD])[-1], moment
    check_nothing_is_left(fake)


def check_stop(start: Start, first: str, second: str, moment: Moment, *, is_racy: bool = False) -> None:
    """Stop an operation while another one goes on, and wake it. Both keep their promises, and report the truth.

    ``is_racy``: the store decides the condition of a write before the write. So both saves of a new tag may succeed.
    """
    fake = start.restore()
    stop = fake.on_request = StopAt(*moment)
    results: dict[str, BaseException | None] = {}
    thread = threading.Thread(target=_attempt, args=(first, "first", results))
    thread.start()
    _wait_until_stopped(stop, thread, results)
    _attempt(second, "second", results)
    stop.resume()
    thread.join()
    fake.on_request = do_nothing
    found = check_all()
    where = (moment, results, found)
    check_nothing_is_left(fake)
    assert check_all() == found, where
    for result in results.values():
        assert result is None or isinstance(result, RanklessError), where
    if first in OUTCOMES:
        _check_saves(first, second, results, found, is_racy=is_racy)
    else:  # what only reads or cleans up disturbs no save
        assert results["second"] is None, where
        assert found == OUTCOMES.get(second, [OLD])[-1], where


def _check_saves(
    first: str, second: str, results: Mapping[str, BaseException | None], found: Mapping[str, int], *, is_racy: bool
) -> None:
    where = (results, found)
    if results["first"] is None and second in {"clean-up", "load"}:
        assert found in OUTCOMES[first][1:], where
    elif "retention" not in {first, second}:
        assert found.keys() >= OLD.keys(), where
    if results["first"] is None or (results["second"] is None and second in OUTCOMES):
        assert 3 in found.values(), where
    if {first, second} <= _NEW_TAGS and not is_racy:
        # Both succeed if the older job's was there first: it is abandoned then, and makes room, or is not kept.
        saved = [*results.values()].count(None)
        has_made_room = any("@" in tag for tag in found) or "retention" in {first, second}
        assert saved == 1 or (saved == len(results) and has_made_room), where


def _wait_until_stopped(stop: StopAt, thread: threading.Thread, results: dict[str, BaseException | None]) -> None:
    while not stop.reached.wait(0.1):
        assert thread.is_alive(), results


def _attempt(operation: str, name: str, results: dict[str, BaseException | None]) -> None:
    try:
        OPERATIONS[operation]()
    except BaseException as error:  # noqa: BLE001 - compared by the check
        results[name] = error
    else:
        results[name] = None


def check_all() -> dict[str, int]:
    """Load each checkpoint of the list, verified. Return the value of each tag: a mixture fails."""
    found = {}
    for info in rankless.list_checkpoints(run_path()):
        model = state(0)
        try:
            restored = rankless.restore(run_path(), info.tag, model={"net": model})
        except rankless.NoCheckpointError:
            continue  # removed since it was listed
        assert restored.verified
        values = {value for tensor in model.values() for value in tensor.tolist()}
        assert len(values) == 1, f"{info.tag} is a mixture: {values}"
        assert restored.step == values.pop()
        found[info.tag] = int(restored.step or 0)
    return found


def check_nothing_is_left(fake: FakeStore) -> None:
    """After a clean-up there is nothing but whole checkpoints, one pointer to each, the journal and the history."""
    clean_up()
    assert not fake.uploads
    assert not list_stale_directories(run_path())
    infos = rankless.list_checkpoints(run_path())
    folders = {info.path.name for info in infos}
    expected = {
        key for key in fake.objects if key.split("/")[1] in {*folders, object_journal.FOLDER, records_folder.FOLDER}
    }
    pointers = fake.objects.keys() - expected
    assert sorted(key.split("/")[2] for key in pointers) == sorted(info.tag for info in infos), pointers
