"""Tests that a checkpoint that a load found corrupt is renamed when the resumed run saves again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import rankless
from rankless import RunDirectory, api
from rankless.cli.main import app
from rankless.errors import StorageError, TagExistsError
from rankless.ondisk.hidden_names import parse_hidden_name
from rankless.storage import atomic_rename
from tests.golden import reader
from tests.helpers.chrome_traces import ChromeTrace
from tests.helpers.corruption import corrupt_model_of_step
from tests.helpers.pool import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:loaded 'step_")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64,), value)}


@contextmanager
def process() -> Iterator[None]:
    """What the functions remember of earlier loads and saves is gone, as in a new process."""
    with mock.patch.object(api, "_defaults", api._DefaultDirectories()):
        yield


def train(run: Path, stop: int, **options: Any) -> int:
    """The loop of the README, in a process of its own. Returns the step that it went on from."""
    with process():
        model, first = weights(-1.0), 0
        if rankless.has_checkpoint(run):
            first = rankless.load_checkpoint(run, model=model)["step"] + 1
            assert torch.equal(model["w"], weights(float(first - 1))["w"])
        for step in range(first, stop):
            model["w"].fill_(float(step))
            content = {"step": step}
            rankless.save_checkpoint(run, f"step_{step}", model, user_content=content, **options)
        rankless.finalize()
        return first


def tags(run: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(run)]


def hidden(run: Path) -> list[tuple[str, str]]:
    actual = [parse_hidden_name(path.name) for path in sorted(run.iterdir()) if path.name.startswith(".")]
    return [(item.tag, item.state) for item in actual if item is not None]


def cut_manifest(run: Path, step: int) -> None:
    file = run / f"step_{step}/manifest.json"
    file.write_bytes(file.read_bytes()[:-9])


def remove_data(run: Path, step: int) -> None:
    (run / f"step_{step}/model/model.safetensors").unlink()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("spoil", [corrupt_model_of_step, cut_manifest, remove_data])
def test_the_loop_of_the_readme_goes_on_after_a_fallback(
    tmp_path: Path, spoil: Any, async_save: bool, exchanging: None
) -> None:
    train(tmp_path, 3, async_save=async_save)
    spoil(tmp_path, 2)
    assert train(tmp_path, 4, async_save=async_save) == 2
    assert tags(tmp_path) == ["step_0", "step_1", "step_2", "step_3"]
    assert hidden(tmp_path) == [("step_2", "corrupt")]
    assert train(tmp_path, 5, async_save=async_save) == 4
    assert hidden(tmp_path) == [("step_2", "corrupt")]
    for tag in tags(tmp_path):
        reader.read(tmp_path / tag)


def test_it_goes_on_at_every_restart_also_if_it_dies_after_one_save(tmp_path: Path) -> None:
    """Two are corrupt, and the first save after the fallback is all that there is time for."""
    train(tmp_path, 4)
    corrupt_model_of_step(tmp_path, 2)
    corrupt_model_of_step(tmp_path, 3)
    for stop in (3, 4, 5):
        assert train(tmp_path, stop) == stop - 1
    assert tags(tmp_path) == [f"step_{step}" for step in range(5)]
    assert hidden(tmp_path) == [("step_2", "corrupt"), ("step_3", "corrupt")]


def restart_on_ranks(run: str) -> None:
    model = weights(0.0)
    content = rankless.load_checkpoint(run, model=model)
    step = content["step"] + 1
    rankless.save_checkpoint(run, f"step_{step}", model, user_content={"step": step}, keep=9)


def test_all_ranks_go_on_alike(ranks: Ranks, tmp_path: Path) -> None:
    train(tmp_path, 3)
    corrupt_model_of_step(tmp_path, 2)
    ranks(3, restart_on_ranks, str(tmp_path))
    assert tags(tmp_path) == ["step_0", "step_1", "step_2"]
    assert hidden(tmp_path) == [("step_2", "corrupt")]


def test_only_who_fell_back_may_do_so(tmp_path: Path) -> None:
    train(tmp_path, 3)
    corrupt_model_of_step(tmp_path, 2)
    fell_back, other = RunDirectory(tmp_path), RunDirectory(tmp_path)
    fell_back.load(model=weights(0.0))
    other.load("step_1", model=weights(0.0))
    fell_back.save("step_2", weights(9.0))
    assert hidden(tmp_path) == [("step_2", "corrupt")]
    with pytest.warns(UserWarning, match="goes back to 'step_1'"):
        other.save("step_2", weights(8.0))
    assert tags(tmp_path) == ["step_2@2", "step_0", "step_1", "step_2"]


def test_a_sound_one_is_never_moved(tmp_path: Path) -> None:
    """Neither one that another job has saved under the tag, nor one that somebody has repaired."""
    train(tmp_path, 3)
    file = tmp_path / "step_2/model/model.safetensors"
    sound = file.read_bytes()
    corrupt_model_of_step(tmp_path, 2)
    checkpointer = RunDirectory(tmp_path)
    checkpointer.load(model=weights(0.0))
    file.write_bytes(sound)
    checkpointer.save("step_2", weights(9.0))
    assert tags(tmp_path) == ["step_2@1", "step_0", "step_1", "step_2"]
    assert float(rankless.open(tmp_path / "step_2@1")["model/w"][0]) == 2.0
    with process():
        rankless.save_checkpoint(tmp_path, "step_3", weights(7.0))
    with pytest.raises(TagExistsError, match="step_3"):
        checkpointer.save("step_3", weights(9.0))
    assert not hidden(tmp_path)


def test_what_another_job_saves_meanwhile_keeps_the_name(tmp_path: Path, exchanging: None) -> None:
    train(tmp_path, 3)
    corrupt_model_of_step(tmp_path, 2)
    checkpointer = RunDirectory(tmp_path)
    checkpointer.load(model=weights(0.0))
    replace = atomic_rename.exchange_directories

    def others_first(*paths: Path) -> None:
        with mock.patch.object(atomic_rename, "exchange_directories", replace):
            RunDirectory(tmp_path).save("step_2", weights(7.0), overwrite=True)
        replace(*paths)

    with (
        mock.patch.object(atomic_rename, "exchange_directories", others_first),
        pytest.raises(TagExistsError, match="was changed while"),
    ):
        checkpointer.save("step_2", weights(9.0))
    assert float(rankless.open(tmp_path / "step_2")["model/w"][0]) == 7.0
    assert not hidden(tmp_path)


def test_renamed_and_copied_ones_stay(tmp_path: Path) -> None:
    train(tmp_path, 3)
    corrupt_model_of_step(tmp_path, 2)
    (tmp_path / "step_2").rename(tmp_path / "best")
    assert train(tmp_path, 4) == 2
    assert set(tags(tmp_path)) == {"step_0", "step_1", "step_2", "step_3", "best"}
    assert not hidden(tmp_path)


def test_saves_of_other_runs_do_not_look_for_old_checkpoints(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    corrupt_model_of_step(tmp_path / "run", 2)

    def removes_old(run: str) -> bool:
        with rankless.trace(tmp_path / "trace.json"):
            rankless.save_checkpoint(tmp_path / run, "step_2", weights(2.0))
        return "remove old checkpoints" in {each.name for each in ChromeTrace(tmp_path / "trace.json").slices}

    with process():
        rankless.load_checkpoint(tmp_path / "run", model=weights(-1.0))
        assert not removes_old("other")
        assert removes_old("run")


def test_a_save_that_fails_moves_nothing(tmp_path: Path) -> None:
    train(tmp_path, 3)
    corrupt_model_of_step(tmp_path, 2)
    checkpointer = RunDirectory(tmp_path)
    checkpointer.load(model=weights(0.0))
    with (
        mock.patch("rankless.run.pending_dir.atomic_rename.exchange_directories", side_effect=StorageError(5, "no")),
        pytest.raises(StorageError),
    ):
        checkpointer.save("step_2", weights(9.0))
    assert set(tags(tmp_path)) == {"step_0", "step_1", "step_2"}
    assert not hidden(tmp_path)


def test_it_is_a_leftover_that_prune_removes_and_no_save(tmp_path: Path) -> None:
    train(tmp_path, 3)
    corrupt_model_of_step(tmp_path, 2)
    train(tmp_path, 4, keep=3)
    assert hidden(tmp_path) == [("step_2", "corrupt")]  # step_1 is older, and kept
    listed = json.loads(CliRunner().invoke(app, ["ls", str(tmp_path), "--all", "--json"]).output)
    assert [entry["tag"] for entry in listed["leftovers"]] == ["step_2"]
    assert "corrupt" in CliRunner().invoke(app, ["ls", str(tmp_path), "--all"]).output
    train(tmp_path, 6, keep=2)
    assert hidden(tmp_path) == [("step_2", "corrupt")]  # older than all that are kept
    assert CliRunner().invoke(app, ["prune", str(tmp_path), "--leftovers"]).exit_code == 0
    assert not hidden(tmp_path)
    assert tags(tmp_path) == ["step_4", "step_5"]
