"""Checkpoints of more files than a process may have open (``ulimit -n``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import rankless
from rankless.errors import StorageError
from rankless.storage.posix import open_to_read
from rankless.storage.writer_pool import WriterPool
from tests.helpers.open_files import count_open_files, few_open_files

#: Files of a checkpoint, and how many a process may open meanwhile.
FILES, FREE = 130, 100

FILE_BYTES = 256


def make_model(value: float) -> torch.nn.ParameterDict:
    return torch.nn.ParameterDict({f"p{n:03d}": torch.full((64,), value + n) for n in range(FILES)})


def assert_equal(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for (name, tensor), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


def save(folder: Path, model: torch.nn.Module) -> None:
    rankless.save_checkpoint(folder / "run", "a", model, max_shard_size=FILE_BYTES)


def save_asynchronously(folder: Path, model: torch.nn.Module) -> None:
    rankless.save_checkpoint(folder / "run", "a", model, max_shard_size=FILE_BYTES, async_save=True).wait()


def save_over_base(folder: Path, model: torch.nn.Module) -> None:
    save(folder, model)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    rankless.save_checkpoint(folder / "run", "b", model, max_shard_size=FILE_BYTES)


def save_model_of_shards(folder: Path, model: torch.nn.Module) -> None:
    rankless.save_model(model, folder / "run", shard=True, max_shard_size=FILE_BYTES)


def convert_to_many(folder: Path, model: torch.nn.Module) -> None:
    rankless.save_checkpoint(folder / "source", "a", model)
    rankless.convert(folder / "source" / "a", folder / "run", to="hf", max_shard_size=FILE_BYTES)


def convert_from_many(folder: Path, model: torch.nn.Module) -> None:
    rankless.save_model(model, folder / "source", shard=True, max_shard_size=FILE_BYTES)
    rankless.convert(folder / "source", folder / "run", to="hf", max_shard_size=FILE_BYTES)


@pytest.mark.parametrize(
    "write",
    [save, save_asynchronously, save_over_base, save_model_of_shards, convert_to_many, convert_from_many],
    ids=lambda write: write.__name__,
)
def test_more_files_than_may_be_open_are_written_and_read(
    tmp_path: Path, write: Callable[[Path, torch.nn.Module], None]
) -> None:
    model, loaded = make_model(1.0), make_model(0.0)
    with few_open_files(FREE):
        write(tmp_path, model)
        assert len(list((tmp_path / "run").rglob("*.safetensors"))) >= FILES
        if write in {save, save_asynchronously, save_over_base}:
            rankless.load_checkpoint(tmp_path / "run", model=loaded)
        else:
            rankless.load_model(loaded, tmp_path / "run")
    assert_equal(loaded, model)


def test_a_process_with_many_sockets_has_fewer_files_for_a_save(tmp_path: Path) -> None:
    model, loaded = make_model(1.0), make_model(0.0)
    with few_open_files(FREE + 400), ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(open_to_read(Path(__file__)))
        save(tmp_path, model)
        rankless.load_checkpoint(tmp_path / "run", model=loaded)
    assert_equal(loaded, model)


def test_a_pool_of_writers_keeps_few_files_open_and_loses_no_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(40)]
    for path in paths:
        path.write_bytes(bytes(2))
    before = count_open_files()
    with few_open_files(FREE), WriterPool(paths) as writers:
        for offset in range(2):
            for number in range(len(paths)):
                writers.write(number, offset, memoryview(bytes([number + offset])))
                assert count_open_files() <= before + FREE // 2
        writers.sync()
    assert count_open_files() == before
    assert [path.read_bytes() for path in paths] == [bytes([number, number + 1]) for number in range(len(paths))]


def test_the_error_about_too_many_open_files_says_what_to_raise(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        few_open_files(1),
        open_to_read(tmp_path / "file"),
        pytest.raises(StorageError, match="ulimit -n"),
        ExitStack() as stack,
    ):
        stack.enter_context(open_to_read(tmp_path / "file"))
