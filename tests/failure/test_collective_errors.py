"""Tests that a failure on any rank is the same error on all ranks, none hangs, and old checkpoints are unchanged."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    MismatchError,
    NoCheckpointError,
    RankFailedError,
    RanklessError,
    RankMismatchError,
    RankTimeoutError,
    StateError,
    StorageError,
    TagExistsError,
    UnsupportedValueError,
)
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names

MODEL = {"w": torch.arange(10.0)}


def rank() -> int:
    return dist.get_rank()


def other_path(path: str) -> None:
    rankless.save_checkpoint(f"{path}/{rank()}", "s", MODEL)


def other_tag(path: str) -> None:
    rankless.save_checkpoint(path, f"step_{rank()}", MODEL)


def no_model(path: str) -> None:
    rankless.save_checkpoint(path, "s", MODEL if rank() == 0 else None)


def other_shard_size(path: str) -> None:
    rankless.save_checkpoint(path, "s", MODEL, max_shard_size=1000 + rank())


def save_or_load(path: str) -> None:
    if rank() == 0:
        rankless.save_checkpoint(path, "s", MODEL)
    else:
        rankless.load_checkpoint(path, "s", MODEL)


def load_other_tag(path: str) -> None:
    rankless.load_checkpoint(path, f"step_{rank()}", MODEL)


def async_on_one(path: str) -> None:
    rankless.save_model(MODEL, f"{path}/model.safetensors", async_save=rank() == 1)


def bad_tag_on_one(path: str) -> None:
    rankless.save_checkpoint(path, "a/b" if rank() == 1 else "s", MODEL)


def unstorable_on_one(path: str) -> None:
    rankless.save_checkpoint(path, "s", MODEL, per_rank_content={"x": [1, object()] if rank() == 1 else [1]})


def broken_scheduler_on_one(path: str) -> None:
    class Scheduler:
        def state_dict(self) -> dict[str, Any]:
            if rank() == 1:
                raise KeyError("lost")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    rankless.save_checkpoint(path, "s", MODEL, scheduler=Scheduler())


DISAGREEMENTS = [
    (other_path, RankMismatchError, ("the path", "/0'", "/1'")),
    (other_tag, RankMismatchError, ("the tag", "'step_0'", "'step_1'")),
    (no_model, RankMismatchError, ("what is saved", "model", "nothing")),
    (other_shard_size, RankMismatchError, ("max_shard_size", "1000", "1001")),
    (save_or_load, RankMismatchError, ("the call", "save", "load")),
    (load_other_tag, RankMismatchError, ("the tag", "'step_0'", "'step_1'")),
    (async_on_one, RankMismatchError, ("async_save", "False", "True")),
    (bad_tag_on_one, InvalidArgumentError, ("rank 1 of 2", "'a/b'")),
    (unstorable_on_one, UnsupportedValueError, ("rank 1 of 2", "content.x[1]: builtins.object")),
    (broken_scheduler_on_one, StateError, ("rank 1 of 2", "Scheduler", "KeyError", "lost")),
]


@pytest.mark.parametrize(("call", "kind", "words"), DISAGREEMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_all_ranks_raise_the_same_error_naming_both_sides(
    ranks: Ranks, tmp_path: Path, call: Any, kind: type[RanklessError], words: tuple[str, ...]
) -> None:
    errors = ranks.outcomes(2, call, str(tmp_path))
    assert {type(error) for error in errors} == {kind}
    assert len({str(error) for error in errors}) == 1
    assert all(word in str(errors[0]) for word in words), errors[0]
    assert not list_names(tmp_path)


def absent_rank(path: str) -> float:
    started = time.monotonic()
    if rank() != 2:
        rankless.save_checkpoint(path, "s", MODEL, timeout=2.0)
    else:
        time.sleep(4)
    return time.monotonic() - started


def test_a_rank_that_does_not_come_is_named_within_the_timeout(ranks: Ranks, tmp_path: Path) -> None:
    started = time.monotonic()
    first, second, _ = ranks.outcomes(3, absent_rank, str(tmp_path))
    assert isinstance(first, RankTimeoutError)
    assert isinstance(second, RankTimeoutError)
    assert "rank 2" in str(first)
    assert "rank 2" in str(second)
    assert time.monotonic() - started < 60, "the timeout of the call holds, not the default of 600 seconds"


def save_after_failure(path: str) -> str:
    with pytest.raises(RanklessError):
        other_tag(path)
    return str(rankless.save_checkpoint(path, "s", MODEL).wait().tag)


def test_a_later_save_works(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_after_failure, str(tmp_path)) == ["s", "s"]


def save_on_full_disk(path: str) -> None:
    rankless.save_checkpoint(path, "old", MODEL)
    patch = pytest.MonkeyPatch()
    if rank() == 1:
        patch.setattr(os, "pwrite", _full)
    try:
        rankless.save_checkpoint(path, "new", {"w": torch.ones(1 << 20)})
    finally:
        patch.undo()


def _full(fd: int, data: Any, offset: int) -> int:
    raise OSError(28, os.strerror(28))


def test_a_full_disk_on_one_rank_fails_all_and_leaves_the_old_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.outcomes(2, save_on_full_disk, str(tmp_path))
    assert {type(error) for error in errors} == {StorageError}
    assert all(error.errno == 28 and "rank 1 of 2" in str(error) and "w" in str(error) for error in errors)
    assert list_names(tmp_path) == ["old"]
    model = {"w": torch.zeros(10)}
    rankless.load_checkpoint(tmp_path, model=model)
    assert torch.equal(model["w"], MODEL["w"])


def unseen_folder(path: str) -> None:
    """Rank 1 has no shared file system: it does not see the folder that rank 0 made."""
    patch = pytest.MonkeyPatch()
    if rank() == 1:
        patch.setattr(Path, "is_dir", lambda _: False)
    try:
        rankless.save_checkpoint(path, "s", MODEL)
    finally:
        patch.undo()


def test_ranks_without_a_shared_file_system_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.outcomes(2, unseen_folder, str(tmp_path))
    assert {type(error) for error in errors} == {RankMismatchError}
    assert all("rank 1 of 2" in str(error) and "shared file system" in str(error) for error in errors)
    assert not list_names(tmp_path)


def load_where_one_sees_nothing(path: str) -> None:
    patch = pytest.MonkeyPatch()
    if rank() == 1:
        patch.setattr("rankless.load.load_operation.NativeReader", _no_folder)
    try:
        rankless.load_checkpoint(path, model={"w": torch.zeros(10)})
    finally:
        patch.undo()


def _no_folder(path: Path, *_: object, **__: object) -> None:
    raise NoCheckpointError(f"there is no {path}")


def test_a_load_that_one_rank_cannot_see_is_an_error_for_all(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", MODEL)
    errors = ranks.outcomes(2, load_where_one_sees_nothing, str(tmp_path))
    assert {type(error) for error in errors} == {RankMismatchError}
    assert all("rank 1 of 2" in str(error) and "shared file system" in str(error) for error in errors)


def load_mismatch_on_one(path: str) -> torch.Tensor:
    model = {"w": torch.zeros(10 + rank())}
    with pytest.raises(MismatchError, match="rank 1 of 2"):
        rankless.load_checkpoint(path, model=model)
    return model["w"]


def test_a_mismatch_on_one_rank_leaves_every_rank_unchanged(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", MODEL)
    for tensor in ranks(2, load_mismatch_on_one, str(tmp_path)):
        assert not tensor.any()


def test_a_tag_is_not_overwritten(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", MODEL)
    before = (tmp_path / "s/manifest.json").read_bytes()
    for error in ranks.outcomes(2, _save_again, str(tmp_path)):
        assert isinstance(error, TagExistsError)
        assert isinstance(error, FileExistsError)
    assert (tmp_path / "s/manifest.json").read_bytes() == before


def _save_again(path: str) -> None:
    rankless.save_checkpoint(path, "s", {"w": torch.zeros(3)})


def fail_alone_first(path: str) -> str:
    size = "5 bogus" if dist.get_rank() == 1 else "5GB"
    with pytest.raises(InvalidArgumentError, match="rank 1 of 2"):
        rankless.save_checkpoint(path, "s", MODEL, max_shard_size=size)
    return rankless.save_checkpoint(path, "s", MODEL, timeout=5).wait().tag


def test_an_argument_wrong_on_one_rank_does_not_part_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, fail_alone_first, str(tmp_path)) == ["s", "s"]


def odd_message(path: str) -> None:
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 1:
        patch.setattr("rankless.save.save_negotiation.capture_training", _fail_oddly)
    try:
        rankless.save_checkpoint(path, "s", MODEL, timeout=30)
    finally:
        patch.undo()


def _fail_oddly(*_: Any, **_keywords: Any) -> None:
    raise OSError("no such file: caf\udce9")


def test_an_error_with_a_name_of_broken_characters_reaches_all(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.outcomes(2, odd_message, str(tmp_path))
    assert {type(error) for error in errors} == {RankFailedError}
    assert all("rank 1 of 2" in str(error) and r"caf\udce9" in str(error) for error in errors)


def subgroup(path: str) -> str:
    group = dist.new_group([0, 1])
    try:
        return rankless.save_checkpoint(path, "s", MODEL, process_group=group, timeout=20).wait().tag
    except InvalidArgumentError as error:
        return str(error)


def test_only_members_of_a_group_save(ranks: Ranks, tmp_path: Path) -> None:
    first, second, third = ranks(3, subgroup, str(tmp_path))
    assert (first, second) == ("s", "s")
    assert "not in the process group" in third


class NarrowError(CorruptCheckpointError):
    """An error that one module has for itself."""


def vote_with_narrow_error() -> None:
    from rankless.engine.comm.session import RankGroup as RanksOfGroup

    def work() -> None:
        if rank() == 1:
            raise NarrowError("the file is cut short")

    RanksOfGroup().open_session(20.0).run_on_all("reading", work)


def test_an_error_that_only_one_module_knows_reaches_the_others_as_the_public_type(ranks: Ranks) -> None:
    for error in ranks.outcomes(2, vote_with_narrow_error):
        assert type(error) is CorruptCheckpointError
        assert "rank 1 of 2, reading: the file is cut short" in str(error)
