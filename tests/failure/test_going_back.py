"""Tests runs that go back to an older checkpoint, are continued by several jobs, moved, copied or removed.

Each job is a process of its own, which is killed at its end. A state tells its step.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import rankless
from rankless import api
from rankless.cli.main import app
from rankless.errors import StorageError
from rankless.run import cleanup, object_removal, object_run
from rankless.run.pending_dir import PendingDirectory
from rankless.save.object_publication import ObjectPublication
from rankless.storage.atomic_rename import rename_noreplace
from rankless.tier.host_folder import TierFolder
from tests.golden import reader
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.killed_jobs import run_killed_job
from tests.helpers.pool import Ranks
from tests.helpers.tier_runs import state_of

NEVER = 10**9

#: The tags after four steps, a rollback to the second one, and a new third step, and whether each is current.
AFTER_A_ROLLBACK = {"step_3@1": False, "step_4": False, "step_1": True, "step_2": True, "step_3": True}


def tier_of(base: Path | None) -> rankless.LocalTier | None:
    return None if base is None else rankless.LocalTier(base / "tier", drain_every=NEVER)


def train(
    path: Path | str,
    last: int,
    tag: str | None = None,
    base: Path | None = None,
    *,
    again: bool = False,
    keep: int = 99,
) -> int:
    """Resume, save each step up to the last, and return the step that was resumed. Nothing is drained."""
    model = torch.nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(path, model=model, signals=(), save_every=1, keep=keep, local=tier_of(base))
    first = checkpointer.resume(tag)
    if first:
        assert torch.equal(model.bias.data, torch.full((2,), float(first)))
    for step in range(first + 1, last + 1):
        model.bias.data.fill_(float(step))
        checkpointer.step(step)
    checkpointer._directory.wait()
    return first


def train_and_save_the_last_step(run: Path, base: Path) -> None:
    train(run, 5, None, base)
    model = torch.nn.Linear(2, 2)
    model.bias.data.fill_(6.0)
    rankless.save_checkpoint(run, "final", model, step=6)


def save_first(path: Path) -> None:
    rankless.RunDirectory(path).save("step_1", state_of(1), step=1)


def train_nothing_and_save(path: Path, tag: str) -> None:
    directory = rankless.RunDirectory(path)
    directory.restore(None, torch.nn.Linear(2, 2), resume=True)
    directory.save(tag, torch.nn.Linear(2, 2), step=2)


def listed(path: Path | str) -> dict[str, bool]:
    return {info.tag: info.is_current for info in rankless.list_checkpoints(path)}


def latest(path: Path | str) -> str:
    model = torch.nn.Linear(2, 2)
    return rankless.restore(path, model=model).tag


def save_by_groups(path: str) -> None:
    """Load on all ranks. Then each rank saves by itself, the second one first."""
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    directory = rankless.RunDirectory(path)
    directory.restore(None, state_of(-1), resume=False)
    own = rankless.RunDirectory(path, process_group=group)
    own.memory = directory.memory
    for rank in (1, 0):
        if dist.get_rank() == rank:
            own.save(f"of_rank_{rank}", state_of(2), step=2)
        dist.barrier()


class TestRollback:
    def test_the_steps_after_it_get_other_tags_and_stay(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 4)
        assert run_killed_job(train, tmp_path, 3, "step_2") == 2
        assert listed(tmp_path) == AFTER_A_ROLLBACK
        assert latest(tmp_path) == "step_3"
        reader.read(tmp_path / "step_3@1")
        assert float(rankless.open(tmp_path, "step_3@1")["model/bias"][0]) == 3.0

    def test_it_counts_before_the_first_save(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 3)
        run_killed_job(train, tmp_path, 0, "step_1")
        assert latest(tmp_path) == "step_1"
        assert run_killed_job(train, tmp_path, 2) == 1

    def test_a_job_that_is_started_again_goes_back_once(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 4)
        assert run_killed_job(train, tmp_path, 3, "step_2") == 2
        assert run_killed_job(train, tmp_path, 5, "step_2") == 3
        model = torch.nn.Linear(2, 2)
        checkpointer = rankless.Checkpointer(tmp_path, model=model, signals=())
        with pytest.warns(UserWarning, match="went back to 'step_2' already"):
            assert checkpointer.resume("step_2") == 5
        with pytest.warns(UserWarning, match="goes back to 'step_2' again: 3 later"):
            assert checkpointer.resume("step_2", again=True) == 2

    def test_a_copy_without_its_history_goes_on_over_the_steps_that_were_abandoned(self, tmp_path: Path) -> None:
        run, copy = tmp_path / "run", tmp_path / "copy"
        run_killed_job(train, run, 5)
        run_killed_job(train, run, 3, "step_2")
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".*"))
        assert run_killed_job(train, copy, 5) == 3
        assert listed(copy) == {
            "step_1": True,
            "step_2": True,
            "step_3": True,
            "step_4": True,
            "step_5": True,
            "step_3@1": True,
            "step_4@1": False,
            "step_5@1": False,
        }

    @pytest.mark.parametrize("has_tier", [False, True])
    def test_what_is_abandoned_is_not_overwritten(self, tmp_path: Path, *, has_tier: bool) -> None:
        tier = tier_of(tmp_path / "host") if has_tier else None
        with rankless.RunDirectory(tmp_path / "run", local=tier) as directory:
            for step in (1, 2):
                directory.save(f"step_{step}", state_of(step), step=step)
                directory.finalize()
            directory.restore("step_1", state_of(-1), resume=True)
            for value in (12, 22):  # the second one replaces the first
                directory.save("step_2", state_of(value), step=2, overwrite=True)
                directory.finalize()
        abandoned = "step_2@2" if has_tier else "step_2@1"  # the first number is that with which it opened the tier
        assert listed(tmp_path / "run") == {abandoned: False, "step_1": True, "step_2": True}
        assert float(rankless.open(tmp_path / "run", abandoned)["model/w"][0]) == 2.0
        assert float(rankless.open(tmp_path / "run", "step_2")["model/w"][0]) == 22.0

    def test_a_job_that_names_the_latest_and_is_started_again_goes_on(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 2)
        assert run_killed_job(train, tmp_path, 4, "step_2") == 2
        assert run_killed_job(train, tmp_path, 5, "step_2") == 4
        assert all(listed(tmp_path).values())

    def test_by_another_object_of_the_process_abandons_what_the_first_one_goes_on_from(self, tmp_path: Path) -> None:
        run_killed_job(save_first, tmp_path)
        first, second = rankless.RunDirectory(tmp_path), rankless.RunDirectory(tmp_path)
        first.restore(None, state_of(-1), resume=True)
        for step in (2, 3):
            first.save(f"step_{step}", state_of(step), step=step)
        with pytest.warns(UserWarning, match="goes back to 'step_1': 2 later"):
            second.restore("step_1", state_of(-1), resume=True)
        second.save("branch", state_of(20), step=2)
        with pytest.raises(rankless.SupersededError, match="was continued from an earlier checkpoint"):
            first.save("step_4", state_of(4), step=4)
        assert rankless.restore(tmp_path, model=state_of(-1)).tag == "branch"

    def test_what_is_abandoned_may_be_removed_while_its_tag_is_taken(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 2)
        directory = rankless.RunDirectory(tmp_path)
        with pytest.warns(UserWarning, match="goes back"):
            directory.restore("step_1", torch.nn.Linear(2, 2), resume=True)

        def remove_first(source: Path, target: Path) -> None:
            if target.name == "step_2@1":
                shutil.rmtree(source)
            rename_noreplace(source, target)

        with mock.patch("rankless.run.abandoned_tags.rename_noreplace", remove_first):
            directory.save("step_2", torch.nn.Linear(2, 2), step=2)
        assert listed(tmp_path) == {"step_1": True, "step_2": True}

    def test_to_an_abandoned_checkpoint(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 3)
        run_killed_job(train, tmp_path, 2, "step_1")
        assert run_killed_job(train, tmp_path, 4, "step_3") == 3
        assert listed(tmp_path) == {"step_2": False, "step_1": True, "step_2@1": True, "step_3": True, "step_4": True}

    def test_retention_removes_abandoned_checkpoints_first(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 4)
        run_killed_job(partial(train, keep=3), tmp_path, 3, "step_2")
        assert listed(tmp_path) == {"step_1": True, "step_2": True, "step_3": True}

    def test_an_alias_follows_its_checkpoint(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 3)
        rankless.set_alias(tmp_path, "good", "step_3")
        run_killed_job(partial(train, keep=1), tmp_path, 5, "step_2")
        assert listed(tmp_path) == {"step_3@1": False, "step_5": True}
        assert float(rankless.open(tmp_path, "good")["model/bias"][0]) == 3.0
        assert rankless.list_aliases(tmp_path) == {"good": "step_3@1"}

    def test_a_copy_of_the_users_is_not_taken_for_one_that_got_another_tag(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 1)
        for name in ("step_1@1_backup", "step_1@12", "step_1@1.x"):
            shutil.copytree(tmp_path / "step_1", tmp_path / name)
        run_killed_job(partial(train, keep=1), tmp_path, 3)
        assert listed(tmp_path).keys() == {"step_1@1_backup", "step_1@12", "step_1@1.x", "step_3"}

    def test_by_the_command(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 3)
        result = CliRunner().invoke(app, ["rollback", str(tmp_path), "step_1", "--json"])
        assert json.loads(result.output) == {"latest": "step_1", "abandoned": ["step_2", "step_3"]}
        assert "abandoned" in CliRunner().invoke(app, ["ls", str(tmp_path)]).output
        assert run_killed_job(train, tmp_path, 2) == 1

    def test_the_command_is_named_to_the_job_that_it_supersedes(self, tmp_path: Path) -> None:
        run_killed_job(save_first, tmp_path)
        directory = rankless.RunDirectory(tmp_path)
        directory.restore(None, state_of(-1), resume=True)
        directory.save("step_2", state_of(2), step=2)
        assert CliRunner().invoke(app, ["rollback", str(tmp_path), "step_1"]).exit_code == 0
        with pytest.raises(rankless.SupersededError, match=r"by `rankless rollback` \(process \d+ on .+\): .* End it"):
            directory.save("step_3", state_of(3), step=3)

    def test_the_command_does_not_go_back_to_a_corrupt_checkpoint(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 3)
        (file,) = (tmp_path / "step_1").rglob("model.safetensors")
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.chmod(0o644)
        file.write_bytes(data)
        result = CliRunner().invoke(app, ["rollback", str(tmp_path), "step_1"])
        assert result.exit_code == 1
        assert "does not go back to 'step_1'" in result.output
        assert "--no-verify" in result.output
        assert latest(tmp_path) == "step_3"
        assert CliRunner().invoke(app, ["rollback", str(tmp_path), "step_1", "--no-verify"]).exit_code == 0
        assert listed(tmp_path) == {"step_2": False, "step_3": False, "step_1": True}

    def test_if_its_checkpoint_is_lost_no_other_one_is_taken(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 3)
        run_killed_job(train, tmp_path, 0, "step_1")
        shutil.rmtree(tmp_path / "step_1")
        with pytest.raises(rankless.NoCheckpointError, match="are abandoned: pass the tag"):
            latest(tmp_path)
        with pytest.raises(rankless.NoCheckpointError, match="are abandoned: pass the tag"):
            rankless.open(tmp_path)
        assert run_killed_job(train, tmp_path, 4, "step_3") == 3


def go_on_from(path: Path | str, run: Path | str, last: int, *, resume: bool | None = None) -> list[str]:
    """Load a checkpoint by its path, and overwrite the steps up to the last. Return the warnings."""
    model = torch.nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = int(rankless.restore(path, None, model, resume=resume).step or 0)
        for step in range(first + 1, last + 1):
            model.bias.data.fill_(10.0 * first + step)
            rankless.save_checkpoint(run, f"step_{step}", model, step=step, overwrite=True)
    return [str(one.message) for one in caught]


class TestPaths:
    """A checkpoint that is loaded by its own path, as frameworks do, and whose next steps have the same names again."""

    def test_the_path_means_the_same_as_the_tag(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 4)
        (warning,) = run_killed_job(go_on_from, tmp_path / "step_2", tmp_path, 3)
        assert "goes back to 'step_2': 2 later checkpoint(s) are abandoned" in warning
        assert listed(tmp_path) == AFTER_A_ROLLBACK
        assert float(rankless.open(tmp_path, "step_3@1")["model/bias"][0]) == 3.0
        assert latest(tmp_path) == "step_3"
        assert run_killed_job(go_on_from, tmp_path, tmp_path, 5) == []
        assert latest(tmp_path) == "step_5"

    def test_the_path_of_the_latest_is_no_rollback(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 2)
        assert run_killed_job(go_on_from, tmp_path / "step_2", tmp_path, 4) == []
        assert listed(tmp_path) == {f"step_{step}": True for step in range(1, 5)}

    def test_a_link_leads_to_the_run(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run_killed_job(train, run, 3)
        (tmp_path / "good").symlink_to(run / "step_1")
        (tmp_path / "runs").symlink_to(tmp_path)
        run_killed_job(go_on_from, tmp_path / "good", tmp_path / "runs/run", 2)
        assert listed(run) == {"step_2@1": False, "step_3": False, "step_1": True, "step_2": True}

    def test_a_training_in_another_folder_changes_nothing_in_the_first_one(self, tmp_path: Path) -> None:
        run, other = tmp_path / "run", tmp_path / "other"
        run_killed_job(train, run, 3)
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        run_killed_job(partial(go_on_from, resume=True), run / "step_1", other, 2)
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        assert listed(other) == {"step_2": True}

    def test_a_load_for_an_evaluation_changes_nothing_for_a_job_that_trains(self, tmp_path: Path) -> None:
        for step in (1, 2):
            rankless.save_checkpoint(tmp_path, f"step_{step}", state_of(step), step=step)
        rankless.restore(tmp_path / "step_1", None, state_of(-1))
        rankless.save_checkpoint(tmp_path, "step_3", state_of(3), step=3)
        assert listed(tmp_path) == {"step_1": True, "step_2": True, "step_3": True}

    def test_a_save_shares_unchanged_files_with_it(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(100, 2).requires_grad_(requires_grad=False)
        with mock.patch("rankless.save.folder_output._MIN_SHARED", 0):
            rankless.save_checkpoint(tmp_path, "first", model)
            with mock.patch.object(api, "_defaults", api._DefaultDirectories()):  # as another process
                rankless.restore(tmp_path / "first", None, model)
                rankless.save_checkpoint(tmp_path, "second", model)
        (file,) = (tmp_path / "second/model").glob("*.safetensors")
        assert file.samefile(tmp_path / "first/model" / file.name)

    def test_in_a_bucket(self) -> None:
        fake = FakeS3()
        with fake.connected(), mock.patch.object(api, "_defaults", api._DefaultDirectories()):
            run = fake.store_at("http://fake").path("bucket/run")
            for step in (1, 2):
                rankless.save_checkpoint(run, f"step_{step}", state_of(step), step=step)
            rankless.restore(run / "step_1", None, state_of(-1), resume=True)
            with pytest.warns(UserWarning, match="goes back to 'step_1'"):
                rankless.save_checkpoint(run, "step_2", state_of(12), step=2, overwrite=True)
            assert listed(run) == {"step_2@1": False, "step_1": True, "step_2": True}
            loaded = state_of(-1)
            rankless.restore(run, "step_2@1", loaded)
            assert torch.equal(loaded["w"], state_of(2)["w"])


class TestBucket:
    def test_the_steps_after_it_get_other_tags_and_stay(self) -> None:
        fake = FakeS3()
        with fake.connected():
            run = fake.store_at("http://fake").path("bucket/run")
            directory = rankless.RunDirectory(run)
            for step in (1, 2, 3):
                directory.save(f"step_{step}", state_of(step), step=step)
            directory.restore("step_1", state_of(-1), resume=True)
            directory.save("step_2", state_of(12), step=2, keep=2)
            assert listed(run) == {"step_1": True, "step_2": True}
            directory.restore("step_1", state_of(-1), resume=True)
            directory.save("step_2", state_of(22), step=2)
            assert listed(run) == {"step_2@2": False, "step_1": True, "step_2": True}
            cleanup.clean_up(run)
            loaded = state_of(-1)
            assert rankless.restore(run, "step_2@2", loaded).step == 2
            assert torch.equal(loaded["w"], state_of(12)["w"])

    @pytest.mark.parametrize("tag", ["last", "\xe9" * 99])
    def test_a_clean_up_keeps_what_has_got_another_tag(self, tag: str) -> None:
        fake = FakeS3()
        with fake.connected(), mock.patch.object(object_removal, "ABANDONED_SECONDS", -1.0):
            run = fake.store_at("http://fake").path("bucket/run")
            directory = rankless.RunDirectory(run)
            for name, step in (("first", 1), (tag, 2)):
                directory.save(name, state_of(step), step=step)
            directory.restore("first", state_of(-1), resume=True)
            directory.save(tag, state_of(12), step=3)
            (abandoned,) = [info for info in rankless.list_checkpoints(run) if not info.is_current]
            cleanup.clean_up(run, with_whole=True)
            assert object_run.is_named(abandoned.path)
            assert rankless.restore(run, abandoned.tag, state_of(-1)).step == 2


class TestOtherJobs:
    def test_a_job_whose_run_another_one_has_continued_saves_nothing(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path, 1)
        checkpointer = rankless.Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), signals=(), save_every=1)
        checkpointer.resume()
        run_killed_job(train, tmp_path, 2)
        with pytest.raises(rankless.SupersededError, match="another job has continued the run"):
            checkpointer.step(2)
        assert listed(tmp_path) == {"step_1": True, "step_2": True}

    def test_what_it_saves_late_is_not_the_latest(self, tmp_path: Path) -> None:
        """It was stopped in the middle of its save."""
        run_killed_job(train, tmp_path, 1)
        directory = rankless.RunDirectory(tmp_path)
        directory.restore(None, torch.nn.Linear(2, 2), resume=True)
        wait = pytest.MonkeyPatch()
        from rankless.run.pending_dir import PendingDirectory

        publish = PendingDirectory.publish

        def publish_late(self: PendingDirectory, entry: str = "") -> None:
            wait.undo()
            run_killed_job(train, tmp_path, 2)
            publish(self, entry)

        wait.setattr(PendingDirectory, "publish", publish_late)
        directory.save("late", torch.nn.Linear(2, 2), step=9)
        assert listed(tmp_path) == {"late": False, "step_1": True, "step_2": True}
        assert latest(tmp_path) == "step_2"

    @pytest.mark.parametrize("place", ["folder", "bucket"])
    def test_its_late_overwrite_is_refused_whatever_the_clocks_of_hosts_say(self, tmp_path: Path, place: str) -> None:
        """Both saves have the same number: neither job has seen the other's checkpoint."""
        fake = FakeS3()
        with fake.connected():
            run = fake.store_at("http://fake").path("bucket/run") if place == "bucket" else tmp_path
            older, newer = rankless.RunDirectory(run), rankless.RunDirectory(run)
            older.save("step_1", state_of(1), step=1)
            owner, name = (ObjectPublication, "publish") if place == "bucket" else (PendingDirectory, "replace")
            publish = getattr(owner, name)

            seconds_ahead = [600.0]

            def publish_late(*arguments: Any, **options: Any) -> Any:
                seconds_ahead[0] = 0.0  # on the host of the newer job
                newer.restore(None, state_of(-1), resume=True)
                with mock.patch.object(owner, name, publish):
                    newer.save("last", state_of(2), step=2, overwrite=True)
                return publish(*arguments, **options)

            ahead = SimpleNamespace(time=lambda: time.time() + seconds_ahead[0])
            with (
                mock.patch("rankless.save.training_content.time", ahead),
                mock.patch.object(owner, name, publish_late),
                pytest.raises(rankless.TagExistsError, match="is newer, and left as it is"),
            ):
                older.save("last", state_of(9), step=9, overwrite=True)
            assert rankless.restore(run, "last", state_of(-1)).step == 2

    def test_ranks_of_one_job_that_save_by_themselves_have_one_incarnation(self, ranks: Ranks, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "step_1", state_of(1), step=1)
        ranks(2, save_by_groups, str(tmp_path))
        found = {info.tag: (info.incarnation, info.is_current) for info in rankless.list_checkpoints(tmp_path)}
        assert found == {"step_1": (1, True), "of_rank_1": (2, True), "of_rank_0": (2, True)}

    def test_a_claim_that_fails_after_a_load_is_made_by_the_first_save(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "step_1", state_of(1), step=1)
        directory = rankless.RunDirectory(tmp_path)
        failing = mock.patch(
            "rankless.storage.store.PosixStore.create_small", side_effect=StorageError(errno.EROFS, "read-only")
        )
        with failing, pytest.warns(UserWarning, match="cannot be written now"):
            assert directory.restore(None, state_of(-1), resume=True).step == 1
        directory.save("step_2", state_of(2), step=2)
        assert [info.incarnation for info in rankless.list_checkpoints(tmp_path)] == [1, 2]

    def test_a_job_without_a_tier_abandons_what_the_tier_has_after_its_checkpoint(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run_killed_job(train, run, 1)
        run_killed_job(train, run, 3, None, tmp_path)
        assert run_killed_job(train, run, 4) == 1
        assert run_killed_job(train, run, 0, None, tmp_path) == 4

    @pytest.mark.parametrize("is_saved", [False, True])
    def test_a_job_that_has_loaded_the_latest_undoes_no_rollback(self, tmp_path: Path, *, is_saved: bool) -> None:
        run_killed_job(train, tmp_path, 3)
        directory = rankless.RunDirectory(tmp_path)
        directory.restore(None, torch.nn.Linear(2, 2))
        run_killed_job(train, tmp_path, 2 if is_saved else 0, "step_1")
        with pytest.raises(rankless.StateError, match="another job has continued the run"):
            directory.save("step_4", torch.nn.Linear(2, 2))
        assert latest(tmp_path) == ("step_2" if is_saved else "step_1")

    def test_a_superseded_job_learns_it_also_if_the_other_one_has_saved_its_step(self, tmp_path: Path) -> None:
        directory = rankless.RunDirectory(tmp_path)
        directory.save("step_1", torch.nn.Linear(2, 2), step=1)
        run_killed_job(train_nothing_and_save, tmp_path, "step_2")
        with pytest.raises(rankless.SupersededError):
            directory.save("step_2", torch.nn.Linear(2, 2), step=2)

    def test_an_object_goes_on_after_another_one_of_its_process_has_continued_the_run_through_a_link(
        self, tmp_path: Path
    ) -> None:
        run, link = tmp_path / "run", tmp_path / "link"
        link.symlink_to(run)
        first, second = rankless.RunDirectory(run), rankless.RunDirectory(link)
        first.save("step_1", state_of(1), step=1)
        second.restore(None, state_of(-1), resume=True)
        second.save("step_2", state_of(2), step=2)
        first.save("step_3", state_of(3), step=3)
        assert all(listed(run).values())

    def test_an_object_whose_checkpoint_another_one_of_its_process_has_abandoned_saves_nothing(
        self, tmp_path: Path
    ) -> None:
        first, second = rankless.RunDirectory(tmp_path), rankless.RunDirectory(tmp_path)
        for step in (1, 2):
            first.save(f"step_{step}", state_of(step), step=step)
        second.restore("step_1", state_of(-1), resume=True)
        second.save("other", state_of(9), step=2)
        with pytest.raises(rankless.SupersededError):
            first.save("step_3", state_of(3), step=3)

    def test_a_job_waits_for_its_own_saves_before_it_resumes(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(300, 300)
        checkpointer = rankless.Checkpointer(tmp_path, model=model, signals=(), save_every=1, async_save=True)
        for step in range(1, 6):
            checkpointer.step(step)
            assert checkpointer.resume() == step
        checkpointer.finalize()


class TestTiers:
    def test_a_job_that_does_not_look_into_the_tier_is_warned(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path / "run", 2, None, tmp_path)
        checkpointer = rankless.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), signals=())
        with pytest.warns(UserWarning, match="a job has used a local tier of it"):
            assert checkpointer.resume() == 0

    def test_a_tier_follows_a_run_that_is_moved(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path / "run", 2, None, tmp_path)
        (tmp_path / "run").rename(tmp_path / "moved")
        assert run_killed_job(train, tmp_path / "moved", 3, None, tmp_path) == 2
        with pytest.raises(rankless.InvalidArgumentError, match="is the local tier of"):
            run_killed_job(train, tmp_path / "run", 3, None, tmp_path)

    def test_a_tier_is_not_that_of_a_copy(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path / "run", 2, None, tmp_path)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with pytest.raises(rankless.InvalidArgumentError, match="is the local tier of"):
            run_killed_job(train, tmp_path / "copy", 3, None, tmp_path)
        assert run_killed_job(train, tmp_path / "run", 3, None, tmp_path) == 2

    def test_a_reader_of_a_run_that_was_moved_changes_nothing_in_its_tier(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path / "run", 2, None, tmp_path)
        (tmp_path / "run").rename(tmp_path / "moved")
        files = {file: file.read_bytes() for file in (tmp_path / "tier").iterdir()}
        reading = rankless.RunDirectory(tmp_path / "moved", local=tier_of(tmp_path))
        assert reading.restore(None, torch.nn.Linear(2, 2), resume=False).step == 2
        assert {file: file.read_bytes() for file in (tmp_path / "tier").iterdir()} == files

    def test_a_tier_that_no_job_has_used_is_free_for_a_run_that_was_moved(self, tmp_path: Path) -> None:
        run_killed_job(train, tmp_path / "run", 1)
        run_killed_job(TierFolder.open, tmp_path / "tier", tmp_path / "run")  # a job that was killed at its start
        (tmp_path / "run").rename(tmp_path / "moved")
        assert run_killed_job(train, tmp_path / "moved", 2, None, tmp_path) == 1

    def test_a_job_loads_after_its_tier_was_removed(self, tmp_path: Path) -> None:
        directory = rankless.RunDirectory(tmp_path / "run", local=rankless.LocalTier(tmp_path / "tier", drain_every=1))
        directory.save("step_1", state_of(1), step=1)
        directory.wait()
        shutil.rmtree(tmp_path / "tier")
        assert directory.restore(None, state_of(-1), resume=True).step == 1
        directory.save("step_2", state_of(2), step=2)

    def test_a_run_that_was_removed_is_not_brought_back_by_its_tier(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run_killed_job(train, run, 2, None, tmp_path)
        shutil.rmtree(run)
        for _ in range(2):
            with pytest.raises(rankless.StateError, match="was that directory removed"):
                run_killed_job(train, run, 3, None, tmp_path)
        assert rankless.list_checkpoints(run) == []
        arguments = ["drain", str(run), "--local", str(tmp_path / "tier"), "--json"]
        refused = CliRunner().invoke(app, arguments)
        result = json.loads(refused.stdout)
        assert result["status"] == "durable"
        assert "'step_2' of a run that" in result["problems"][0]
        assert "pass --adopt" in refused.stderr
        assert json.loads(CliRunner().invoke(app, [*arguments, "--adopt"]).output)["status"] == "published"
        assert run_killed_job(train, run, 3, None, tmp_path) == 2

    def test_what_only_the_tier_has_is_found_and_is_not_passed_over(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run_killed_job(train, run, 2, None, tmp_path)
        assert not rankless.has_checkpoint(run)
        assert rankless.has_checkpoint(run, local=tmp_path / "tier")
        checkpointer = rankless.Checkpointer(run, model=torch.nn.Linear(2, 2), signals=(), local=tier_of(tmp_path))
        with pytest.raises(rankless.StateError, match="call resume"):
            checkpointer.step(1)
        with pytest.raises(rankless.StateError, match="not loaded: load it first"):
            rankless.RunDirectory(run, local=tier_of(tmp_path)).save("other", state_of(1))
        assert run_killed_job(train, run, 3, None, tmp_path) == 2

    def test_a_save_past_the_tier_is_newer_than_what_the_tier_has(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run_killed_job(train_and_save_the_last_step, run, tmp_path)
        assert run_killed_job(train, run, 0, None, tmp_path) == 6
