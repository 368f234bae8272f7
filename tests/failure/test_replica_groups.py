"""Tests of process groups that hold the same state, of which any may save: torchft's replica groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import InvalidArgumentError, StateError, SupersededError
from rankless.observe.events import Progress
from rankless.run import claims
from rankless.run.history import Job
from tests.helpers.fake_s3 import BUCKET, FakeS3, store_at
from tests.helpers.killed_jobs import run_killed_job


@pytest.fixture(params=["folder", "store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "folder":
        yield tmp_path / "run"
        return
    with FakeS3().served() as url:
        yield store_at(url).path(f"{BUCKET}/run")


Group = tuple[rankless.Checkpointer, torch.nn.Linear]


def open_group(run: Path | str, *, job: str | None = "job", tag: str | None = None, **options: Any) -> Group:
    """Begin, or come back, as one of the groups."""
    model = torch.nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(run, model=model, signals=(), replica_groups=job, **options)
    checkpointer.resume(tag)
    return checkpointer, model


def save(group: Group, step: int, *, waits: bool = True) -> None:
    """Save the state of a step, which all groups have."""
    checkpointer, model = group
    with torch.no_grad():
        model.weight.fill_(step)
    checkpointer.step(step)
    checkpointer.save(overwrite=True)
    if waits:
        checkpointer.finalize()


def listed(run: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(run)]


def test_any_group_saves_and_all_is_one_run(run: Path) -> None:
    first, second, third = (open_group(run) for _ in range(3))
    for step, group in enumerate((first, second, second, first, third, first), 1):
        save(group, step)
    assert listed(run) == [f"step_{step}" for step in range(1, 7)]
    assert len({info.run for info in rankless.list_checkpoints(run)}) == 1
    assert all(info.is_current for info in rankless.list_checkpoints(run))
    again, model = open_group(run)
    assert again.last_step == 6
    assert float(model.weight.detach()[0, 0]) == 6.0


def test_a_group_that_comes_back_disturbs_no_other_one(run: Path) -> None:
    first, second = open_group(run), open_group(run)
    save(first, 1)
    save(second, 2)
    back = open_group(run)
    assert back[0].last_step == 2
    save(second, 3)
    save(back, 4)
    save(second, 4)  # it has done the step again, which the other group had saved before it failed
    assert listed(run) == ["step_1", "step_2", "step_3", "step_4"]


def test_retention_counts_the_checkpoints_of_all_groups(run: Path) -> None:
    first, second = open_group(run, keep=2), open_group(run, keep=2)
    for step, group in enumerate((first, second, first, second), 1):
        save(group, step)
    assert listed(run) == ["step_3", "step_4"]


def _save_from_group(run: str, *steps: int, **options: Any) -> None:
    """Come back as a group of a process of its own, save, and be killed in a further save."""
    group = open_group(run, **options)
    for step in steps:
        save(group, step)


def test_a_save_that_another_group_overtakes_stays_current(tmp_path: Path) -> None:
    overtaking = [3]

    def overtake(event: object) -> None:
        if isinstance(event, Progress) and event.action == "save" and overtaking:
            run_killed_job(_save_from_group, str(tmp_path), overtaking.pop())

    first = open_group(tmp_path, on_event=overtake)
    first[0].step(2)
    first[0].save()
    assert open_group(tmp_path)[0].last_step == 3
    save(first, 4)
    assert [(info.tag, info.is_current) for info in rankless.list_checkpoints(tmp_path)] == [
        (f"step_{step}", True) for step in range(2, 5)
    ]


def test_a_group_that_was_stopped_replaces_nothing_later(run: Path) -> None:
    first, second = open_group(run, keep=1), open_group(run, keep=1)
    save(first, 1)
    for step in (10, 20):
        save(second, step)
    save(first, 4)  # it has slept since step 4
    assert open_group(run)[0].last_step == 20


def test_a_group_goes_back_for_all_groups(run: Path) -> None:
    first, second = open_group(run), open_group(run)
    for step in range(1, 6):
        save(first if step % 2 else second, step)
    with pytest.warns(UserWarning, match=r"goes back to 'step_2': 3 later"):
        back = open_group(run, tag="step_2")
    other = open_group(run, tag="step_2")  # the same command starts all groups
    for step, group in ((3, back), (4, other)):
        save(group, step)
    assert listed(run) == ["step_3@1", "step_4@1", "step_5", "step_1", "step_2", "step_3", "step_4"]
    assert open_group(run, tag="step_2")[0].last_step == 4


def test_a_group_is_superseded_by_a_rollback_that_it_has_not_loaded(tmp_path: Path) -> None:
    run_killed_job(_save_from_group, str(tmp_path), 1, 2)
    group = open_group(tmp_path)
    save(group, 3)
    assert CliRunner().invoke(app, ["rollback", str(tmp_path), "step_2"]).exit_code == 0
    with pytest.raises(SupersededError, match="by `rankless rollback"):
        save(group, 4)


def test_a_later_job_supersedes_the_groups_of_an_earlier_one(tmp_path: Path) -> None:
    old = open_group(tmp_path)
    save(old, 1)
    run_killed_job(partial(_save_from_group, job="next"), str(tmp_path), 2)
    with pytest.raises(SupersededError, match="another job has continued the run"):
        save(old, 3)
    assert listed(tmp_path) == ["step_1", "step_2"]


def test_another_run_in_the_directory_is_left_alone(run: Path) -> None:
    first, second = open_group(run, keep=2), open_group(run, keep=2)
    save(first, 1)
    with rankless.RunDirectory(run) as other:
        for number in range(3):
            other.save(f"other_{number}", model=torch.nn.Linear(1, 1))
    for step in range(2, 6):
        save(first if step % 2 else second, step)
    assert sorted(listed(run)) == ["other_0", "other_1", "other_2", "step_4", "step_5"]


def _save_unloaded(run: Path, step: int, job: str) -> None:
    directory = rankless.RunDirectory(run, replica_groups=job, keep=1)
    directory.save(f"new_{step}", model=torch.nn.Linear(1, 1), step=step)


def test_a_training_that_has_loaded_nothing_does_not_go_on_with_an_earlier_one(tmp_path: Path) -> None:
    describe_job = claims.describe_job

    def describe_earlier(*arguments: Any) -> Job:
        job = describe_job(*arguments)
        return msgspec.structs.replace(job, time=job.time - 1000)

    with mock.patch.object(claims, "describe_job", describe_earlier):
        for step in range(1, 4):
            save(open_group(tmp_path), step)
    with pytest.raises(StateError, match=r"'job' have saved step 3 .* give the groups of a new job another name"):
        _save_unloaded(tmp_path, 1, "job")
    _save_unloaded(tmp_path, 1, "new")
    assert sorted(listed(tmp_path)) == ["new_1", "step_1", "step_2", "step_3"]


def test_a_group_that_begins_with_others_may_save_a_lower_step(tmp_path: Path) -> None:
    first, second = open_group(tmp_path), open_group(tmp_path)
    save(first, 10)
    save(second, 7)
    save(second, 8)
    assert listed(tmp_path)[-1] == "step_10"
    assert sorted(listed(tmp_path)) == ["step_10", "step_7", "step_8"]


def test_groups_that_begin_at_once_are_one_run(tmp_path: Path) -> None:
    for step in (1, 2):
        _save_unloaded(tmp_path, step, "job")
    assert listed(tmp_path) == ["new_2"]


def test_a_local_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="replica groups save past the local tier"):
        rankless.Checkpointer(tmp_path, replica_groups="job", local=tmp_path / "tier")


@pytest.mark.parametrize("name", [True, "", 3, "a\nb"])
def test_what_is_no_name_of_a_job_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="replica_groups must be the name of the job"):
        rankless.Checkpointer(tmp_path, replica_groups=name)


@pytest.mark.parametrize("step", [float("inf"), float("nan"), -3, 0.5, None])
def test_any_step_is_saved(tmp_path: Path, step: float | None) -> None:
    directory = rankless.RunDirectory(tmp_path, replica_groups="job")
    for tag in ("a", "b"):
        directory.save(tag, model=torch.nn.Linear(1, 1), step=step)
    assert sorted(listed(tmp_path)) == ["a", "b"]
