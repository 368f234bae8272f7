"""Tests that a job goes on in a copy of a run whose newest checkpoint has no manifest and lacks other files.

Somebody has stopped ``cp`` or ``rm``, or the disk of the copy was full.
"""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import TagExistsError
from rankless.run import interrupted_copy
from tests.helpers.fake_s3 import FakeS3

FILES = ("model/model.safetensors", "ranks.json", "ranks.safetensors", "state.json")

#: What may be left without the manifest; a model alone may also be what ``save_model`` has written.
LEFT = [left for count in range(5) for left in itertools.combinations(FILES, count) if left != FILES[:1]]


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), float(step))}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of a run with three steps."""
    directory = rankless.RunDirectory(tmp_path / "run")
    for step in (1, 2, 3):
        directory.save(f"step_{step}", state(step), step=step)
    return shutil.copytree(tmp_path / "run", tmp_path / "copy")


def keep(copied: Path, *names: str) -> None:
    """Leave only some files of the third step. Folders stay, as ``cp`` makes them."""
    for name in {"manifest.json", *FILES} - {*names}:
        (copied / "step_3" / name).unlink()


def go_on(copied: Path, local: Path | None = None, *, is_quiet: bool = True) -> None:
    """Resume at the second step, and save the third one."""
    tier = None if local is None else rankless.LocalTier(local, drain_every=1)
    directory, found = rankless.RunDirectory(copied, local=tier), state(0)
    assert directory.restore(None, found, resume=True).step == 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore" if is_quiet else "always", message=".* had no manifest")
        directory.save("step_3", state(3), step=3)
        directory.finalize()
    loaded = state(0)
    assert rankless.restore(copied, model=loaded).step == 3
    assert torch.equal(loaded["w"], state(3)["w"])


def hidden(copied: Path) -> list[Path]:
    return [*copied.glob(".step_3.*.corrupt")]


@pytest.mark.parametrize("left", LEFT, ids=lambda left: ", ".join(left) or "nothing")
def test_the_step_is_saved_again_and_what_was_left_is_kept(copied: Path, left: tuple[str, ...]) -> None:
    keep(copied, *left)
    with pytest.warns(UserWarning, match=r"step_3 had no manifest.*kept as \.step_3.*prune --leftovers"):
        go_on(copied, is_quiet=False)
    [folder] = hidden(copied)
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {*left}
    assert CliRunner().invoke(app, ["prune", str(copied), "--leftovers"]).exit_code == 0
    assert hidden(copied) == []


def test_a_job_with_a_tier_goes_on_too(copied: Path, tmp_path: Path) -> None:
    keep(copied, "state.json", "model/model.safetensors")
    go_on(copied, tmp_path / "tier")
    assert len(hidden(copied)) == 1


def test_an_overwrite_keeps_what_was_left(copied: Path) -> None:
    keep(copied, "state.json", "model/model.safetensors")
    with pytest.warns(UserWarning, match="had no manifest"):
        rankless.RunDirectory(copied).save("step_3", state(3), step=3, overwrite=True)
    assert len(hidden(copied)) == 1


@pytest.mark.parametrize("size", [0, 4, 100, 4200])
def test_the_last_file_may_be_cut(copied: Path, size: int) -> None:
    keep(copied, "ranks.json", "model/model.safetensors")
    os.truncate(copied / "step_3/model/model.safetensors", size)
    go_on(copied)


@pytest.mark.parametrize("size", [0, 1, 300, -1])
@pytest.mark.parametrize("tag", [None, "step_2"])
def test_the_manifest_may_be_cut(copied: Path, size: int, tag: str | None) -> None:
    manifest = copied / "step_3/manifest.json"
    os.truncate(manifest, size % manifest.stat().st_size)
    directory, found = rankless.RunDirectory(copied), state(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert directory.restore(tag, found, resume=True).step == 2
        directory.save("step_3", state(3), step=3)
    assert rankless.restore(copied, model=state(0)).step == 3


def test_a_manifest_that_is_wrong_elsewhere_stays(copied: Path) -> None:
    """A disk may read one bit wrong: the checkpoint may be intact."""
    manifest = copied / "step_3/manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    directory = rankless.RunDirectory(copied)
    directory.restore("step_2", state(0), resume=True)
    for overwrite, match in ((False, "exists already"), (True, "it is not known what .*step_3 is")):
        with pytest.raises(TagExistsError, match=match):
            directory.save("step_3", state(3), step=3, overwrite=overwrite)
    assert hidden(copied) == []


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "model/model.safetensors"])
def test_a_file_that_rsync_had_not_written_yet(copied: Path, name: str) -> None:
    file = copied / "step_3" / name
    file.rename(file.with_name(f".{file.name}.Ab12Cd"))
    (copied / "step_3/manifest.json").unlink(missing_ok=True)
    go_on(copied)
    assert len(hidden(copied)) == 1


def test_only_the_file_of_statistics_is_left(copied: Path) -> None:
    shutil.rmtree(copied / "step_3")
    (copied / "step_3").mkdir()
    (copied / "step_3/.statistics").write_bytes(b"")
    go_on(copied)
    assert len(hidden(copied)) == 1


def test_an_empty_folder_is_removed_without_a_word(copied: Path) -> None:
    shutil.rmtree(copied / "step_3")
    (copied / "step_3").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on(copied)
    assert hidden(copied) == []


def test_files_of_the_job_and_of_its_model(tmp_path: Path) -> None:
    """The next save of the same step has the same files, and shows that they are no notes of somebody."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    model, files = transformers.LlamaForCausalLM(config), {"trainer_state.json": b"{}", "tokenizer.model": b"1"}
    directory = rankless.RunDirectory(tmp_path)
    for step in (1, 2):
        directory.save(f"step_{step}", model, step=step, files=files)
    (tmp_path / "step_2/manifest.json").unlink()
    assert (tmp_path / "step_2/model/generation_config.json").exists()
    directory = rankless.RunDirectory(tmp_path)
    directory.restore(None, model, resume=True)
    with pytest.raises(TagExistsError, match="no checkpoint"):
        directory.save("step_2", model, step=2)
    with pytest.warns(UserWarning, match="had no manifest"):
        directory.save("step_2", model, step=2, files=files)
    assert rankless.list_checkpoints(tmp_path)[-1].status == "complete"


