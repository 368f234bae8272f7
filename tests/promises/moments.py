"""The moments of a save: each call that changes something on a disk or in a bucket."""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from hypothesis import settings

from rankless.storage import atomic_rename
from rankless.storage.http.client import ObjectClient, ObjectRequest
from tests.helpers.examples import ALL
from tests.promises.places import FORK, ON_RANKS, Place, Run, in_new_job

#: The system calls that change the names and the durability of files.
_CALLS = ("fsync", "link", "mkdir", "rename", "rmdir", "unlink")

#: The requests that change a bucket.
_METHODS = frozenset({"PUT", "POST", "DELETE"})


@contextmanager
def at_each_change(call: Callable[[], None]) -> Iterator[None]:
    """Call a function before each change that this process makes, but not before its own changes."""
    is_inside = False

    def before(change: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal is_inside
        if not is_inside:
            is_inside = True
            try:
                call()
            finally:
                is_inside = False
        return change(*arguments, **options)

    def send(client: ObjectClient, request: ObjectRequest) -> Any:
        return before(original, client, request) if request.method in _METHODS else original(client, request)

    def wrap(change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: before(change, *arguments, **options)

    tempfile.gettempdir()  # the first call tries folders, which are no changes of a save
    original = ObjectClient.send
    with ExitStack() as patches:
        for name in _CALLS:
            patches.enter_context(mock.patch.object(os, name, wrap(getattr(os, name))))
        patches.enter_context(mock.patch.object(atomic_rename, "_renameat2", wrap(atomic_rename._renameat2)))
        patches.enter_context(mock.patch.object(ObjectClient, "send", send))
        yield


@contextmanager
def at_change(number: int, call: Callable[[], None]) -> Iterator[None]:
    """Call a function once, before the change with this number."""
    left = number + 1

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            call()

    with at_each_change(count):
        yield


def count_changes(action: Callable[[], None]) -> int:
    """Return the number of changes that an action makes."""
    changes = []
    with at_each_change(lambda: changes.append(None)):
        action()
    return len(changes)


def draw_moments(count: int, few: int, place: Place) -> list[int]:
    """Return numbers of changes: by day a few, in ``make test-all`` all of them, or of four ranks a third."""
    many = math.ceil(count / 3) if isinstance(place, Run) and place.way == ON_RANKS else count
    chosen = many if settings.get_current_profile_name() == ALL else min(count, few)
    return sorted(random.Random(type(place).__name__).sample(range(count), chosen))


def save_until(place: Place, tag: str, value: float, number: int) -> None:
    """Save in a process that is killed before a change."""

    def save() -> None:
        with at_change(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save_in_job(in_new_job(place), tag, value)

    process = FORK.Process(target=save)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def save_in_job(place: Place, tag: str, value: float) -> None:
    """Save over whatever has the name. Of a drain it is the job before it that this process is."""
    getattr(place, "save_into_tier", place.save)(tag, value, overwrite=True)
