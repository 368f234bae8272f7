"""Which format a path holds, told by its contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.errors import FormatError, NoCheckpointError
from holdfast.formats.dcp.folder import METADATA, is_dcp
from holdfast.formats.dcp.reader import DcpReader
from holdfast.formats.dcp.shards import ShardsReader, is_sharded
from holdfast.formats.huggingface import INDEX, SINGLE, HuggingFaceReader, is_huggingface, kinds_in
from holdfast.formats.indexed.find import parts
from holdfast.formats.indexed.reader import IndexedReader, is_indexed
from holdfast.formats.joined import JoinedReader
from holdfast.formats.lightning import META, LightningReader, is_lightning
from holdfast.formats.native import NativeReader, is_native
from holdfast.formats.nxd.reader import NxdReader, is_nxd
from holdfast.formats.reader import Reader
from holdfast.formats.torchfile.reader import TorchFileReader, is_torch_file
from holdfast.layout import manifest
from holdfast.storage import local

#: Formats of other systems, by what tells them.
_FOREIGN: Sequence[tuple[Callable[[Path], bool], Callable[[Path, Mapping[str, str]], Reader]]] = (
    (is_lightning, LightningReader),
    (is_dcp, DcpReader),
    (is_sharded, ShardsReader),
    (is_torch_file, TorchFileReader),
    (is_nxd, NxdReader),
)


def is_checkpoint(path: Path) -> bool:
    """Whether the path itself is a checkpoint of a known format (and not a run's folder of them)."""
    return is_native(path) or is_indexed(path) or is_huggingface(path) or any(is_one(path) for is_one, _ in _FOREIGN)


def said_of(folder: Path) -> str:
    """What a message says of names in a folder that tell a format and are no files, such as FIFOs or folders."""
    paths = [folder / name for name in (manifest.NAME, METADATA, META, INDEX, SINGLE)]
    wrong = [path for path in paths if local.exists(path) and not local.is_file(path)]
    return "".join(f"; {path} is not a regular file" for path in wrong)


def open_reader(path: Path, keys: Mapping[str, str] | None = None) -> Reader:
    """The reader for a checkpoint. Raises ``NoCheckpointError`` or ``FormatError``.

    ``keys`` tells where other systems' checkpoints have what is not found by itself: ``{"model": "app.net"}``.
    """
    if is_native(path):
        return NativeReader(path)
    if local.is_folder(path) and (is_huggingface(path) or is_indexed(path)):
        return _open_parts(path, keys or {})
    if is_indexed(path):
        return IndexedReader(path, keys or {})
    if is_huggingface(path):
        return HuggingFaceReader(path)
    for is_one, reader in _FOREIGN:
        if is_one(path):
            return reader(path, keys or {})
    if not local.exists(path):
        raise NoCheckpointError(f"there is no {path}")
    raise FormatError(
        f"{path} is no checkpoint of a format that holdfast reads: neither its own (a folder with a manifest.json), "
        "nor weights as Hugging Face lays them out, nor a file of torch.save, nor a folder of "
        "torch.distributed.checkpoint, Lightning or NxD" + said_of(path)
    )


def _open_parts(folder: Path, keys: Mapping[str, str]) -> Reader:
    """A folder of weights, or of an optimizer, or of both, each in a format of its own."""
    known = kinds_in(folder)
    others = [found.kind for found in parts(folder) if found.kind not in known]
    readers: list[Reader] = [HuggingFaceReader(folder)] if known else []
    if others:
        readers.append(IndexedReader(folder, keys, others))
    return readers[0] if len(readers) == 1 else JoinedReader(folder, readers)