@pytest.mark.parametrize("size", [0, 300])
def test_a_drain_writes_over_a_manifest_that_is_cut(copied: Path, tmp_path: Path, size: int) -> None:
    shutil.rmtree(copied / "step_3")
    tier = rankless.LocalTier(tmp_path / "tier", drain_every=10)
    directory = rankless.RunDirectory(copied, local=tier)
    directory.restore(None, state(0), resume=True)
    directory.save("step_3", state(3), step=3).wait_local()
    shutil.copytree(copied / "step_2", copied / "step_3")
    os.truncate(copied / "step_3/manifest.json", size)
    with pytest.warns(UserWarning, match="had no manifest"):
        directory.finalize()
    loaded = state(0)
    assert rankless.restore(copied, model=loaded).step == 3
    assert torch.equal(loaded["w"], state(3)["w"])


def put_notes(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def put_values(folder: Path) -> None:
    (folder / "model/notes.json").write_text("{}")


def put_link(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to("/etc/hostname")


def put_other_tensors(folder: Path) -> None:
    (folder / "model/model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")


def put_state(folder: Path) -> None:
    (folder / "state.json").write_text('{"city": "Rome"}')


def put_silly_name(folder: Path) -> None:
    (folder / ".nfs_mount_notes").write_text("mine")


def put_model_next_to_it(folder: Path) -> None:
    shutil.rmtree(folder)
    rankless.save_model(state(3), folder / "state_dict.safetensors")


def put_scheduler_next_to_it(folder: Path) -> None:
    (folder / "state.json").unlink()
    optimizer = torch.optim.SGD([torch.zeros(1)])
    rankless.save_lr_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), folder / "state.json")


@pytest.mark.parametrize(
    "put",
    [
        *(put_notes, put_values, put_link, put_other_tensors, put_state, put_model_next_to_it),
        *(put_scheduler_next_to_it, put_silly_name),
    ],
)
def test_what_somebody_has_put_there_stays(copied: Path, put: Callable[[Path], None]) -> None:
    keep(copied, *FILES)
    put(copied / "step_3")
    before = sorted((copied / "step_3").rglob("*"))
    with pytest.raises(TagExistsError, match="step_3 exists already"):
        go_on(copied)
    assert sorted((copied / "step_3").rglob("*")) == before
    assert hidden(copied) == []


def test_components_that_were_saved_under_the_tag_stay(copied: Path) -> None:
    shutil.rmtree(copied / "step_3")
    rankless.save_model(state(3), copied / "step_3/model", shard=True)
    with pytest.raises(TagExistsError, match="step_3 exists already"):
        go_on(copied)
    loaded = state(0)
    rankless.load_model(loaded, copied / "step_3/model")
    assert torch.equal(loaded["w"], state(3)["w"])


def test_a_copy_that_is_completed_meanwhile_keeps_its_name(copied: Path, tmp_path: Path) -> None:
    keep(copied, *FILES)
    looks = iter([True, True])

    def look(folder: Path, new_names: Collection[str]) -> bool:
        if next(looks, False):
            return True
        shutil.copy(tmp_path / "run/step_3/manifest.json", folder)
        return False

    with (
        mock.patch.object(interrupted_copy, "is_interrupted_copy", look),
        pytest.raises(TagExistsError, match="step_3"),
    ):
        go_on(copied)
    assert hidden(copied) == []
    assert rankless.restore(copied, "step_3", model=state(0)).step == 3


def check_message(path: Any, tier: rankless.LocalTier | None = None) -> None:
    directory = rankless.RunDirectory(path, local=tier)
    directory.save("step_1", state(1), step=1).wait_local()
    with pytest.raises(TagExistsError, match="exists already; choose another tag, or pass overwrite=True"):
        directory.save("step_1", state(1), step=1)
    directory.finalize()


@pytest.mark.parametrize("has_tier", [False, True])
def test_the_error_says_that_a_checkpoint_may_be_overwritten(tmp_path: Path, *, has_tier: bool) -> None:
    check_message(tmp_path / "run", rankless.LocalTier(tmp_path / "tier", drain_every=10) if has_tier else None)


def test_the_error_says_so_in_a_bucket() -> None:
    fake = FakeS3()
    with fake.connected():
        check_message(fake.store_at("http://fake").path("bucket/run"))
