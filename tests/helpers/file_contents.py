"""The bytes of the files below a directory."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import safe_open


def read_state_files(folder: Path) -> dict[str, bytes]:
    """The files whose bytes depend on the state alone: all but the manifest and what belongs to single ranks."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if name != "manifest.json" and not name.startswith("ranks")}


def size_on_disk(checkpoint: Path) -> int:
    """All files but the manifest, which does not list itself."""
    return sum(os.stat(f).st_size for f in checkpoint.rglob("*") if f.is_file() and f.name != "manifest.json")  # noqa: PTH116


def stored(file: Path) -> dict[str, tuple[str, list[int], int]]:
    """Dtype, shape and bytes of the tensors of a file, as the safetensors library sees them."""
    with safe_open(file, "pt") as opened:
        return {
            name: (
                opened.get_slice(name).get_dtype(),
                opened.get_slice(name).get_shape(),
                opened.get_tensor(name).nbytes,
            )
            for name in opened.keys()  # noqa: SIM118 - it is no dict
        }
