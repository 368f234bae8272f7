"""A drain shares files with a checkpoint that an earlier job has saved: only those with the bytes of the tier."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import StorageError
from rankless.formats.safetensors import SafetensorsFile
from rankless.save import folder_output
from tests.promises.places import in_killed_job


class Model(torch.nn.Module):
    """A frozen parameter, in a file of its own, and a trained one."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.arange(30_000.0), requires_grad=False)
        self.trained = torch.nn.Parameter(torch.full((300,), value))


def save_into_tier(folder: Path, step: int, *, drains: bool = False, **options: object) -> None:
    """Save in a job of its own, which is killed then."""
    tier = rankless.LocalTier(folder / "tier", drain_every=1 if drains else 10**6)
    directory = rankless.RunDirectory(folder / "run", local=tier, frozen="apart", **options)  # type: ignore[arg-type]
    if rankless.has_checkpoint(folder / "run"):
        directory.restore(None, Model(-1.0), resume=True)
    directory.save(f"step_{step}", Model(float(step)), step=step)
    directory.wait() if not drains else directory.finalize()


def drain(folder: Path) -> None:
    rankless.drain(folder / "run", folder / "tier")


def frozen_file(folder: Path, step: int) -> Path:
    files = (folder / f"run/step_{step}/model").glob("*.safetensors")
    return max(files, key=lambda file: file.stat().st_size)


def check(folder: Path, step: int) -> None:
    model = Model(-1.0)
    rankless.load_checkpoint(folder / "run", f"step_{step}", model)
    assert torch.equal(model.frozen, torch.arange(30_000.0))
    assert bool((model.trained == step).all())
    assert not [found for found in rankless.open(folder / f"run/step_{step}").verify() if found.problem]


@pytest.fixture(autouse=True)
def shares_little() -> object:
    with mock.patch.object(folder_output, "_MIN_SHARED", 0):
        yield


def flip(path: Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def replace(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-500:] = bytes(500)
    path.unlink()
    path.write_bytes(data)


def test_the_file_of_what_is_frozen_is_shared(tmp_path: Path) -> None:
    in_killed_job(save_into_tier, tmp_path, 1, drains=True)
    in_killed_job(save_into_tier, tmp_path, 2)
    drain(tmp_path)
    assert frozen_file(tmp_path, 1).samefile(frozen_file(tmp_path, 2))
    check(tmp_path, 2)


@pytest.mark.parametrize("damage", [flip, replace])
def test_a_file_that_is_corrupt_on_the_disk_is_not_shared(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    in_killed_job(save_into_tier, tmp_path, 1, drains=True)
    in_killed_job(save_into_tier, tmp_path, 2)
    damage(frozen_file(tmp_path, 1))
    drain(tmp_path)
    assert not frozen_file(tmp_path, 1).samefile(frozen_file(tmp_path, 2))
    check(tmp_path, 2)


def test_a_file_whose_header_cannot_be_read_is_not_shared(tmp_path: Path) -> None:
    in_killed_job(save_into_tier, tmp_path, 1, drains=True)
    in_killed_job(save_into_tier, tmp_path, 2)
    opened = SafetensorsFile.open

    def fail_once(path: Path, *arguments: object) -> SafetensorsFile:
        if ".partial" in str(path):
            raise StorageError(5, "a bad sector")
        return opened(path, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(SafetensorsFile, "open", fail_once):
        drain(tmp_path)
    check(tmp_path, 2)


@pytest.mark.parametrize("options", [{"incremental": False}, {"keep_full_every": 1}])
def test_a_job_that_writes_each_checkpoint_in_full_does_so_in_its_drains(
    tmp_path: Path, options: dict[str, object]
) -> None:
    in_killed_job(save_into_tier, tmp_path, 1, drains=True, **options)
    in_killed_job(save_into_tier, tmp_path, 2, **options)
    drain(tmp_path)
    assert not frozen_file(tmp_path, 1).samefile(frozen_file(tmp_path, 2))


def test_one_of_so_many_checkpoints_is_full_whatever_numbers_are_missing(tmp_path: Path) -> None:
    """Each job takes a number of the order, too. So only every other number is a checkpoint."""
    for step in range(1, 8):
        in_killed_job(save_into_tier, tmp_path, step, keep_full_every=4)
        drain(tmp_path)
    inodes = [frozen_file(tmp_path, step).stat().st_ino for step in range(1, 8)]
    longest = max(inodes.count(inode) for inode in inodes)
    assert 1 < longest <= 4
