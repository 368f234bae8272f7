"""Promises about what is at a path before a save: only what is provably an output of ours is replaced or removed."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import TagExistsError
from rankless.storage import atomic_rename
from rankless.storage.object_path import ObjectPath
from tests.promises.places import NEW_ONLY, Place
from tests.promises.promise import because, promise

_BY_ID = because("the id of the checkpoint is in all keys, so no other object is in its way", "store", "store and tier")
_NEW_ONLY = because(
    "only new paths are written",
    *NEW_ONLY,
)
_KEEPS = because(
    "other files in the folder stay, by another promise",
    "published weights",
    "published weights in a store",
    "component in a folder",
    "component in a store",
    "DCP in a store",
    "ColossalAI",
)
_ONE_FILE = because("the output is one file", "component in a file", "Lightning's format")
_REPLACES = because(
    "what was written before is replaced, as by the system whose place the writer takes",
    "published weights",
    "published weights in a store",
    "component in a folder",
    "component in a file",
    "component in a store",
    "Lightning",
    "Lightning's format",
    *("Trainer", "Accelerate", "NxD", "ColossalAI"),
)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return everything below a folder that somebody sees."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }


def put_notes(folder: Path) -> None:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/thesis.txt").write_text("years of work")


def put_another_program(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"name": "a web page"}')
    (folder / "index.html").write_text("<p>")


def put_run(folder: Path) -> None:
    rankless.RunDirectory(folder).save("inner", {"a": torch.zeros(3)})


def put_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a list")


def put_archive(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("measurements.npy", "years of work")


def put_link(path: Path) -> None:
    put_notes(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def describe(path: Path) -> tuple[bool, object]:
    return path.is_symlink(), path.read_bytes() if path.is_file() else snapshot(path)


@pytest.mark.parametrize("put", [put_notes, put_another_program, put_run, put_file, put_archive, put_link])
@promise(
    "what is no output of ours is neither replaced nor removed, whatever was asked for",
    exempt=_BY_ID | _NEW_ONLY | _KEEPS,
)
def test_a_strangers_path_is_refused(place: Place, put: Callable[[Path], None]) -> None:
    path = place.locate("new")
    place.save("first", 1.0)
    put(path)
    before = describe(path)
    for _ in range(2):
        with pytest.raises((TagExistsError, rankless.InvalidArgumentError), match=path.name):
            place.save("new", 2.0, overwrite=True)
    assert describe(path) == before
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    place.save("new", 3.0, overwrite=True)
    assert (place.load("first"), place.load("new")) == (1.0, 3.0)


@promise(
    "a file that somebody has put into an output is not removed with it",
    exempt=_NEW_ONLY | _ONE_FILE,
)
def test_a_file_in_an_output_is_not_lost(place: Place) -> None:
    place.save("one", 1.0)
    path = place.locate("one")
    if isinstance(path, ObjectPath):
        path.store.replace_small(path / "notes.txt", b"years of work")
    else:
        (path / "notes.txt").write_text("years of work")
    try:
        place.save("one", 2.0, overwrite=True)
    except TagExistsError as error:
        assert "notes.txt" in str(error)
        assert place.load("one") == 1.0
    else:
        assert place.load("one") == 2.0
    if isinstance(path, ObjectPath):  # the new checkpoint may have keys of its own
        assert path.store.read_small(path / "notes.txt") == b"years of work"
    else:
        assert (path / "notes.txt").read_text() == "years of work"


@promise(
    "what appears between the check and the rename is not lost",
    exempt=_BY_ID
    | _NEW_ONLY
    | because("other objects stay, and nothing is renamed", "component in a store", "DCP in a store")
    | because("folders of versions have random names", "published weights", "published weights in a store"),
    in_one_process=True,
)
def test_what_appears_at_the_last_moment_is_not_lost(place: Place, tmp_path: Path) -> None:
    place.save("one", 1.0)
    path = place.locate("one")
    aside = tmp_path / "aside"
    exchanged = []

    def exchange_late(function: Callable[..., None]) -> Callable[..., None]:
        def exchange(pending: Path, final: Path, displaced: Path) -> None:
            if final == path and not exchanged:
                exchanged.append(final)
                final.rename(aside)
                put_file(final) if aside.is_file() else put_notes(final)
            function(pending, final, displaced)

        return exchange

    with (
        mock.patch.object(atomic_rename, "exchange_directories", exchange_late(atomic_rename.exchange_directories)),
        mock.patch.object(atomic_rename, "exchange_files", exchange_late(atomic_rename.exchange_files)),
        suppress(TagExistsError),
    ):
        place.save("one", 2.0, overwrite=True)
    assert exchanged
    if aside.is_file():
        assert path.read_text() == "a list"
    else:
        assert (path / "deep/thesis.txt").read_text() == "years of work"


@promise("a name that is taken is refused, and what has it stays as it is", exempt=_REPLACES)
def test_a_name_that_is_taken_is_refused(place: Place) -> None:
    place.save("one", 1.0)
    for _ in range(2):
        with pytest.raises(TagExistsError, match="one"):
            place.save("one", 2.0)
    assert place.load("one") == 1.0
    place.save("two", 2.0)
    assert place.load("two") == 2.0


@promise("a name that is taken is replaced in one step, if that is asked for", exempt=_NEW_ONLY)
def test_a_name_is_replaced(place: Place) -> None:
    for value in (1.0, 2.0, 3.0):
        place.save("one", value, overwrite=True)
        assert place.load("one") == value
