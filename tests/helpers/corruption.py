"""Corruption of files on disk."""

from __future__ import annotations

import json
from pathlib import Path


def flip_tensor_bit(file: Path, tensor: str) -> None:
    """Flip one bit in the middle of a tensor, found without rankless."""
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + size])[tensor]["data_offsets"]
    raw[8 + size + (start + stop) // 2] ^= 0x10
    file.write_bytes(raw)


def cut_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def corrupt_model_of_step(path: Path, step: int) -> None:
    file = path / f"step_{step}/model/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
