"""A model that is saved where it was saved before: what has not changed stays, and every byte is that of a new save."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.engine.io import equal_files
from rankless.errors import StorageError
from rankless.storage import links_and_clones
from tests.helpers.pool import Ranks
from tests.helpers.simulated_hosts import simulated_host
from tests.helpers.training import train_run

OPTIONS: dict[str, dict[str, Any]] = {
    "model.safetensors": {},
    "model.pt": {},
    "folder": {"shard": True, "max_shard_size": 700},
    "torch": {"shard": True, "max_shard_size": 700, "use_safetensors": False},
}


def inodes_of(path: Path) -> dict[str, int]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.stat().st_ino for file in files if file.suffix != ".json"}


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


def save_twice(folder: Path, layout: str, changes: bool) -> None:
    """Save all forms. Then save them again, after a change of the last parameter if there are ``changes``."""
    rank = dist.get_rank()
    with simulated_host(str(rank // 2), str(folder)):
        run = train_run(layout, "sgd")
        for name, options in OPTIONS.items():
            rankless.save_model(run.model, folder / name, **options)
        dist.barrier()
        before = {name: inodes_of(folder / name) for name in OPTIONS}
        dist.barrier()
        if changes:
            with torch.no_grad():
                list(run.model.parameters())[-1].add_(1.0)
        for number, (name, options) in enumerate(OPTIONS.items()):
            rankless.save_model(run.model, folder / name, async_save=bool(number % 2), **options).wait()
            rankless.save_model(run.model, folder / f"new {name}", **options)
        dist.barrier()
        for name in OPTIONS:
            assert contents(folder / name) == {
                file.removeprefix("new "): data for file, data in contents(folder / f"new {name}").items()
            }
            kept = {file for file, inode in inodes_of(folder / name).items() if before[name].get(file) == inode}
            assert (kept == before[name].keys()) is not changes
            if changes and name in {"folder", "torch"}:
                assert kept  # the files without the parameter


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_ranks_write_only_the_files_that_have_changed(ranks: Ranks, tmp_path: Path, layout: str, changes: bool) -> None:
    ranks(3, save_twice, tmp_path, layout, changes)


def save(path: Path, value: float = 0.0, **options: Any) -> None:
    rankless.save_model({"w": torch.arange(5000.0) + value, "b": torch.zeros(3)}, path, **options)


@pytest.mark.parametrize("offset", [20, -5])
def test_a_file_that_was_changed_in_place_is_written_again(tmp_path: Path, offset: int) -> None:
    """The header of the file, or the last value: its size and its time are as before."""
    path = tmp_path / "m.safetensors"
    save(path)
    data, status = bytearray(path.read_bytes()), path.stat()
    expected = bytes(data)
    data[offset] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    save(path)
    assert path.read_bytes() == expected
    assert path.stat().st_ino != status.st_ino


def test_a_file_of_another_program_with_the_same_tensors_is_written_with_our_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(path)
    expected = path.read_bytes()
    header = expected[: len(expected) - 20012]
    path.write_bytes(header.replace(b"rankless", b"whatever") + expected[len(header) :])
    save(path)
    assert path.read_bytes() == expected


@pytest.mark.parametrize("name", ["m.safetensors", "folder"])
def test_without_links_everything_is_written(tmp_path: Path, name: str) -> None:
    path, options = tmp_path / name, {"shard": name == "folder"}
    save(path, **options)
    before, expected = inodes_of(path), contents(path)
    with mock.patch.object(links_and_clones.os, "link", side_effect=OSError(95, "not supported")):
        save(path, **options)
    assert contents(path) == expected
    assert inodes_of(path).items().isdisjoint(before.items())


@pytest.mark.parametrize("name", ["m.safetensors", "folder"])
def test_a_file_that_is_replaced_after_the_comparison_is_no_part_of_the_save(tmp_path: Path, name: str) -> None:
    """Another job saves meanwhile: the one that ends last wins, as ever."""
    path, options = tmp_path / name, {"shard": name == "folder"}
    save(path, **options)
    find = equal_files.find_equal_files

    def replace_and_find(*arguments: Any) -> Any:
        found = find(*arguments)
        with mock.patch.object(equal_files, "find_equal_files", find):
            save(path, 1.0, **options)
        return found

    with mock.patch.object(equal_files, "find_equal_files", replace_and_find):
        save(path, **options)
    loaded = {"w": torch.zeros(5000), "b": torch.ones(3)}
    rankless.load_model(loaded, path)
    assert torch.equal(loaded["w"], torch.arange(5000.0))


def test_a_file_that_is_changed_before_the_folder_is_published_fails_the_save(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    save(path, shard=True)
    from rankless.components.component_content import ComponentContent

    build = ComponentContent.write_files

    def touch(self: Any, folder: Path) -> Any:
        os.utime(path / "model.safetensors")
        return build(self, folder)

    with mock.patch.object(ComponentContent, "write_files", touch), pytest.raises(StorageError, match="was changed"):
        save(path, shard=True)
    save(path, shard=True)


@pytest.mark.parametrize("name", ["m.safetensors", "folder"])
def test_a_model_in_memory_that_is_mapped_from_the_file_gets_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    """Else the next step of the training would change what was saved."""
    path, options = tmp_path / name, {"shard": name == "folder"}
    save(path, **options)
    file = path if path.is_file() else path / "model.safetensors"
    size = file.stat().st_size
    mapped = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    live = mapped[size - 20012 + 12 :].view(torch.float32) if size % 4 == 0 else mapped
    state = {"w": live, "b": torch.zeros(3)}
    rankless.save_model(state, path, **options)
    mapped[-1] ^= 1
    loaded = {"w": torch.zeros(5000), "b": torch.ones(3)}
    assert rankless.load_model(loaded, path).verified
