"""Tests two incarnations of a job with a local tier that are alive at once, and copies that fail with a rank.

A job that is stopped is played by a call that first lets another job run. ``python -m campaigns.tier.histories`` stops
and kills real ranks at random moments.
"""

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import RankFailedError, SpaceShortageError
from rankless.load import selection, tier_generations
from rankless.run.pending_dir import PendingDirectory
from rankless.save.folder_output import RunFolderOutput
from rankless.save.generation_content import GenerationContent
from rankless.tier.copies_on_hosts import PartCopies
from rankless.tier.job import TierJob
from tests.helpers.killed_jobs import run_killed_job
from tests.helpers.pool import Ranks
from tests.helpers.tier_runs import load_newest_step, save_steps, state_of

#: A number of saves of which none is drained.
NEVER = 10**6


def open_run(base: Path, **options: Any) -> rankless.RunDirectory:
    return rankless.RunDirectory(base / "run", local=rankless.LocalTier(base / "tier", drain_every=NEVER, **options))


def load_step(base: Path) -> float:
    """Load the newest checkpoint as a new job, and return its step."""
    return load_newest_step(open_run(base))


def job_that_saves(base: Path, *steps: int) -> None:
    directory = open_run(base)
    with suppress(rankless.NoCheckpointError):
        directory.restore(None, state_of(-1), resume=True)
        directory.wait()
    save_steps(directory, *steps)


def stopped_before(owner: Any, name: str, meanwhile: Callable[[], object]) -> Any:
    """Let another job run when this one is about to call a function for the first time."""
    original, has_run = getattr(owner, name), []

    def run_other_first(*args: Any, **options: Any) -> Any:
        if not has_run:
            has_run.append(True)
            meanwhile()
        return original(*args, **options)

    return mock.patch.object(owner, name, run_other_first)


@pytest.mark.parametrize(
    ("owner", "name"), [(TierJob, "take_over"), (tier_generations, "list_offers"), (TierJob, "begin_incarnation")]
)
def test_a_load_that_was_stopped_while_another_job_went_on_takes_nothing_from_it(
    tmp_path: Path, owner: Any, name: str
) -> None:
    run_killed_job(job_that_saves, tmp_path, 1, 2)
    with (
        stopped_before(owner, name, lambda: run_killed_job(job_that_saves, tmp_path, 3, 4)),
        pytest.raises(rankless.StateError, match="another job has continued the run"),
    ):
        open_run(tmp_path).restore(None, state_of(-1), resume=True)
    assert run_killed_job(load_step, tmp_path) == 4


@pytest.mark.parametrize("name", ["plan_save", "take_slot"])
def test_a_first_save_that_was_stopped_while_another_job_went_on_takes_nothing_from_it(
    tmp_path: Path, name: str
) -> None:
    directory = open_run(tmp_path)
    with pytest.raises(rankless.NoCheckpointError):
        directory.restore(None, state_of(-1), resume=True)
    with (
        stopped_before(TierJob, name, lambda: run_killed_job(job_that_saves, tmp_path, 3, 4)),
        pytest.raises(rankless.StateError, match="another job has continued the run"),
    ):
        save_steps(directory, 1)
    assert run_killed_job(load_step, tmp_path) == 4


def test_a_load_sees_all_that_an_earlier_job_completes_before_it_looks(tmp_path: Path) -> None:
    older = open_run(tmp_path)
    save_steps(older, 1, 2)
    refused: list[str] = []

    def save_more() -> None:
        try:
            save_steps(older, 3, 4, 5)
        except rankless.StateError as error:
            refused.append(str(error))

    listed = tier_generations.list_offers

    def list_and_wait(*args: Any) -> Any:
        offers = listed(*args)
        save_more()
        return offers

    assert older._tier is not None
    newer = open_run(tmp_path)
    newer._tier = TierJob(tmp_path / "tier", tmp_path / "run")
    loaded = state_of(-1)
    with mock.patch.object(tier_generations, "list_offers", list_and_wait):
        assert newer.restore(None, loaded, resume=True).step == 2
    assert torch.equal(loaded["w"], state_of(2)["w"])
    assert refused
    newer.wait()


def test_from_the_beginning_of_a_load_an_earlier_job_drains_nothing(tmp_path: Path) -> None:
    older = rankless.RunDirectory(tmp_path / "run", local=tmp_path / "tier", async_save=True)
    older.save("step_1", state_of(1), step=1)
    older.wait()
    with stopped_before(RunFolderOutput, "_publish", lambda: run_killed_job(_fail_to_load, tmp_path)):
        older.save("step_2", state_of(2), step=2)
        with pytest.raises(rankless.StateError, match="another job has continued the run"):
            older.wait()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["step_1"]


