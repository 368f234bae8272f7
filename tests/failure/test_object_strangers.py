"""Objects of somebody else in a run in an object store: what rankless removes is provably its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from rankless.cli.prune import prune
from rankless.run.catalog import list_stale_directories
from rankless.run.ownership import SAVED_FOLDER
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_http import FakeStore
from tests.helpers.fake_stores import FAKES, age
from tests.helpers.interruptions import change_at_call
from tests.helpers.object_histories import (
    OLD,
    Crash,
    check_all,
    clean_up,
    do_nothing,
    run_path,
    save,
    store_with_two_checkpoints,
)

MINE = b"years of work"


@pytest.fixture(params=FAKES)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeStore]:
    with store_with_two_checkpoints(FAKES[request.param]()) as fake:
        yield fake


def folder_of(tag: str) -> ObjectPath:
    (name,) = (name for name in run_path().store.list_names(run_path()) if name.startswith(f"{tag}."))
    return run_path() / name


def put(path: ObjectPath) -> ObjectPath:
    path.store.replace_small(path, MINE)
    return path


def die_before_the_manifest(fake: FakeStore) -> None:
    """Let a save die when it has written all files but its manifest."""
    has_died = False

    def die(request: Any, stage: str) -> None:
        nonlocal has_died
        has_died |= request.kind == "put" and request.key.endswith("manifest.json")
        if has_died:
            raise Crash

    fake.on_request = die
    with pytest.raises(Crash):
        save(3)
    fake.on_request = do_nothing


def is_there(path: ObjectPath) -> bool:
    return path.store.is_file(path) and path.store.read_small(path) == MINE


@pytest.mark.parametrize("name", ["notes.txt", "model/net/results.json", "model/net/mine.safetensors"])
def test_retention_leaves_a_checkpoint_with_an_object_in_it(fake: FakeStore, name: str) -> None:
    mine = put(folder_of("s1") / name)
    with pytest.warns(UserWarning, match=f"s1.* is not removed, because .*{name} is no file of it"):
        save(3, keep=1)
    assert is_there(mine)
    assert check_all() == {"s1": 1, "s3": 3}
    mine.store.remove_file(mine)
    save(4, keep=1)
    assert check_all() == {"s4": 4}
    assert not any("/s1." in key for key in fake.objects)


def test_prune_says_which_object_keeps_a_checkpoint(fake: FakeStore, capsys: pytest.CaptureFixture[str]) -> None:
    mine = put(folder_of("s1") / "notes.txt")
    save(3)
    with mock.patch("rankless.cli.prune.parse_location", return_value=run_path()):
        prune("run", keep=1)
    assert "kept s1: notes.txt in it is no file of a checkpoint" in capsys.readouterr().out
    assert is_there(mine)
    assert check_all() == {"s1": 1, "s3": 3}


def test_an_object_in_a_replaced_checkpoint_stays_for_good(fake: FakeStore) -> None:
    mine = put(folder_of("s2") / "notes.txt")
    with pytest.warns(UserWarning, match="notes.txt stays"):
        save(2, value=3, overwrite=True)
    assert check_all() == {"s1": 1, "s2": 3}
    age(fake)
    clean_up()
    assert is_there(mine)
    assert [key for key in fake.objects if key.startswith(mine.parent.key)] == [mine.key]


@pytest.mark.parametrize("kept", ["", "notes.txt"])
def test_objects_that_another_job_removes_meanwhile_are_not_called_somebody_elses(fake: FakeStore, kept: str) -> None:
    """They were listed, and their manifest was removed before it was read."""
    folder = folder_of("s2")
    mine = put(folder / kept) if kept else None

    def remove_all() -> None:
        for info in folder.store.list_objects(folder):
            if info.path != mine:
                folder.store.remove_file(info.path)

    with change_at_call("rankless.run.ownership.is_native", remove_all):
        found = SAVED_FOLDER.sort_objects(folder)
    assert not found.owned
    assert found.foreign == ({kept} if kept else set())


def test_an_object_in_the_folder_of_a_dead_save_stays(fake: FakeStore) -> None:
    die_before_the_manifest(fake)
    mine = put(folder_of("s3") / "notes.txt")
    age(fake)
    clean_up()
    assert is_there(mine)
    assert [key for key in fake.objects if "/s3." in key] == [mine.key]
    assert check_all() == OLD


@pytest.mark.parametrize("names", [["data.bin"], ["manifest.json", "index.html"], ["results.json", "a.safetensors"]])
def test_a_folder_whose_name_looks_like_one_of_a_save_is_nobodys_leftover(fake: FakeStore, names: list[str]) -> None:
    mine = [put(run_path() / "page.0123456789abcdef" / name) for name in names]
    fake.objects = {key: replace(stored, time=stored.time - 1e6) for key, stored in fake.objects.items()}
    assert list_stale_directories(run_path()) == []
    clean_up()
    assert all(map(is_there, mine))
    assert check_all() == OLD
