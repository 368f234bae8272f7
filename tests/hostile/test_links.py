"""Tests that links out of the opened directory are refused, be it a link of a file, a subdirectory or an index.

Each test first reads the checkpoint, so that the link is what is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import rankless
from rankless.errors import NoCheckpointError, RanklessError, UnsafeNameError
from tests.helpers.bounded_reads import read_checkpoint
from tests.helpers.nxd_files import rank_file_name
from tests.helpers.nxd_files import save_rank_file as save_rank

pytestmark = pytest.mark.filterwarnings("ignore")

W = {"w": torch.arange(4.0)}


def rank_file(folder: Path) -> None:
    folder.mkdir(parents=True)
    torch.save(W, folder / rank_file_name())


def nxd(folder: Path) -> None:
    rank_file(folder / "model")
    torch.save({"state": {0: {"m": torch.ones(4)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}, folder / "optim.pt")
    (folder / "optim").mkdir()
    (folder / "optim.pt").rename(folder / "optim" / rank_file_name())
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")


def nxd_xser(folder: Path) -> None:
    (folder / "model").mkdir(parents=True)
    save_rank(folder / "model" / rank_file_name(), W)


def nxd_legacy(folder: Path) -> None:
    (folder / "tp_rank_00_pp_rank_00").mkdir(parents=True)
    torch.save({"model": W}, folder / "tp_rank_00_pp_rank_00" / "checkpoint.pt")


def index(folder: Path, file: str, **metadata: str) -> str:
    return json.dumps({"metadata": {"total_size": 16, **metadata}, "weight_map": {"w": file}})


def colossal(folder: Path) -> None:
    (folder / "modeling").mkdir(parents=True)
    torch.save(W, folder / "modeling" / "pytorch_model-00001.bin")
    (folder / "modeling" / "pytorch_model.bin.index.json").write_text(index(folder, "pytorch_model-00001.bin"))
    torch.save({"last_epoch": 3}, folder / "lr_scheduler")


def bins(folder: Path) -> None:
    folder.mkdir(parents=True)
    torch.save(W, folder / "pytorch_model-00001-of-00001.bin")
    (folder / "pytorch_model.bin.index.json").write_text(index(folder, "pytorch_model-00001-of-00001.bin"))


def safe(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(W, folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(index(folder, "model-00001-of-00001.safetensors"))


def distributed(folder: Path) -> None:
    dcp.save({"model": dict(W), "epoch": 1}, checkpoint_id=folder, no_dist=True)


def lightning(folder: Path) -> None:
    distributed(folder)
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.0.0"}, folder / "meta.pt")


#: Folders by their kind, and what in them may be a link.
LINKED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "NxD": (nxd, ["model", "optim", f"model/{rank_file_name()}", f"optim/{rank_file_name()}", "scheduler.pt"]),
    "NxD xser": (nxd_xser, ["model", f"model/{rank_file_name()}.tensors", f"model/{rank_file_name()}.info.pt"]),
    "NxD legacy": (nxd_legacy, ["tp_rank_00_pp_rank_00", "tp_rank_00_pp_rank_00/checkpoint.pt"]),
    "ColossalAI": (
        colossal,
        ["modeling", "modeling/pytorch_model.bin.index.json", "modeling/pytorch_model-00001.bin", "lr_scheduler"],
    ),
    "files of torch.save": (bins, ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"]),
    "safetensors": (safe, ["model.safetensors.index.json", "model-00001-of-00001.safetensors"]),
    "DCP": (distributed, [".metadata", "__0_0.distcp"]),
    "Lightning": (lightning, ["meta.pt", ".metadata", "__0_0.distcp"]),
}
CASES = [(kind, part) for kind, (_, parts) in LINKED.items() for part in parts]


def move_out(part: Path, outside: Path) -> None:
    """Put a link to elsewhere in the place of a file or folder."""
    shutil.move(part, outside)
    part.symlink_to(outside)


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, kind: str, part: str) -> None:
    folder = tmp_path / "c"
    LINKED[kind][0](folder)
    read_checkpoint(folder)
    move_out(folder / part, tmp_path / "secret")
    with pytest.raises(UnsafeNameError, match=f"{folder}.*outside of the checkpoint"):
        read_checkpoint(folder)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsafeNameError):
        rankless.load_checkpoint(folder, model=model)
    with pytest.raises(UnsafeNameError):
        rankless.convert(folder, tmp_path / "out", to="safetensors")


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_a_link_inside_of_the_folder_is_followed(tmp_path: Path, kind: str, part: str) -> None:
    folder = tmp_path / "c"
    LINKED[kind][0](folder)
    move_out(folder / part, folder / "inside")
    read_checkpoint(folder)


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_a_folder_that_is_opened_by_a_link_is_read(tmp_path: Path, kind: str, part: str) -> None:
    del part
    LINKED[kind][0](tmp_path / "c")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    read_checkpoint(tmp_path / "link")


# ---------------------------------------------------------------------------------------------------------------
# The Hub's cache


@pytest.fixture(params=["safetensors", "files of torch.save"])
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A snapshot as huggingface_hub lays it out: each file is a link into the blobs of its repository."""
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    LINKED[request.param][0](folder)
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{number:040x}")
        file.symlink_to(Path("../../blobs") / f"{number:040x}")
    return folder


def test_a_snapshot_is_read(snapshot: Path) -> None:
    read_checkpoint(snapshot)
    assert torch.equal(rankless.open(snapshot)["model/w"], W["w"])
    for file in snapshot.iterdir():
        assert torch.equal(rankless.open(file)["model/w"], W["w"])


def test_a_snapshot_in_a_cache_that_is_reached_by_a_link_is_read(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(snapshot.parent.parent)
    read_checkpoint(tmp_path / "cache" / "snapshots" / "0123")


def test_blobs_that_are_a_link_are_refused(snapshot: Path, tmp_path: Path) -> None:
    move_out(snapshot.parent.parent / "blobs", tmp_path / "secret")
    with pytest.raises(UnsafeNameError, match="outside of the checkpoint"):
        read_checkpoint(snapshot)


def test_a_snapshots_link_to_elsewhere_is_refused(snapshot: Path, tmp_path: Path) -> None:
    file = max(snapshot.iterdir())
    shutil.copyfile(file, tmp_path / "secret")
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeNameError, match=str(file)):
        read_checkpoint(snapshot)


# ---------------------------------------------------------------------------------------------------------------
# What has the name of a file and is none


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind, part in CASES if "." in part.rpartition("/")[2] or part == "lr_scheduler"]
)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_fifo_in_the_place_of_a_file_is_named(tmp_path: Path, kind: str, part: str) -> None:
    folder = tmp_path / "c"
    LINKED[kind][0](folder)
    place = folder / part
    if place.is_dir():
        place = next(iter(place.iterdir()))
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(RanklessError, match=f"{place.name} is not a regular file"):
        read_checkpoint(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_manifest_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "manifest.json")
    with pytest.raises(NoCheckpointError, match=r"manifest\.json is not a regular file"):
        rankless.open(tmp_path)


def test_a_single_file_that_is_a_fifo_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(RanklessError):
        rankless.open(tmp_path / "model.safetensors")
