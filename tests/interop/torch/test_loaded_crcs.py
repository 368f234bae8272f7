"""Tests that loads compare what they read with the CRC-32s in files of ``torch.save``, and read nothing twice for that.

The oracle is the file as ``torch.save`` wrote it, with one bit flipped.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.serialization import set_crc32_options

import rankless
from rankless.errors import CorruptCheckpointError
from rankless.storage.direct_io import BufferedReader
from tests.helpers.deepspeed_files import random_save, write_zero
from tests.helpers.pool import Ranks

SHAPE = (300, 40)


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(*SHAPE), torch.nn.Linear(SHAPE[1], 7))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, SHAPE[0])).sum().backward()
    optimizer.step()
    return model, optimizer


def save(path: Path, **options: Any) -> Path:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path, **options)
    return path


def flip(path: Path, needle: bytes) -> None:
    """Flip a bit in the middle of some bytes of a file."""
    raw = bytearray(path.read_bytes())
    at = raw.find(needle)
    assert at >= 0
    raw[at + len(needle) // 2] ^= 4
    path.write_bytes(raw)


def weight_bytes() -> bytes:
    return trained()[0].get_parameter("0.weight").detach().numpy().tobytes()


def moment_bytes() -> bytes:
    model, optimizer = trained()
    moment: torch.Tensor = optimizer.state[model.get_parameter("0.weight")]["exp_avg"]
    return moment.numpy().tobytes()


def load(path: Path, **options: Any) -> torch.nn.Module:
    model = make_model(9)
    rankless.load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()), rng=False, **options)
    return model


@pytest.mark.parametrize("damaged", [weight_bytes, moment_bytes])
def test_a_flipped_bit_is_named(tmp_path: Path, damaged: Any) -> None:
    file = save(tmp_path / "x.pt")
    assert torch.equal(load(file).get_parameter("0.weight"), trained()[0].get_parameter("0.weight"))
    flip(file, damaged())
    with zipfile.ZipFile(file) as opened:
        entry = opened.testzip()
    with pytest.raises(CorruptCheckpointError, match=rf"x\.pt is corrupt.*the entry '{entry}'.*CRC-32"):
        load(file)
    load(file, verify=False)


@pytest.mark.parametrize("kind", ["without", "legacy"])
def test_files_without_crcs_are_loaded(tmp_path: Path, kind: str) -> None:
    """PyTorch can be told to write none. Its older format has none."""
    set_crc32_options(kind != "without")
    try:
        file = save(tmp_path / "x.pt", _use_new_zipfile_serialization=kind != "legacy")
    finally:
        set_crc32_options(True)
    flip(file, moment_bytes())
    load(file)


def test_what_is_not_loaded_is_not_compared(tmp_path: Path) -> None:
    file = save(tmp_path / "x.pt")
    flip(file, moment_bytes())
    rankless.load_checkpoint(file, model=make_model(9), rng=False)


def test_a_small_part_of_a_storage_is_loaded_without_the_rest(tmp_path: Path) -> None:
    whole = torch.rand(100, 1000)
    torch.save({"model": {"w": whole[3]}}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", whole[50].numpy().tobytes())
    model = torch.nn.ParameterDict({"w": torch.zeros(1000)})
    rankless.load_checkpoint(tmp_path / "x.pt", model=model, rng=False)
    assert torch.equal(model["w"], whole[3])


def test_most_of_a_storage_is_compared_with_the_rest(tmp_path: Path) -> None:
    whole = torch.rand(100, 1000)
    torch.save({"model": {"w": whole[:95]}}, tmp_path / "x.pt")
    model = torch.nn.ParameterDict({"w": torch.zeros(95, 1000)})
    rankless.load_checkpoint(tmp_path / "x.pt", model=model, rng=False)
    flip(tmp_path / "x.pt", whole[50].numpy().tobytes())
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        rankless.load_checkpoint(tmp_path / "x.pt", model=model, rng=False)


def test_nothing_is_read_twice(tmp_path: Path) -> None:
    file, read = save(tmp_path / "x.pt"), 0
    original = BufferedReader._read_buffered

    def count(self: BufferedReader, fd: int, offset: int, into: memoryview) -> None:
        nonlocal read
        read += len(into)
        original(self, fd, offset, into)

    with mock.patch.object(BufferedReader, "_read_buffered", count):
        load(file)
    assert read < 1.3 * file.stat().st_size


@pytest.mark.parametrize("stage", [1, 3])
def test_a_moment_of_deepspeed(tmp_path: Path, stage: int) -> None:
    shapes = {"0.weight": (40, 300), "0.bias": (40,)}
    save = random_save(shapes, [[*shapes]], ("exp_avg", "exp_avg_sq"), stage=stage, ranks=3)
    write_zero(tmp_path, save)
    model = torch.nn.Sequential(torch.nn.Linear(300, 40))
    arguments: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": False}
    rankless.load_checkpoint(tmp_path, **arguments)
    moment = save.states["exp_avg"]["0.weight"].reshape(-1)
    flip(next(tmp_path.glob("*/zero_pp_rank_1_*optim*")), moment[5000:5010].numpy().tobytes())
    with pytest.raises(CorruptCheckpointError, match=r"zero_pp_rank_1_.*CRC-32"):
        rankless.load_checkpoint(tmp_path, **arguments)


def load_shards(path: Path) -> str:
    model = make_model(9)
    for child in model.children():
        fully_shard(child)
    fully_shard(model)
    try:
        rankless.load_checkpoint(path, model=model, rng=False, share_reads="auto")
    except CorruptCheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_read_parts_of_a_storage_compare_it_together(tmp_path: Path, ranks: Ranks) -> None:
    file = save(tmp_path / "x.pt")
    assert ranks(2, load_shards, file) == ["", ""]
    flip(file, weight_bytes())
    assert ["CRC-32" in text for text in ranks(2, load_shards, file)] == [True, True]
