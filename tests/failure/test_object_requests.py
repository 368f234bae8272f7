"""The requests of a job to a bucket. Each takes 10 to 100 ms, and some stores charge for it.

If a test fails and the requests are intended, raise the bound in the same commit and say why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import rankless
from rankless.storage.object_path import make_object_path
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import AWS, FakeS3

Count = Callable[[Callable[[], object]], Counter[str]]

#: A look at a run: its names, the pointers, and the history.
LOOK = Counter(list=3)

#: The object of a claim, and its read-back.
CLAIM = Counter(put=1, get=1)


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    fake = FakeS3(AWS)
    with fake.connected():
        yield fake


@pytest.fixture
def count(fake: FakeS3) -> Count:
    """Return the kinds of requests of a call."""

    def count_requests(call: Callable[[], object]) -> Counter[str]:
        known = len(fake.requests)
        call()
        return Counter(request.kind for request in fake.requests[known:])

    return count_requests


@pytest.fixture
def run(fake: FakeS3) -> rankless.RunDirectory:
    """A run with two checkpoints, of a job that goes on."""
    path = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/run")
    directory = rankless.RunDirectory(path)
    for step in (1, 2):
        directory.save(f"step_{step}", {"w": torch.ones(2)}, step=step)
    return directory


def restore(run: rankless.RunDirectory, *, resume: bool) -> None:
    """Restore in a job of its own."""
    rankless.RunDirectory(run.path).restore(None, {"w": torch.zeros(2)}, resume=resume)


def test_a_list_is_one_look(run: rankless.RunDirectory, count: Count) -> None:
    rankless.list_checkpoints(run.path)
    assert count(lambda: rankless.list_checkpoints(run.path)) == LOOK


def test_a_restore_reads_small_files_once(run: rankless.RunDirectory, count: Count) -> None:
    """Of the model and of the values of ranks, which are tensors, too, it reads the headers and then the data."""
    restore(run, resume=False)
    outdated_parts, manifest, values, tensors = Counter(list=1), Counter(get=1), Counter(get=2), Counter(get=4)
    assert count(lambda: restore(run, resume=False)) == outdated_parts + LOOK + manifest + values + tensors


def test_an_open_reads_the_pointers_of_the_tag_the_manifest_and_the_headers(
    run: rankless.RunDirectory, count: Count
) -> None:
    manifest, headers = Counter(get=1), Counter(get=2)
    assert count(lambda: rankless.open(run.path, "step_1")) <= Counter(list=1, get=1) + manifest + headers
    own_name = Counter(head=1, list=1)  # the path itself may be a checkpoint, or its tag
    assert count(lambda: rankless.open(run.path)) <= own_name + LOOK + Counter(get=2) + manifest + headers


def test_a_claim_of_a_job_that_resumes_is_one_look_and_one_object(run: rankless.RunDirectory, count: Count) -> None:
    """The look of the load would miss what the job before has saved since."""
    restore(run, resume=False)
    reading = count(lambda: restore(run, resume=False))
    assert count(lambda: restore(run, resume=True)) - reading == LOOK + CLAIM


def test_a_first_save_claims_without_a_further_look(run: rankless.RunDirectory, count: Count) -> None:
    """It also tries once whether the store refuses to create an object that exists."""

    def save(directory: rankless.RunDirectory, tag: str) -> Counter[str]:
        rankless.list_checkpoints(run.path)
        return count(lambda: directory.save(tag, {"w": torch.ones(2)}))

    later = save(run, "step_3")
    assert later.total() <= 19
    assert save(rankless.RunDirectory(run.path), "another") - later == CLAIM + Counter(put=1)


def test_a_claim_replaces_no_corrupt_entry_in_a_store_that_ignores_conditions() -> None:
    """It may be intact: a proxy may have answered for the server."""
    fake = FakeS3(replace(AWS, honours_conditions=False))
    with fake.connected():
        path = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/run")
        rankless.RunDirectory(path).save("step_1", {"w": torch.ones(2)}, step=1)
        entry = path / ".history" / "00000002.json"
        path.store.create_object(entry, b"corrupt")
        with pytest.warns(UserWarning, match="is corrupt"):
            restore(rankless.RunDirectory(path), resume=True)
        rankless.RunDirectory(path).save("other", {"w": torch.ones(2)})
        assert path.store.read_small(entry) == b"corrupt"
        assert path.store.is_file(path / ".history" / "00000004.json")