def _fail_to_load(base: Path) -> None:
    with pytest.raises(rankless.MismatchError):
        open_run(base).restore(None, {"other": torch.zeros(3)}, resume=True)


def test_a_job_goes_on_after_a_load_that_failed(tmp_path: Path) -> None:
    directory = open_run(tmp_path)
    save_steps(directory, 1, 2)
    with pytest.raises(rankless.MismatchError):
        directory.restore(None, {"other": torch.zeros(3)}, resume=True)
    save_steps(directory, 3)
    directory.finalize()
    assert [info.tag for info in directory.list()] == ["step_3"]
    assert run_killed_job(load_step, tmp_path) == 3


# ---------------------------------------------------------------------------------------------------------------
# Copies that fail


def _open_with_copies(base: str) -> rankless.RunDirectory:
    local = rankless.LocalTier(f"{base}/host{dist.get_rank()}", copies=1, drain_every=NEVER)
    return rankless.RunDirectory(f"{base}/run", local=local)


def _save_and_fail_to_copy(base: str, error: type[Exception], failing: list[int], last: int) -> None:
    directory = _open_with_copies(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, last + 1):
            with (
                mock.patch.object(PartCopies, "make", side_effect=error("failed")) if step in failing else nullcontext()
            ):
                save_steps(directory, step)


def _load_from_copies(base: str) -> tuple[float | None, str]:
    loaded = state_of(-1)
    restored = _open_with_copies(base).restore(None, loaded, resume=True)
    assert torch.equal(loaded["w"], state_of(int(restored.step or 0))["w"])
    return restored.step, restored.source


@pytest.mark.parametrize(("failing", "last", "expected"), [([3], 3, 2), ([3, 4, 5], 5, 2), ([3, 4], 5, 5)])
def test_if_a_rank_fails_in_the_copies_the_generation_before_survives_the_loss_of_its_host(
    ranks: Ranks, tmp_path: Path, failing: list[int], last: int, expected: int
) -> None:
    ranks(3, _save_and_fail_to_copy, str(tmp_path), RankFailedError, failing, last)
    shutil.rmtree(tmp_path / "host1")
    assert ranks(3, _load_from_copies, str(tmp_path)) == [(expected, "local tier")] * 3


def test_without_a_lost_host_the_newest_generation_is_loaded_although_it_has_no_copies(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(3, _save_and_fail_to_copy, str(tmp_path), RankFailedError, [3], 3)
    assert ranks(3, _load_from_copies, str(tmp_path)) == [(3, "local tier")] * 3


def test_copies_that_find_no_memory_leave_no_older_generation_that_takes_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, _save_and_fail_to_copy, str(tmp_path), SpaceShortageError, [3], 3)
    parts = [path.name for path in tmp_path.glob("host*/*.part")]
    assert len({name.partition("-of-")[0][:30] for name in parts}) == 1


# ---------------------------------------------------------------------------------------------------------------
# A checkpoint that an earlier job publishes when another one has gone on


def _open_on_host(base: Path, host: str, **options: Any) -> rankless.RunDirectory:
    return rankless.RunDirectory(base / "run", local=rankless.LocalTier(base / host, **options))


def _load_and_save_on_other_host(base: Path, *steps: int) -> None:
    directory = _open_on_host(base, "other", drain_every=NEVER)
    directory.restore(None, state_of(-1), resume=True)
    save_steps(directory, *steps)


def _load_on_other_host(base: Path) -> float | None:
    directory = _open_on_host(base, "other")
    step = directory.restore(None, state_of(-1), resume=True).step
    directory.wait()
    return step


def test_what_an_earlier_job_publishes_late_is_withdrawn(tmp_path: Path) -> None:
    """It was stopped between its last look at the history and the rename. The other job lost its host and went back."""
    directory = _open_on_host(tmp_path, "host", drain_every=5)
    directory.save("step_1", state_of(1), step=1, forced=True)
    save_steps(directory, 2, 3, 4, 5)
    with (
        stopped_before(PendingDirectory, "publish", lambda: run_killed_job(_load_and_save_on_other_host, tmp_path, 20)),
        pytest.raises(rankless.StateError, match="another job has continued the run"),
    ):
        save_steps(directory, 6)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["step_1"]
    assert run_killed_job(_load_on_other_host, tmp_path) == 20


def test_what_an_earlier_job_replaces_late_gets_its_name_back(tmp_path: Path) -> None:
    directory = _open_on_host(tmp_path, "host", drain_every=NEVER)
    directory.save("last", state_of(1), step=1, forced=True)
    directory.save("last", state_of(2), step=2, overwrite=True)
    with (
        stopped_before(PendingDirectory, "replace", lambda: run_killed_job(_load_and_save_on_other_host, tmp_path, 20)),
        pytest.raises(rankless.StateError, match="another job has continued the run"),
    ):
        directory.save("last", state_of(3), step=3, overwrite=True, forced=True)
    assert [(info.tag, info.step) for info in rankless.list_checkpoints(tmp_path / "run")] == [("last", 1)]
    assert run_killed_job(_load_on_other_host, tmp_path) == 20


