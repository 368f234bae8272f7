"""Tests of small files that the caller stores in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from tests.helpers.commands import invoke

FILES = {"tokenizer.json": b'{"a": 1}', "notes.txt": b"", "odd name (1)": bytes(range(256))}


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["synchronous", "asynchronous"])
def test_files_are_stored_as_they_are_and_verified(tmp_path: Path, options: dict[str, Any]) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(3)}, files=FILES, **options).wait()
    assert {name: (tmp_path / "s" / name).read_bytes() for name in FILES} == FILES
    assert FILES.keys() <= json.loads((tmp_path / "s/manifest.json").read_bytes())["files"].keys()
    assert invoke("verify", tmp_path).exit_code == 0
    rankless.load_checkpoint(tmp_path, "s", {"w": torch.zeros(3)})
    (tmp_path / "s/tokenizer.json").write_bytes(b'{"a": 2}')
    assert "tokenizer.json" in invoke("verify", tmp_path, code=1).stdout
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        rankless.load_checkpoint(tmp_path, "s", {"w": torch.zeros(3)})


def test_a_checkpointer_stores_them_each_time(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model={"w": torch.ones(3)}, save_every=1, files=FILES) as checkpointer:
        checkpointer.step(1)
        checkpointer.step(2)
    assert all((tmp_path / f"step_{step}/tokenizer.json").is_file() for step in (1, 2))


@pytest.mark.parametrize(
    "name",
    [
        *("manifest.json", "state.json", "ranks.json", "model", "optimizer", "adapter", "x.safetensors"),
        *("model.safetensors.index.json", "a/b", "../a", ".hidden", "", "x" * 300, "a\0b"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(3)}, files={name: b""})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("files", [[b"a"], {"a": "text"}, {"a": None}, {1: b""}, {"a": bytes(2**26 + 1)}])
def test_what_is_no_file_is_refused(tmp_path: Path, files: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(3)}, files=files)
