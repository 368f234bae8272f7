"""Promises about what a save writes, and what is there if it does not get to its end."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import RanklessError, StorageError
from rankless.run import pending_dir
from rankless.save import drain_attempts
from rankless.storage import filesystem_kind, posix
from rankless.storage.http.client import ObjectClient, ObjectRequest, ObjectResponse
from rankless.storage.object_path import ObjectPath
from tests.promises.places import NEW_ONLY, Place, count_bytes, state_of, weights_of
from tests.promises.promise import because, promise

_FOREIGN = because(
    "the files have another format",
    "component in a file",
    "DCP in a folder",
    "DCP in a store",
    "Lightning's format",
    "ColossalAI",
)


def model_files(path: Path) -> dict[str, bytes]:
    """Return the files with tensors of an output, by their names alone."""
    if isinstance(path, ObjectPath):
        found = {info.path.name: path.store.read_small(info.path) for info in path.store.list_objects(path)}
    else:
        found = {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if name == "model.safetensors"}


@promise("the files of the model have the same bytes as in all other places", exempt=_FOREIGN)
def test_the_same_bytes(place: Place, tmp_path: Path) -> None:
    place.save("one", 7.0)
    rankless.save_model(state_of(7.0), tmp_path / "expected", shard=True)
    expected = model_files(tmp_path / "expected")
    assert expected
    assert model_files(place.locate("one")) == expected


@contextmanager
def storage_that_fails(number: int) -> Iterator[list[str]]:
    """Let the call with this number that would change something, and all later ones, fail for want of space."""
    calls: list[str] = []

    def fail(name: str) -> None:
        calls.append(name)
        if len(calls) > number:
            raise StorageError(errno.ENOSPC, "no space left on device")

    rename, write, send = posix.fsync_directory, posix.write_small, ObjectClient.send

    def fsync_directory(path: Path) -> None:
        fail("fsync")
        rename(path)

    def write_small(path: Path, data: bytes) -> None:
        fail("write")
        write(path, data)

    def send_request(self: ObjectClient, request: ObjectRequest) -> ObjectResponse:
        if request.method in {"PUT", "POST"}:
            fail("request")
        return send(self, request)

    with (
        mock.patch.object(posix, "fsync_directory", fsync_directory),
        mock.patch.object(posix, "write_small", write_small),
        mock.patch.object(ObjectClient, "send", send_request),
        mock.patch.object(drain_attempts, "_FIRST_SECONDS", 0.001),
    ):
        yield calls


@promise(
    "if storage fails at any moment, the old output or the new one is there, whole, and later saves go on",
    exempt=because("the failing process is another one: `rankless drain` runs the same code", "drain of an earlier job")
    | because("only new paths are written", *NEW_ONLY),
    in_one_process=True,
)
def test_failing_storage(place: Place) -> None:
    place.save("one", 1.0)
    for number in range(100):
        with storage_that_fails(number) as calls:
            try:
                place.save("one", 2.0, overwrite=True)
            except (RanklessError, OSError):
                assert place.load("one") in {1.0, 2.0}
        if len(calls) <= number:
            break
    place.save("one", 3.0, overwrite=True)
    assert place.load("one") == 3.0


@promise("an output that is spoilt is named when it is loaded, and never half loaded")
def test_spoilt_outputs_are_named(place: Place) -> None:
    place.save("one", 1.0)
    path = place.locate("one")
    if isinstance(path, ObjectPath):
        for info in path.store.list_objects(path):
            if info.path.suffix in {".safetensors", ".distcp"}:
                path.store.replace_small(info.path, path.store.read_small(info.path)[:-8])
    else:
        files = (
            [path]
            if path.is_file()
            else [file for file in path.rglob("*") if file.suffix in {".safetensors", ".distcp"}]
        )
        for file in files:
            file.chmod(0o644)
            file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(Exception, match=path.name):
        place.load("one")


_NO_FOLDER = because(
    "nothing is written into a folder of a file system",
    "store",
    "store and tier",
    "component in a store",
    "DCP in a store",
    "conversion into a store",
    "edit into a store",
    "published weights in a store",
)


@promise("a bucket that is mounted as a folder is named in a warning", exempt=_NO_FOLDER, in_one_process=True)
def test_mounted_buckets_are_named(place: Place) -> None:
    mount = filesystem_kind.BucketMount("gcsfuse", "gs")
    with (
        mock.patch.object(pending_dir, "find_bucket_mount", return_value=mount),
        pytest.warns(UserWarning, match="in a bucket that gcsfuse has mounted"),
    ):
        place.save("one", 1.0)


@promise(
    "an output that is replaced takes the space of one",
    exempt=because("only new paths are written", *NEW_ONLY)
    | because("older versions are kept: `keep` says for how long", "published weights", "published weights in a store"),
)
def test_replaced_outputs_are_removed(place: Place) -> None:
    place.save("one", 1.0, overwrite=True)
    once = count_bytes(place)
    for value in (2.0, 3.0, 4.0):
        place.save("one", value, overwrite=True)
    assert count_bytes(place) < 1.8 * once  # the journal grows by some lines


@promise("an inference engine gets the weights that were saved, bit for bit")
def test_an_engine_gets_the_weights_that_were_saved(place: Place) -> None:
    place.save("a", 1.0)
    place.save("b", 2.0)
    for tag, value in (("a", 1.0), ("b", 2.0)):
        with rankless.open_weights(place.locate(tag), process_group="self") as weights:
            loaded = [torch.zeros(stored.shape, dtype=stored.dtype).copy_(stored) for _, stored in weights]
            slices = [stored[...] for stored in weights.slices().values()]
        assert any(torch.equal(tensor, weights_of(value)) for tensor in loaded)
        assert all(map(torch.equal, loaded, slices))
