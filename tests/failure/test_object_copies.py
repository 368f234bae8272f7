"""Copies of runs in object stores that lack hidden names or pointers: no checkpoint is passed over or deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import typer

import rankless
from rankless.cli.ls import ls
from rankless.cli.prune import prune
from rankless.run import cleanup, pointers
from rankless.run.catalog import list_stale_directories
from tests.helpers.fake_http import FakeStore
from tests.helpers.fake_stores import FAKES, age
from tests.helpers.object_histories import (
    OLD,
    Crash,
    check_all,
    check_nothing_is_left,
    do_nothing,
    run_path,
    save,
    state,
    store_with_two_checkpoints,
)


@pytest.fixture(params=FAKES)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeStore]:
    with store_with_two_checkpoints(FAKES[request.param]()) as fake:
        yield fake


def lose(fake: FakeStore, part: str) -> None:
    """Let all objects be lost whose keys have a part."""
    fake.objects = {key: stored for key, stored in fake.objects.items() if part not in key}
    pointers._pointers.clear()


class TestACopyWithoutHiddenNames:
    """A glob of a shell, and ``--exclude '.*'``, skip names with a dot."""

    @pytest.fixture(autouse=True)
    def _copy(self, fake: FakeStore) -> None:
        lose(fake, "/.")

    def test_its_folders_are_its_checkpoints(self) -> None:
        assert rankless.has_checkpoint(run_path())
        infos = rankless.list_checkpoints(run_path())
        assert [(info.tag, info.status, info.step) for info in infos] == [("s1", "complete", 1), ("s2", "complete", 2)]
        assert check_all() == OLD
        assert rankless.open(run_path(), "s1").step == 1

    def test_a_training_resumes(self) -> None:
        checkpointer = rankless.Checkpointer(run_path(), model=torch.nn.Linear(1, 1), save_every=1)
        with pytest.raises(rankless.MismatchError):  # of another model: it was not passed over
            checkpointer.resume()
        checkpointer.close()

    def test_a_save_keeps_them_and_continues_their_numbers(self, fake: FakeStore) -> None:
        with pytest.warns(UserWarning, match=r"no pointers in \.tags"):
            save(3)
        assert [(info.tag, info.sequence) for info in rankless.list_checkpoints(run_path())] == [
            ("s1", 1),
            ("s2", 2),
            ("s3", 3),
        ]
        check_nothing_is_left(fake)
        assert check_all() == {**OLD, "s3": 3}

    def test_a_tag_is_taken(self) -> None:
        with pytest.raises(rankless.TagExistsError):
            save(2)
        save(2, value=3, overwrite=True)
        assert check_all() == {"s1": 1, "s2": 3}

    def test_a_clean_up_keeps_them(self, fake: FakeStore) -> None:
        age(fake)
        keys = fake.objects.keys()
        assert cleanup.clean_up(run_path(), with_whole=True) == []
        assert fake.objects.keys() == keys

    def test_old_ones_can_be_pruned(self, fake: FakeStore) -> None:
        expired = cleanup.expired_checkpoints(run_path(), None, rankless.KeepLast(1))
        assert [info.tag for info in cleanup.delete_checkpoints(expired)] == ["s1"]
        assert check_all() == {"s2": 2}
        assert not any("/s1." in key for key in fake.objects)

    def test_of_two_folders_of_a_tag_the_newer_one_counts(self, fake: FakeStore) -> None:
        old = dict(fake.objects)
        save(2, value=3, overwrite=True)
        fake.objects = {**old, **fake.objects}
        lose(fake, "/.")
        assert check_all() == {"s1": 1, "s2": 3}


def test_a_copy_of_one_folder_is_a_run_with_one_checkpoint(fake: FakeStore) -> None:
    lose(fake, "/.")
    lose(fake, "/s1.")
    assert check_all() == {"s2": 2}
    assert rankless.restore(run_path(), model={"net": state(0)}).step == 2


def test_a_first_save_that_dies_right_before_its_pointer_is_not_lost(fake: FakeStore) -> None:
    """Its folder is whole, so it is the checkpoint of the run that nothing else has been saved into."""

    def die_before_the_pointer(request: Any, stage: str) -> None:
        if stage == "before" and request.kind == "put" and "/.tags/" in request.key:
            raise Crash

    lose(fake, "run/")
    fake.on_request = die_before_the_pointer
    with pytest.raises(Crash):
        save(1)
    fake.on_request = do_nothing
    assert check_all() == {"s1": 1}


class TestAFolderWithoutAPointerInARunThatHasPointers:
    """It is a save that died right before the end, or was copied there."""

    @pytest.fixture(autouse=True)
    def _copy(self, fake: FakeStore) -> None:
        lose(fake, ".tags/s1/")
        age(fake)

    def test_it_is_no_checkpoint_of_the_run(self) -> None:
        assert check_all() == {"s2": 2}

    def test_the_commands_name_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        (folder,) = list_stale_directories(run_path())
        with pytest.raises(typer.Exit):
            ls(run_path())  # type: ignore[arg-type]
        assert f"{folder.name}: a whole checkpoint that no tag means" in capsys.readouterr().out.replace("\n", " ")
        prune(run_path(), remains=True)  # type: ignore[arg-type]
        assert f"kept {folder.name}: it is a whole checkpoint" in capsys.readouterr().out.replace("\n", " ")
        prune(run_path(), remains=True, force=True)  # type: ignore[arg-type]
        assert f"removed {folder.name}" in capsys.readouterr().out.replace("\n", " ")

    def test_only_force_removes_it(self, fake: FakeStore) -> None:
        keys = fake.objects.keys()
        assert cleanup.clean_up(run_path()) == []
        assert fake.objects.keys() == keys
        assert [path.name[:3] for path in cleanup.clean_up(run_path(), with_whole=True)] == ["s1."]
        assert check_all() == {"s2": 2}
        check_nothing_is_left(fake)

    def test_a_copy_to_a_name_without_the_id_is_a_checkpoint(self, fake: FakeStore) -> None:
        (folder,) = list_stale_directories(run_path())
        copied = {key.replace(folder.name, "best"): stored for key, stored in fake.objects.items()}
        fake.objects = {**fake.objects, **copied}
        assert check_all() == {"best": 1, "s2": 2}
