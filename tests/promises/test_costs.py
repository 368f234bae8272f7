"""Promises about what a save costs: calls of the system, requests and space."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from campaigns.faults.faulty_file_system import FaultyFileSystem
from rankless.save import folder_output
from rankless.storage import file_memo
from tests.promises.places import NEW_ONLY, BoosterFolder, Component, Place, bucket_of
from tests.promises.promise import because, promise

_DCP = ("DCP in a folder", "DCP in a store")


def count_calls(place: Place, tag: str, root: Path) -> Counter[str]:
    """Save, and return the calls of this process about files below a folder, and the requests to the bucket."""
    bucket, files = bucket_of(place), FaultyFileSystem(root)
    known = len(bucket.requests) if bucket is not None else 0
    with files.install():
        place.save(tag, 1.0)
    return Counter(files.calls) + Counter(request.kind for request in (bucket.requests[known:] if bucket else []))


@promise(
    "the calls and requests of a save do not grow with the number of outputs, but by one look at each",
    exempt=because(
        "each save is of another job, which reads the list of checkpoints",
        "drain of an earlier job",
        "`rankless drain`",
    )
    | because("a conversion looks once at what is next to its output", *NEW_ONLY),
    in_one_process=True,
)
def test_costs_do_not_grow(place: Place, tmp_path: Path) -> None:
    counts = []
    with mock.patch.object(
        file_memo, "_UNSETTLED_NS", 0
    ):  # else young manifests are read again, on a slow machine less
        for number in range(2):
            for other in range(5):
                place.save(f"early_{number}_{other}", 1.0)
            counts.append(count_calls(place, f"counted_{number}", tmp_path))
    growth = counts[1] - counts[0]
    assert growth["stat"] <= 6  # one for each output that was added
    assert growth.total() - growth["stat"] <= 2


@promise(
    "bytes that have not changed since the save before are not written again",
    exempt=because("only new paths are written", *NEW_ONLY)
    | because("PyTorch's and Lightning's writers write everything", *_DCP, "Lightning's format")
    | because("a store copies only files of frozen parameters, and this state has none", "store", "store and tier")
    | because("to compare with an object is to read it back, which costs as much", "component in a store")
    | because("a version has no file of what has not changed", "published weights", "published weights in a store"),
    in_one_process=True,
)
def test_unchanged_bytes_are_shared(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of users are files of their own, which they may change in place: only one of the same name is kept."""
    monkeypatch.setattr(folder_output, "_MIN_SHARED", 0)  # a few bytes are written sooner than they are compared
    before, after = ("one", "one") if isinstance(place, Component | BoosterFolder) else ("one", "two")
    place.save(before, 1.0)
    files = list_weights(place.locate(before))
    assert files
    place.save(after, 1.0)
    assert list_weights(place.locate(after)) == files
    if before == after:
        place.save(after, 2.0)
        assert list_weights(place.locate(after)).isdisjoint(files)
        assert place.load(after) == 2.0


def list_weights(path: Path) -> set[int]:
    """Return the inodes of the files with weights."""
    files = [path] if path.is_file() else path.rglob("model*.safetensors")
    return {file.stat().st_ino for file in files}