def test_what_an_earlier_job_was_draining_after_its_load_is_withdrawn(tmp_path: Path) -> None:
    run_killed_job(_save_on_host, tmp_path)
    with stopped_before(
        PendingDirectory, "publish", lambda: run_killed_job(_load_and_save_on_other_host, tmp_path, 20)
    ):
        directory = _open_on_host(tmp_path, "host")
        assert directory.restore(None, state_of(-1), resume=True).step == 3
        with pytest.raises(rankless.StateError, match="another job has continued the run"):
            directory.wait()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["step_1"]
    assert run_killed_job(_load_on_other_host, tmp_path) == 20


def test_a_job_that_was_replaced_right_after_its_load_says_so(tmp_path: Path) -> None:
    """What it was about to drain is gone, because the other job has saved since."""
    run_killed_job(job_that_saves, tmp_path, 1)
    directory = open_run(tmp_path)
    with (
        stopped_before(GenerationContent, "_map_parts", lambda: run_killed_job(job_that_saves, tmp_path, 2, 3)),
        pytest.raises(rankless.StateError, match="another job has continued the run"),
    ):
        directory.restore(None, state_of(-1), resume=True)
    assert run_killed_job(load_step, tmp_path) == 3


def _save_on_host(base: Path) -> None:
    directory = _open_on_host(base, "host", drain_every=NEVER)
    directory.save("step_1", state_of(1), step=1, forced=True)
    save_steps(directory, 2, 3)


def test_a_late_checkpoint_from_which_the_other_job_continued_stays(tmp_path: Path) -> None:
    directory = open_run(tmp_path)
    save_steps(directory, 1)
    with (
        stopped_before(PendingDirectory, "publish", lambda: run_killed_job(_begin_from_tier, tmp_path)),
        pytest.raises(rankless.StateError, match="another job has continued the run"),
    ):
        directory.save("step_2", state_of(2), step=2, forced=True)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["step_2"]


def _begin_from_tier(base: Path) -> None:
    """Load step 2, and be killed before it is drained."""
    with mock.patch.object(GenerationContent, "follow_up", side_effect=rankless.StateError("killed")):
        assert open_run(base).restore(None, state_of(-1), resume=True).step == 2


def test_a_step_is_saved_again_after_what_was_abandoned_has_been_removed(tmp_path: Path) -> None:
    """The tier knew the tag from the load, which went back; another job's policy has removed the checkpoint since."""
    save_steps(rankless.RunDirectory(tmp_path / "run"), 1, 2)
    directory = open_run(tmp_path)
    with pytest.warns(UserWarning, match="goes back to 'step_1'"):
        directory.restore("step_1", state_of(-1), resume=True)
    shutil.rmtree(tmp_path / "run/step_2")
    save_steps(directory, 2)
    directory.wait()
    assert load_step(tmp_path) == 2


def open_drained(base: Path, **options: Any) -> rankless.RunDirectory:
    return rankless.RunDirectory(base / "run", local=rankless.LocalTier(base / "tier"), **options)


def list_tags(base: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(base / "run")]


def test_an_object_whose_state_another_one_of_its_process_has_abandoned_saves_nothing(tmp_path: Path) -> None:
    """As without a tier: else the abandoned branch would be the latest again."""
    older, newer = open_drained(tmp_path), open_drained(tmp_path)
    save_steps(older, 1, 2, 3)
    with pytest.warns(UserWarning, match="goes back to 'step_1'"):
        newer.restore("step_1", state_of(-1), resume=True)
    save_steps(newer, 2)
    with pytest.raises(rankless.SupersededError, match="was continued from an earlier checkpoint"):
        save_steps(older, 4)
    save_steps(newer, 3)
    assert load_newest_step(open_drained(tmp_path)) == 3
    assert "step_4" not in list_tags(tmp_path)


def test_an_object_of_the_process_whose_state_the_other_one_goes_on_from_may_save(tmp_path: Path) -> None:
    older, newer = open_drained(tmp_path), open_drained(tmp_path)
    save_steps(older, 1)
    newer.restore(None, state_of(-1), resume=True)
    save_steps(newer, 2)
    save_steps(older, 3)
    assert load_newest_step(open_drained(tmp_path)) == 3


