"""Which format a path holds, told by its contents."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import FormatError, NoCheckpointError
from holdfast.formats.huggingface import HuggingFaceReader, is_huggingface
from holdfast.formats.native import NativeReader, is_native
from holdfast.formats.reader import Reader


def is_checkpoint(path: Path) -> bool:
    """Whether the path itself is a checkpoint of a known format (and not a run's folder of them)."""
    return is_native(path) or is_huggingface(path)


def open_reader(path: Path) -> Reader:
    """The reader for a checkpoint. Raises ``NoCheckpointError`` or ``FormatError``."""
    if is_native(path):
        return NativeReader(path)
    if is_huggingface(path):
        return HuggingFaceReader(path)
    if not path.exists():
        raise NoCheckpointError(f"there is no {path}")
    raise FormatError(
        f"{path} is no checkpoint of a format that holdfast reads: "
        "it has no manifest.json, and no safetensors weights as Hugging Face lays them out"
    )
