"""Promises about storage that answers wrongly, late or not at all."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress

import pytest
import torch

import rankless
from rankless.errors import RanklessError, StorageError
from tests.helpers.fake_http import LoseOnce
from tests.helpers.fake_s3 import R2, RGW_16, SWIFT, FakeS3, Profile, failure
from tests.promises.jobs import NO_RUN, latest_step
from tests.promises.moments import at_each_change, draw_moments
from tests.promises.places import OPTIONS, PLACES, Conversion, Place, Run, bucket_of, state_of, tier_of, weights_of
from tests.promises.promise import because, promise

_NO_STORE = because("there is no object store", *(name for name in PLACES if "store" not in name))


def bucket(place: Place) -> FakeS3:
    served = bucket_of(place)
    assert served is not None
    return served


@pytest.mark.parametrize("stage", ["before", "after"])
@promise("a reply that is lost, before or after the effect of the request, changes nothing", exempt=_NO_STORE)
def test_lost_replies(place: Place, stage: str) -> None:
    place.save("one", 1.0)
    for number in draw_moments(count_requests(place), 2, place):
        bucket(place).on_request = LoseOnce(number, stage)
        place.save(f"tag_{number}", 2.0)
        assert place.load(f"tag_{number}") == 2.0
    bucket(place).on_request = lambda *_: None
    # If the reply to the creation of an upload is lost, its id is not known, and at a name that others may use, too, it
    # cannot be told from theirs. It has no bytes, and a later save there aborts it when it is a day old.
    left = bucket(place).uploads.values()
    assert not any(upload.parts for upload in left)
    assert isinstance(place, Conversion) or not left


def count_requests(place: Place) -> int:
    """Return the number of requests of a save."""
    known = len(bucket(place).requests)
    place.save("counted", 1.0)
    return len(bucket(place).requests) - known


@promise("a server that is overloaded for a moment, at any request, changes nothing", exempt=_NO_STORE)
def test_overloaded_servers(place: Place) -> None:
    place.save("one", 1.0)
    for number in draw_moments(count_requests(place), 2, place):
        left = [number]

        def refuse(_: object, stage: str, left: list[int] = left) -> object:
            left[0] -= stage == "before"
            return failure(503, "SlowDown") if left[0] == -1 and stage == "before" else None

        bucket(place).on_request = refuse
        place.save(f"tag_{number}", 2.0)
        assert place.load(f"tag_{number}") == 2.0


@promise("a list that does not have the newest objects yet hides no output and ends no save", exempt=_NO_STORE)
def test_lists_that_lag(place: Place) -> None:
    place.save("one", 1.0)
    bucket(place).list_lag = 3600.0
    place.save("two", 2.0)
    place.save("three", 3.0)
    bucket(place).list_lag = 0.0
    assert [place.load(tag) for tag in ("one", "two", "three")] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("profile", [RGW_16, SWIFT, R2], ids=["rgw-16", "swift", "r2"])
@promise("stores that ignore conditions or checksums are written and replaced all the same", exempt=_NO_STORE)
def test_lesser_stores(place: Place, profile: Profile) -> None:
    bucket(place).profile = profile
    place.save("one", 1.0)
    if not isinstance(place, Conversion):
        place.save("one", 2.0, overwrite=True)
        assert place.load("one") == 2.0
    place.save("two", 3.0)
    assert place.load("two") == 3.0


def refuse_to_write() -> None:
    raise StorageError(errno.EROFS, "read-only file system")


@promise("storage that cannot be written fails a save with that reason, and loads go on", in_one_process=True)
def test_read_only_storage(place: Place) -> None:
    place.save("one", 1.0)
    with at_each_change(refuse_to_write):
        with pytest.raises(StorageError, match="read-only"):
            getattr(place, "save_into_tier", place.save)("two", 2.0)
        assert place.load("one") == 1.0
    place.save("two", 3.0)
    assert place.load("two") == 3.0


def checkpointer(place: Place, model: dict[str, torch.Tensor], save_every: int) -> rankless.Checkpointer:
    assert isinstance(place, Run)
    options = OPTIONS[place.way]
    return rankless.Checkpointer(place.path, model=model, save_every=save_every, local=tier_of(place.local), **options)


_OF_A_TRAINING = NO_RUN | because("a drain follows a training", "drain of an earlier job", "`rankless drain`")


@promise("the last step is saved, although earlier saves have failed", exempt=_OF_A_TRAINING, in_one_process=True)
def test_the_last_step_is_saved(place: Place) -> None:
    model = state_of(0.0)
    with suppress(RanklessError), checkpointer(place, model, 1) as training, at_each_change(refuse_to_write):
        for step in (1, 2):
            model["w"].copy_(weights_of(step))
            with suppress(RanklessError):
                training.step(step)
        with suppress(RanklessError):
            training.finalize()
    assert latest_step(place) == 2


@promise("after SIGTERM a training saves its last step and stops", exempt=_OF_A_TRAINING, in_one_process=True)
def test_sigterm(place: Place) -> None:
    model = state_of(0.0)
    with checkpointer(place, model, 100) as training:
        for step in range(1, 100):
            model["w"].copy_(weights_of(step))
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if training.step(step):
                break
    assert latest_step(place) == step == 3
