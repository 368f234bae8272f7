"""Which format a path holds, told by its contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import FormatError, NoCheckpointError
from holdfast.formats.composite_reader import CompositeReader
from holdfast.formats.dcp.folder import METADATA
from holdfast.formats.huggingface import INDEX, SINGLE, HuggingFaceReader, is_huggingface, kinds_in
from holdfast.formats.lightning import META
from holdfast.formats.native import NativeReader, is_native
from holdfast.formats.reader import Reader
from holdfast.formats.registry import READABLE
from holdfast.formats.sharded.model_files import list_parts
from holdfast.formats.sharded.sharded_reader import ShardedReader, is_sharded_checkpoint
from holdfast.ondisk import manifest
from holdfast.storage import posix


def is_checkpoint(path: Path) -> bool:
    """Whether the path itself is a checkpoint of a known format (and not a run's folder of them)."""
    return (
        is_native(path)
        or is_sharded_checkpoint(path)
        or is_huggingface(path)
        or any(known.is_at(path) for known in READABLE.values())
    )


def describe_contents(folder: Path) -> str:
    """What a message says of names in a folder that tell a format and are no files, such as FIFOs or folders."""
    paths = [folder / name for name in (manifest.NAME, METADATA, META, INDEX, SINGLE)]
    wrong = [path for path in paths if posix.path_exists(path) and not posix.is_file(path)]
    return "".join(f"; {path} is not a regular file" for path in wrong)


def open_reader(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """The reader for a checkpoint. Raises ``NoCheckpointError`` or ``FormatError``.

    ``keys`` tells where other systems' checkpoints have what is not found by itself: ``{"model": "app.net"}``.
    """
    if is_native(path):
        return NativeReader(path)
    if posix.is_directory(path) and (is_huggingface(path) or is_sharded_checkpoint(path)):
        return _open_parts(path, keys or {})
    if is_sharded_checkpoint(path):
        return ShardedReader(path, keys or {})
    if is_huggingface(path):
        return HuggingFaceReader(path)
    for known in READABLE.values():
        if known.is_at(path):
            reader: Reader = known.open(path, keys or {})
            return reader
    if not posix.path_exists(path):
        raise NoCheckpointError(f"there is no {path}")
    raise FormatError(
        f"{path} is no checkpoint of a format that holdfast reads: neither its own (a folder with a manifest.json), "
        "nor weights as Hugging Face lays them out, nor a file of torch.save, nor a folder of "
        "torch.distributed.checkpoint, Lightning or NxD" + describe_contents(path)
    )


def _open_parts(folder: Path, keys: Mapping[str, str]) -> Reader:
    """A folder of weights, or of an optimizer, or of both, each in a format of its own."""
    known = kinds_in(folder)
    others = [found.kind for found in list_parts(folder) if found.kind not in known]
    readers: list[Reader] = [HuggingFaceReader(folder)] if known else []
    if others:
        readers.append(ShardedReader(folder, keys, others))
    return readers[0] if len(readers) == 1 else CompositeReader(folder, readers)
