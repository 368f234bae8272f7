"""Which format a path holds, told by its contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import FormatError, NoCheckpointError
from holdfast.formats.huggingface import HuggingFaceReader, is_huggingface
from holdfast.formats.native import NativeReader, is_native
from holdfast.formats.reader import Reader
from holdfast.formats.torchfile.reader import TorchFileReader, is_torch_file


def is_checkpoint(path: Path) -> bool:
    """Whether the path itself is a checkpoint of a known format (and not a run's folder of them)."""
    return is_native(path) or is_huggingface(path) or is_torch_file(path)


def open_reader(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """The reader for a checkpoint. Raises ``NoCheckpointError`` or ``FormatError``.

    ``keys`` tells where other systems' checkpoints have what is not found by itself: ``{"model": "app.net"}``.
    """
    if is_native(path):
        return NativeReader(path)
    if is_huggingface(path):
        return HuggingFaceReader(path)
    if is_torch_file(path):
        return TorchFileReader(path, keys or {})
    if not path.exists():
        raise NoCheckpointError(f"there is no {path}")
    raise FormatError(
        f"{path} is no checkpoint of a format that holdfast reads: "
        "it has no manifest.json, and no safetensors weights as Hugging Face lays them out"
    )
