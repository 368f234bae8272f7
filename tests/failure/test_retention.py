"""Tests retention: which checkpoints policies and ``rankless prune`` keep, and when the others are removed."""

from __future__ import annotations

import errno
import json
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import rankless.errors
from rankless import KeepBest, KeepEvery, KeepLast, KeepNewerThan, KeepTags
from rankless.cli.main import app
from rankless.errors import InvalidArgumentError, StorageError
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.retention import Retention
from rankless.storage.atomic_rename import rename_path
from tests.helpers.pending_locks import lock_pending
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command
from tests.helpers.run_directories import leave_draft, list_hidden_names, list_tags, save_step


def test_the_newest_so_many_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        save_step(tmp_path, step, keep=2)
    assert list_tags(tmp_path) == ["step_3", "step_4"]
    assert not list_hidden_names(tmp_path)


def test_policies_keep_what_either_keeps(tmp_path: Path) -> None:
    losses = [3.0, 1.0, 2.0, float("nan"), 5.0, 4.0]
    keep = KeepLast(1) | KeepEvery(4) | KeepBest("loss", 1) | KeepTags("step_2")
    for step, loss in enumerate(losses):
        save_step(tmp_path, step, metrics={"loss": loss}, keep=keep)
    assert list_tags(tmp_path) == ["step_0", "step_1", "step_2", "step_4", "step_5"]


def test_the_best_may_be_the_highest_and_the_young_are_kept(tmp_path: Path) -> None:
    for step, score in enumerate([1, 9, 5, 7, 2]):
        save_step(tmp_path, step, metrics={"score": score}, keep=KeepBest("score", 2, mode="max"))
    assert list_tags(tmp_path) == ["step_1", "step_3", "step_4"]  # the newest always
    save_step(tmp_path, 5, keep=KeepNewerThan(hours=1))
    assert list_tags(tmp_path) == ["step_1", "step_3", "step_4", "step_5"]
    with mock.patch("rankless.run.cleanup.time.time", return_value=4e9):
        save_step(tmp_path, 6, keep=KeepNewerThan(days=2))
    assert list_tags(tmp_path) == ["step_6"]


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0},
        {"keep": -1},
        {"keep": "five"},
        {"keep": KeepEvery(10), "step": None},
        {"keep": KeepLast(1) | KeepBest("loss"), "metrics": {"other": 1.0}},
    ],
)
def test_what_makes_no_sense_is_a_value_error_and_nothing_is_written(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+") as raised:
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, **{"step": 1, **options})
    assert isinstance(raised.value, InvalidArgumentError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("every", "steps", "kept"),
    [
        (0.1, [0.2, 0.25, 0.3, 0.7, 0.75], [0.2, 0.3, 0.7]),
        (0.1, [0.1 + 0.1 + 0.1, sum([0.1] * 1_000_000), 100_000.05], [0.1 + 0.1 + 0.1, sum([0.1] * 1_000_000)]),
        (2.5, [0.0, 2.5, 4, 5, 7.4999], [0.0, 2.5, 5]),
        (3, [10**15, 10**15 + 2, float("inf")], [10**15 + 2]),
        (1e-9, [1.0000000005, 2], [2]),
    ],
)
def test_every_so_many_steps_may_be_fractions(every: float, steps: list[float], kept: list[float]) -> None:
    """0.3 % 0.1 is 0.09999999999999998, and 0.3 is a multiple of 0.1 to whoever wrote it."""
    infos = [CheckpointInfo(str(step), Path(), id=str(step), step=step) for step in steps]
    assert KeepEvery(every).select_kept(infos, 0.0) == {str(step) for step in kept}


