"""``python -m campaigns.object_histories``: saves into stores in memory that are cut or stopped at every request.

It proves "Object stores" of ``docs/failure-model.md``. A history is one operation of a process, which dies at one
request, or loses the answer to one, or stops at one while another process does a second operation. The campaign makes
all of them: every kind of store, every operation, every request, before and after its effect. At the start a run has
two checkpoints and what two dead saves have left. Then it does so with drains of a local tier.
``tests/failure/test_object_histories.py`` and ``test_object_tier_histories.py`` are the short forms.

It prints the number of histories, and exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rankless.storage.http.connection import HttpResponse
from tests.helpers import object_histories, object_tier_histories
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import FakeStore
from tests.helpers.fake_s3 import PROFILES, SWIFT, FakeS3
from tests.helpers.object_histories import OLD, OPERATIONS, Crash, Moment, Start

#: The name of the store that decides conditions before it writes.
_RACY = "swift, racy"


class RacyS3(FakeS3):
    """A store that decides the condition of a write when the request arrives, and writes later, as Swift does."""

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        """Answer a request."""
        key = target.partition("?")[0].removeprefix("/").partition("/")[2]
        if method == "PUT" and key not in self.objects:
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        return super().handle(method, target, headers, body)


class CutBefore:
    """The client dies before the first request of a kind for an object in a folder."""

    def __init__(self, kind: str, folder: str) -> None:
        self._kind, self._folder, self._is_dead = kind, folder, False

    def __call__(self, request: Any, stage: str) -> None:  # noqa: ARG002 - see OnRequest
        """Raise ``Crash`` from that request on."""
        self._is_dead |= request.kind == self._kind and self._folder in request.key
        if self._is_dead:
            raise Crash


#: The kinds of stores, by name.
STORES: Mapping[str, Callable[[], FakeStore]] = {
    **{name: partial(FakeS3, profile) for name, profile in PROFILES.items()},
    _RACY: partial(RacyS3, SWIFT),
    "azure": FakeAzure,
}


@dataclass(frozen=True)
class History:
    """One history: its kind and its operations in words, and the function that makes and checks it."""

    kind: str
    name: str
    check: Callable[[], None]


def main() -> int:
    """Make all histories of the chosen stores, and print a line for each store."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.object_histories", description=__doc__)
    parser.add_argument("stores", nargs="*", help=f"some of {', '.join(map(repr, STORES))} (default: all)")
    options = parser.parse_args()
    if unknown := set(options.stores) - STORES.keys():
        parser.error(f"there is no store {', '.join(sorted(unknown))}")
    logging.getLogger("rankless").addHandler(logging.NullHandler())  # saves that fail are checked, not shown
    warnings.simplefilter("ignore")
    gc.freeze()  # the end of each job collects garbage, which no imported module is
    histories = violations = 0
    for name in options.stores or STORES:
        started, counts, violated = time.monotonic(), Counter[str](), 0
        for history in itertools.chain(generate_histories(name), generate_drains(name)):
            counts[history.kind] += 1
            violated += _is_violated(name, history)
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        print(f"{name}: {summary}; {violated} violations; {time.monotonic() - started:.0f} s", flush=True)
        histories, violations = histories + counts.total(), violations + violated
    print(f"{histories} histories, {violations} violations")
    return 1 if violations else 0


def generate_histories(name: str) -> Iterator[History]:
    """Yield all histories of one kind of store. Each begins with the same state."""
    with object_histories.store_with_two_checkpoints(STORES[name]()) as fake:
        start = _leave_dead_saves(Start(fake))
        for first in OPERATIONS:
            requests = start.count_requests(first)
            for moment in object_histories.every_moment(requests):
                check = partial(object_histories.check_crash, start, first, moment)
                yield History("crashes", f"{first} that dies at {moment}", check)
            for moment in object_histories.every_reply(requests):
                check = partial(object_histories.check_lost_reply, start, first, moment)
                yield History("lost replies", f"{first} that loses the connection at {moment}", check)
            for second in _list_seconds(first):
                for moment in _list_stops(name, requests):
                    check = partial(object_histories.check_stop, start, first, second, moment, is_racy=name == _RACY)
                    yield History("stops", f"{first} that stops at {moment} during {second}", check)


def generate_drains(name: str) -> Iterator[History]:
    """Yield all histories of a job with a local tier, which has a checkpoint that the store lacks."""
    tier = object_tier_histories
    with (
        object_histories.store_with_two_checkpoints(STORES[name]()) as fake,
        tempfile.TemporaryDirectory() as folder,
    ):
        start, base = Start(fake), Path(folder)
        for operation in tier.OPERATIONS:
            for moment in tier.list_crashes(start, base, operation):
                check = partial(tier.check_crash, start, base, operation, moment)
                yield History("crashes with a tier", f"{operation} with a tier that dies at {moment}", check)
        for operation in ("save", "load"):
            for moment in tier.list_stops(start, base, operation):
                check = partial(tier.check_stop, start, base, operation, moment)
                yield History("stops with a tier", f"{operation} with a tier that stops at {moment}", check)


def _list_seconds(first: str) -> list[str]:
    """Return the operations that go on while the first is stopped.

    Two clean-ups in one process would share the day that they pretend to be over.
    """
    return [second for second in OPERATIONS if (first, second) != ("clean-up", "clean-up")]


def _list_stops(name: str, requests: int) -> list[Moment]:
    """Return the moments to stop at. In a racy store, a write that has arrived differs from one that has not."""
    return (object_histories.every_reply if name == _RACY else object_histories.every_moment)(requests)


def _leave_dead_saves(start: Start) -> Start:
    """Let two saves die. Return the state that they leave: uploads in progress, and a folder without a pointer."""
    fake = start.restore()
    for step, kind, folder in ((8, "complete", ""), (9, "put", ".tags")):
        fake.on_request = CutBefore(kind, folder)
        with suppress(Crash):
            object_histories.save(step)
        fake.on_request = object_histories.do_nothing
    folders = {key.split("/")[1] for key in fake.objects} - {".tags", ".journal"}
    if not fake.uploads or len(folders) <= len(OLD) or object_histories.check_all() != OLD:
        raise AssertionError(f"the dead saves have left {sorted(folders)} and {len(fake.uploads)} uploads")
    return Start(fake)


def _is_violated(name: str, history: History) -> bool:
    try:
        history.check()
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
        print(f"VIOLATION {name}, {history.name}: {type(error).__name__}: {error}", flush=True)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
