"""Checkpoints that megatron-core 0.15.3, 0.16.1 and 0.19.2 wrote, each with an oracle of the training."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

#: All checkpoints.
NAMES = [
    "dp_tp1_dp2_bf16_mcore16",
    "dp_tp1_dp2_bf16_mcore19",
    "dp_tp2_dp2_fp32_mcore16",
    "full_tp2_dp1_fp32_mcore16",
    "full_tp2_pp2_bf16_mcore16",
    "full_tp2_pp2_bf16_mcore19",
    "gather_tp1_dp2_fp32_mcore15",
    "legacy_tp2_pp1_dp1_bf16_mcore16",
    "model_space_tp2_dp2_bf16_mcore15",
    "plain_tp2_fp32_mcore16",
]


@dataclass(frozen=True)
class Fixture:
    """A checkpoint and its oracle: tensors of each layer by ``kind/name``, and the numbers of the training."""

    path: Path
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]

    def of_kind(self, kind: str) -> dict[str, Tensor]:
        """The tensors of a kind, by name: ``weights``, ``master``, ``exp_avg``, ``exp_avg_sq``."""
        prefix = f"{kind}/"
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}


@pytest.fixture(scope="session")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    with tarfile.open(Path(__file__).parent / "megatron.tar.xz") as archive:
        archive.extractall(path, filter="data")
    return path


@pytest.fixture(scope="session")
def open_fixture(fixtures: Path) -> Callable[[str], Fixture]:
    def read(name: str) -> Fixture:
        folder = fixtures / name
        tensors: dict[str, Tensor] = {}
        for key, tensor in load_file(folder / "oracle.safetensors").items():
            before, stacked, inner = key.partition("decoder.layers.")
            rows = {f"{before}{stacked}{number}.{inner}": row for number, row in enumerate(tensor)}
            tensors |= rows if stacked else {key: tensor}
        return Fixture(folder / "ckpt", tensors, json.loads((folder / "oracle.json").read_text()))

    return read
