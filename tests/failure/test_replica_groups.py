"""Tests of process groups that hold the same state, of which any may save: torchft's replica groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rankless
from rankless.errors import InvalidArgumentError
from tests.helpers.fake_s3 import BUCKET, FakeS3, store_at


@pytest.fixture(params=["folder", "store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "folder":
        yield tmp_path / "run"
        return
    with FakeS3().served() as url:
        yield store_at(url).path(f"{BUCKET}/run")


def open_group(run: Path, **options: int) -> tuple[rankless.Checkpointer, torch.nn.Linear]:
    """Begin, or come back, as one of the groups."""
    model = torch.nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(run, model=model, signals=(), replica_groups=True, **options)
    checkpointer.resume()
    return checkpointer, model


def save(group: tuple[rankless.Checkpointer, torch.nn.Linear], step: int) -> None:
    """Save the state of a step, which all groups have."""
    checkpointer, model = group
    with torch.no_grad():
        model.weight.fill_(step)
    checkpointer.step(step)
    checkpointer.save(overwrite=True)


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


def test_a_local_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="replica_groups=True saves past the local tier"):
        rankless.Checkpointer(tmp_path, replica_groups=True, local=tmp_path / "tier")