@pytest.mark.parametrize(
    "policy",
    [
        KeepLast(1),
        KeepLast(5000),
        KeepNewerThan(days=1),
        KeepEvery(4),
        KeepBest("loss", 2),
        KeepTags("2"),
        KeepLast(5000) | KeepEvery(4) | KeepBest("loss", 1) | KeepNewerThan(hours=1),
    ],
    ids=str,
)
def test_merit_keeps_a_checkpoint_however_many_newer_ones_follow(policy: Retention) -> None:
    losses = [3.0, 1.0, 2.0, float("nan"), 5.0, 4.0]
    infos = [
        CheckpointInfo(str(step), Path(), id=str(step), step=step, metrics={"loss": loss}, time=1e9 + step)
        for step, loss in enumerate(losses)
    ]
    newer = [CheckpointInfo("", Path(), id="newer", time=2e9)] * 5001
    kept_later = policy.select_kept([*infos, *newer], 3e9) - {"newer"}
    assert policy.select_by_merit(infos) == kept_later


@pytest.mark.parametrize("make", [lambda: KeepLast(2.5), lambda: KeepBest("a", 1.5)])  # type: ignore[arg-type]
def test_half_a_checkpoint_cannot_be_kept(make: Any) -> None:
    """It would fail in each save, after the commit, and nothing would ever be removed."""
    with pytest.raises(InvalidArgumentError, match="whole number"):
        make()


@pytest.mark.parametrize("make", [lambda: KeepLast(0), lambda: KeepBest("a", 0), KeepTags, lambda: KeepEvery(-1)])
def test_policies_that_keep_nothing_cannot_be_made(make: Any) -> None:
    with pytest.raises(ValueError, match=r"number above 0|tags to keep"):
        make()


def test_damaged_ones_do_not_count_and_other_runs_are_left_alone(tmp_path: Path) -> None:
    for step in range(3):
        save_step(tmp_path, step)
    (tmp_path / "step_2/manifest.json").write_text("{}")
    other = tmp_path / "other"
    save_step(other, 7)
    (other / "step_7").rename(tmp_path / "elsewhere")
    save_step(tmp_path, 3, keep=2)
    assert set(list_tags(tmp_path)) == {"step_2", "step_1", "step_3", "elsewhere"}


def test_nothing_goes_before_the_new_one_is_there(tmp_path: Path) -> None:
    save_step(tmp_path, 0, keep=1)
    with (
        mock.patch("rankless.run.pending_dir.PendingDirectory.publish", side_effect=StorageError(5, "no")),
        pytest.raises(StorageError),
    ):
        save_step(tmp_path, 1, keep=1)
    assert list_tags(tmp_path) == ["step_0"]


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    save_step(tmp_path, 0)
    with (
        mock.patch("rankless.run.folder_removal.remove_tree", side_effect=StorageError(13, "not yours")),
        pytest.warns(UserWarning, match="is saved, but an old one could not be removed"),
    ):
        save_step(tmp_path, 1, keep=1)
    assert list_tags(tmp_path) == ["step_1"]
    assert [parse_hidden_name(name).state for name in list_hidden_names(tmp_path)] == ["removed"]
    save_step(tmp_path, 2)
    assert not list_hidden_names(tmp_path)


def test_one_that_cannot_be_removed_keeps_no_others(tmp_path: Path) -> None:
    """On an overlay, a folder of a lower layer cannot be renamed."""
    for step in range(4):
        save_step(tmp_path, step)

    def rename(source: Path, target: Path) -> None:
        if source.name == "step_0":
            raise StorageError(errno.EXDEV, f"could not rename {source}: Invalid cross-device link")
        rename_path(source, target)

    with mock.patch("rankless.run.folder_removal.rename_path", rename):
        with pytest.warns(UserWarning, match=r"an old one could not be removed: .*step_0"):
            save_step(tmp_path, 4, keep=2)
        assert list_tags(tmp_path) == ["step_0", "step_3", "step_4"]
        pruned = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep", "1"])
    assert "removed step_3" in pruned.output
    assert pruned.exit_code == 1
    assert "Invalid cross-device link" in pruned.output
    assert list_tags(tmp_path) == ["step_0", "step_4"]


