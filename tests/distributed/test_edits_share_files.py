"""Edits share the files in which they change no byte: links of the source, complete without it, on any ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import CorruptCheckpointError, RankMismatchError, StorageError
from rankless.storage import posix
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


CORRUPT = "model/model-00003-of-00006.safetensors"


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_shared_is_verified(ranks: Ranks, run: Path, tmp_path: Path, count: int) -> None:
    flip_tensor_bit(run / "step_1" / CORRUPT, "layers.1.mlp.up_proj.weight")
    for outcome in ranks.outcomes(count, edit, str(run), str(tmp_path / "out"), ["resize-vocab 12"]):
        assert isinstance(outcome, CorruptCheckpointError)
        assert "model-00003" in str(outcome)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_shared_file_that_is_not_verified_is_by_the_load(run: Path, tmp_path: Path) -> None:
    flip_tensor_bit(run / "step_1" / CORRUPT, "layers.1.mlp.up_proj.weight")
    rankless.edit(run, tmp_path / "out", ["resize-vocab 12"], max_shard_size=LIMIT, verify=False)
    assert CORRUPT in shared_files(tmp_path / "out", run / "step_1")
    with pytest.raises(CorruptCheckpointError, match="model-00003"):
        rankless.load_checkpoint(tmp_path / "out", model=Lm(12))


@pytest.mark.parametrize("verify", [True, False])
def test_a_shared_file_that_is_changed_meanwhile_is_found(run: Path, tmp_path: Path, verify: bool) -> None:
    def change(_: object) -> None:
        with (run / "step_1" / CORRUPT).open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"1234")

    with pytest.raises(CorruptCheckpointError):
        rankless.edit(run, tmp_path / "out", ["resize-vocab 12"], max_shard_size=LIMIT, verify=verify, on_event=change)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_failed_edit_leaves_the_source_as_it_was(run: Path, tmp_path: Path) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    before = {name: file.stat().st_mode for name, file in data_files(run / "step_1").items()}
    with pytest.raises(KeyboardInterrupt):
        rankless.edit(run, tmp_path / "out", ["resize-vocab 12"], max_shard_size=LIMIT, on_event=stop)
    assert {name: file.stat().st_mode for name, file in data_files(run / "step_1").items()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_space_is_needed_for_what_changes(run: Path, tmp_path: Path) -> None:
    edit(str(run), str(tmp_path / "out"), ["resize-vocab 12"])
    files = data_files(tmp_path / "out")
    apart = sum(files[name].stat().st_size for name in files.keys() - shared_files(tmp_path / "out", run / "step_1"))
    with mock.patch.object(posix, "free_bytes", return_value=apart):
        edit(str(run), str(tmp_path / "second"), ["resize-vocab 12"])
    with mock.patch.object(posix, "free_bytes", return_value=1), pytest.raises(StorageError, match="bytes free"):
        edit(str(run), str(tmp_path / "third"), ["resize-vocab 12"])


def edit_apart(source: str, output: str, rank_size: int) -> None:
    rankless.edit(source, f"{output}-{dist.get_rank() * rank_size}", ["cast bfloat16"])


def test_ranks_with_other_arguments_are_named(ranks: Ranks, run: Path, tmp_path: Path) -> None:
    for outcome in ranks.outcomes(2, edit_apart, str(run), str(tmp_path / "out"), 1):
        assert isinstance(outcome, RankMismatchError)
        assert "arguments of the conversion" in str(outcome)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
