"""Tests files of the Hugging Face Hub against its checksums, in both places where its library keeps them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rankless
from rankless.errors import CorruptCheckpointError, InvalidArgumentError


def in_cache(folder: Path, is_right: bool) -> Path:
    """A snapshot in the cache: links to blobs that are named by their checksum."""
    blobs, snapshot = folder / "blobs", folder / "snapshots/abc"
    for part in (blobs, snapshot):
        part.mkdir(parents=True)
    save_file({"w": torch.arange(5.0)}, folder / "file")
    name = hashlib.sha256((folder / "file").read_bytes() + (b"" if is_right else b"x")).hexdigest()
    (folder / "file").rename(blobs / name)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    return snapshot


def in_folder(folder: Path, is_right: bool) -> Path:
    """A download into a folder: its library notes the ETags."""
    metadata = folder / ".cache/huggingface/download"
    metadata.mkdir(parents=True)
    save_file({"w": torch.arange(5.0)}, folder / "model.safetensors")
    etag = hashlib.sha256((folder / "model.safetensors").read_bytes() + (b"" if is_right else b"x")).hexdigest()
    (metadata / "model.safetensors.metadata").write_text(f"{'0' * 40}\n{etag}\n1700000000.0\n")
    return folder


@pytest.mark.parametrize("download", [in_cache, in_folder])
class TestADownload:
    def test_an_intact_one_is_verified(self, tmp_path: Path, download: Any) -> None:
        loaded = torch.zeros(5)
        with rankless.open_weights(download(tmp_path, is_right=True), verify="sha256") as weights:
            loaded.copy_(dict(weights)["w"])
        assert torch.equal(loaded, torch.arange(5.0))
        assert weights.report.verified

    def test_a_corrupt_one_is_refused_before_anything_is_loaded(self, tmp_path: Path, download: Any) -> None:
        opened = rankless.open_weights(download(tmp_path, is_right=False), verify="sha256")
        with pytest.raises(
            CorruptCheckpointError, match=r"model.safetensors is corrupt: its SHA-256 is .* download it"
        ):
            opened.__enter__()

    def test_it_is_not_read_for_that_by_default(self, tmp_path: Path, download: Any) -> None:
        with rankless.open_weights(download(tmp_path, is_right=False)) as weights:
            torch.zeros(5).copy_(dict(weights)["w"])
        assert not weights.report.verified


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors has no SHA-256 of the Hub"):
        rankless.open_weights(tmp_path, verify="sha256").__enter__()


@pytest.mark.parametrize("verify", ["md5", 1, None])
def test_an_unknown_way_is_refused(tmp_path: Path, verify: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="verify must be true, false or"):
        rankless.open_weights(tmp_path, verify=verify)