def kept_by_ranks(path: str) -> list[str]:
    for step in range(4):
        tensor = torch.full((4,), float(step))
        rankless.save_checkpoint(path, f"step_{step}", {"w": tensor}, step=step, keep=KeepLast(1) | KeepEvery(2))
        dist.barrier()
    return list_tags(Path(path))


def test_ranks_agree_on_what_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3, kept_by_ranks, str(tmp_path)) == [["step_0", "step_2", "step_3"]] * 3


def unlike_policies(path: str) -> None:
    rankless.save_checkpoint(path, "s", {"w": torch.ones(1)}, keep=1 + dist.get_rank())


def test_ranks_with_other_policies_are_told(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.outcomes(2, unlike_policies, str(tmp_path))
    assert all("what is kept" in str(error) and "KeepLast(number=2)" in str(error) for error in errors)


def prune(*arguments: object) -> Any:
    done = run_command("prune", *map(str, arguments))
    return done.returncode, done.stdout, done.stderr


def test_prune_removes_what_it_is_told_to_and_says_so(tmp_path: Path) -> None:
    for step in range(4):
        save_step(tmp_path, step)
    dead = leave_draft(tmp_path, "f" * 16)
    code, out, _ = prune(tmp_path, "--keep", 2, "--leftovers", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["checkpoints"] == ["step_0", "step_1"]
    assert json.loads(out)["leftovers"] == [dead.name]
    assert len(list_tags(tmp_path)) == 4
    code, out, _ = prune(tmp_path, "--keep", 2, "--leftovers")
    assert code == 0
    assert "removed step_0" in out
    assert "2 checkpoints and 1 leftover" in out
    assert list_tags(tmp_path) == ["step_2", "step_3"]
    assert not list_hidden_names(tmp_path)


def test_prune_without_a_word_on_what_or_where_is_misuse(tmp_path: Path) -> None:
    for arguments in ([tmp_path], [tmp_path, "--keep", 0], [tmp_path / "nowhere", "--keep", 1]):
        code, _, error = prune(*arguments)
        assert code == 2
        assert "Traceback" not in error


def test_pruning_names_what_it_does_not_remove(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    living, dead = leave_draft(tmp_path, "a" * 16), leave_draft(tmp_path, "b" * 16)
    with closing(lock_pending(living)):
        code, out, _ = prune(tmp_path, "--leftovers", "--json")
        assert (code, json.loads(out)["kept"], json.loads(out)["leftovers"]) == (0, [living.name], [dead.name])
        code, out, _ = prune(tmp_path, "--leftovers")
        assert f"kept {living.name}: a process uses it" in " ".join(out.split())
    assert living.exists()


def test_pruning_gives_a_checkpoint_its_name_back_rather_than_removing_it(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    hidden_as = HiddenName("step_1", rankless.list_checkpoints(tmp_path)[0].run, "2" * 16, "partial")
    (tmp_path / hidden_as.name).mkdir()
    (tmp_path / "step_1").rename(tmp_path / hidden_as.with_state("replaced").name)
    assert prune(tmp_path, "--leftovers")[0] == 0
    assert list_tags(tmp_path) == ["step_1"]
    assert not list_hidden_names(tmp_path)


def test_a_policy_that_fails_does_not_fail_the_save(tmp_path: Path) -> None:
    class Odd(KeepLast):
        def select_kept(self, *_: Any) -> set[str]:
            raise KeyError("odd")

    with pytest.warns(UserWarning, match="is saved, but"):
        save_step(tmp_path, 1, keep=Odd(1))
    assert list_tags(tmp_path) == ["step_1"]


def test_what_cannot_be_removed_after_the_commit_is_logged_if_warnings_are_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 removes alone, after the last vote. If it raised, the other ranks would wait for it in their next save."""
    save_step(tmp_path, 1)
    (tmp_path / "step_1/notes.txt").write_text("of the user")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_step(tmp_path, 2, keep=1)
    assert "an old one could not be removed" in caplog.text
    assert list_tags(tmp_path) == ["step_1", "step_2"]
    assert (tmp_path / "step_1/notes.txt").exists()