def test_objects_of_a_process_that_have_loaded_nothing_share_its_run(tmp_path: Path) -> None:
    """A tier holds one run. Without a tier each would begin its own."""
    first, second = open_drained(tmp_path, keep=2), open_drained(tmp_path, keep=2)
    save_steps(first, 1, 2)
    save_steps(second, 3)
    save_steps(first, 4)
    assert list_tags(tmp_path) == ["step_3", "step_4"]
    assert load_newest_step(open_drained(tmp_path)) == 4


def test_an_object_is_refused_while_another_one_goes_on_with_another_run_in_the_tier(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "other", state_of(7), step=7)
    first, second = open_drained(tmp_path), open_drained(tmp_path)
    save_steps(first, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.restore("other", state_of(-1), resume=True)
    save_steps(second, 9)
    with pytest.raises(rankless.StateError, match="goes on with another run in the local tier"):
        save_steps(first, 10)
    assert load_newest_step(open_drained(tmp_path)) == 9


def _save_on_two_hosts(base: str) -> None:
    rank = dist.get_rank()
    local = rankless.LocalTier(f"{base}/host_{rank}", copies=0, drain_every=NEVER)
    rankless.RunDirectory(f"{base}/run", local=local).save("step_1", state_of(1), step=1)


def test_a_job_that_finds_only_parts_of_a_generation_may_begin_anew(ranks: Ranks, tmp_path: Path) -> None:
    """It has looked, and nothing can bring the lost parts back. A job that has not looked is refused."""
    ranks(2, _save_on_two_hosts, str(tmp_path))
    shutil.rmtree(tmp_path / "host_1")

    def open_again() -> rankless.RunDirectory:
        return rankless.RunDirectory(tmp_path / "run", local=rankless.LocalTier(tmp_path / "host_0"))

    with pytest.raises(rankless.StateError, match="was not loaded: load it first"):
        save_steps(open_again(), 2)
    directory = open_again()
    with pytest.raises(rankless.NoCheckpointError):
        directory.restore(None, state_of(-1), resume=True)
    save_steps(directory, 2)
    assert load_newest_step(open_again()) == 2


def job_with_every_second_drained(base: Path, *steps: int) -> None:
    save_steps(rankless.RunDirectory(base / "run", local=rankless.LocalTier(base / "tier", drain_every=2)), *steps)


def test_a_job_without_the_tier_hears_that_it_may_pass_over_what_the_tier_has(tmp_path: Path) -> None:
    run_killed_job(job_with_every_second_drained, tmp_path, 1, 2, 3)
    with pytest.warns(UserWarning, match=f"had a local tier, {tmp_path / 'tier'}. If it was killed"):
        rankless.RunDirectory(tmp_path / "run").restore(None, state_of(-1), resume=True)
    directory = rankless.RunDirectory(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        directory.restore(None, state_of(-1), resume=True)  # the job before had none
        save_steps(directory, 4)


def test_a_job_that_names_a_checkpoint_means_to_pass_over_later_ones(tmp_path: Path) -> None:
    run_killed_job(job_with_every_second_drained, tmp_path, 1, 2, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*had a local tier")
        rankless.RunDirectory(tmp_path / "run").restore("step_2", state_of(-1), resume=True)


def test_the_error_of_a_missing_tag_names_the_checkpoints_of_the_tier(tmp_path: Path) -> None:
    run_killed_job(job_that_saves, tmp_path, 3)
    with pytest.raises(rankless.NoCheckpointError, match=r"'step_2' .*in the local tier there are step_3"):
        open_run(tmp_path).restore("step_2", state_of(-1), resume=True)


def test_a_checkpoint_that_is_replaced_while_it_is_selected_is_looked_for_again(tmp_path: Path) -> None:
    run_killed_job(job_that_saves, tmp_path, 3)
    answers = [rankless.CheckpointReplacedError("replaced"), rankless.NoCheckpointError("missing")]
    with (
        mock.patch.object(selection, "find_checkpoint", side_effect=answers) as find,
        pytest.raises(rankless.NoCheckpointError, match="missing; in the local tier there are step_3"),
    ):
        open_run(tmp_path).restore("step_2", state_of(-1), resume=True)
    assert find.call_count == 2


def test_the_last_drain_of_a_job_says_that_another_one_has_its_tier(tmp_path: Path) -> None:
    """It reads the tier, in which the other job has removed what it does not need. Nothing is corrupt."""
    tier = rankless.LocalTier(tmp_path / "tier", drain_every=100)
    directory = rankless.RunDirectory(tmp_path / "run", local=tier)
    save_steps(directory, 1, 2)
    run_killed_job(job_that_resumes_and_saves, tmp_path, 3, 4)
    with pytest.raises(rankless.SupersededError, match="another job has continued the run"):
        directory.drain()


def job_that_resumes_and_saves(base: Path, *steps: int) -> None:
    with open_drained(base) as directory:
        directory.restore(None, state_of(-1), resume=True)
        save_steps(directory, *steps)
