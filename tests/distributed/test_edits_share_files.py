"""Edits share the files in which they change no byte: links of the source, complete without it, on any ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError
from tests.helpers.commands import invoke
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.edit_oracle import Lm, Oracle, make_optimizer, train_steps
from tests.helpers.pool import Ranks

#: So few bytes that each matrix of the small model has a file of its own.
LIMIT = 300


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = Lm()
    optimizer = make_optimizer(model)
    train_steps(model, optimizer, [1])
    options = rankless.SaveOptions(max_shard_size=LIMIT)
    rankless.save_checkpoint(tmp_path / "run", "step_1", model, optimizer, step=1, options=options)
    return tmp_path / "run"


def edit(source: str, output: str, edits: list[str]) -> None:
    rankless.edit(source, output, edits, max_shard_size=LIMIT)


def data_files(checkpoint: Path) -> dict[str, Path]:
    return {str(file.relative_to(checkpoint)): file for file in checkpoint.rglob("*.safetensors")}


def shared_files(output: Path, source: Path) -> set[str]:
    """The files of the output that are files of the source, whatever their names are there."""
    inodes = {file.stat().st_ino for file in data_files(source).values()}
    return {name for name, file in data_files(output).items() if file.stat().st_ino in inodes}


@pytest.mark.parametrize("count", [1, 3])
def test_only_what_changes_is_written(ranks: Ranks, run: Path, tmp_path: Path, count: int) -> None:
    ranks(count, edit, str(run), str(tmp_path / "out"), ["resize-vocab 12"])
    apart = data_files(tmp_path / "out").keys() - shared_files(tmp_path / "out", run / "step_1")
    changed = {name for name, file in data_files(tmp_path / "out").items() if file.stat().st_mode & 0o200}
    assert apart == changed
    assert 0 < len(apart) < len(data_files(tmp_path / "out")) / 2
    expected = Oracle.read(run / "step_1")
    expected.resize(12, "mean")
    shutil.rmtree(run)
    Oracle.read(tmp_path / "out").assert_equals(expected)
    assert invoke("verify", tmp_path / "out").exit_code == 0


def test_files_are_shared_under_other_names(run: Path, tmp_path: Path) -> None:
    edit(str(run), str(tmp_path / "out"), ["layers keep=0,1"])
    shared = shared_files(tmp_path / "out", run / "step_1")
    assert {"model/model-00001-of-00004.safetensors", "model/model-00003-of-00004.safetensors"} <= shared
    expected = Oracle.read(run / "step_1")
    expected.reorder([0, 1])
    Oracle.read(tmp_path / "out").assert_equals(expected)


def test_a_file_with_the_same_layout_and_other_contents_is_not_shared(run: Path, tmp_path: Path) -> None:
    edit(str(run), str(tmp_path / "out"), ["layers order=2,1,0"])
    layers = [f"model/model-0000{number}-of-00006.safetensors" for number in (2, 3, 4)]
    assert shared_files(tmp_path / "out", run / "step_1").intersection(layers) == {layers[1]}
    expected = Oracle.read(run / "step_1")
    expected.reorder([2, 1, 0])
    Oracle.read(tmp_path / "out").assert_equals(expected)


def test_no_file_of_weights_is_shared_if_all_change(run: Path, tmp_path: Path) -> None:
    edit(str(run), str(tmp_path / "out"), ["cast bfloat16"])
    assert not [name for name in shared_files(tmp_path / "out", run / "step_1") if name.startswith("model/")]


def test_on_another_file_system_all_is_written(run: Path, tmp_path: Path) -> None:
    output = Path("/dev/shm") / f"rankless-{tmp_path.name}-{tmp_path.stat().st_ino}"
    try:
        edit(str(run), str(output), ["resize-vocab 12"])
        assert {file.stat().st_nlink for file in data_files(output).values()} == {1}
        assert invoke("verify", output).exit_code == 0
    finally:
        shutil.rmtree(output, ignore_errors=True)


def test_other_formats_are_files_of_their_own(run: Path, tmp_path: Path) -> None:
    rankless.edit(run, tmp_path / "hf", ["resize-vocab 12"], to="hf", max_shard_size=LIMIT)
    assert {file.stat().st_nlink for file in data_files(tmp_path / "hf").values()} == {1}


def test_a_shared_file_that_is_corrupt_is_found_by_the_load(run: Path, tmp_path: Path) -> None:
    file = data_files(run / "step_1")["model/model-00003-of-00006.safetensors"]
    flip_tensor_bit(file, "layers.1.mlp.up_proj.weight")
    edit(str(run), str(tmp_path / "out"), ["resize-vocab 12"])
    assert "model/model-00003-of-00006.safetensors" in shared_files(tmp_path / "out", run / "step_1")
    with pytest.raises(CorruptCheckpointError, match="model-00003"):
        rankless.load_checkpoint(tmp_path / "out", model=Lm(12))
    flip_tensor_bit(run / "step_1/model/model-00001-of-00006.safetensors", "embed_tokens.weight")
    with pytest.raises(CorruptCheckpointError):
        edit(str(run), str(tmp_path / "second"), ["resize-vocab 12"])
    assert not (tmp_path / "second").exists()
