"""A read-only view of one checkpoint of any format: what is in it, and any part of any tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.engine.io.read import read_pieces
from holdfast.engine.io.sources import Source
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.errors import CheckpointReplacedError, CorruptCheckpointError, InvalidArgumentError
from holdfast.formats.native import NativeReader
from holdfast.formats.reader import Reader, check_read, detect_replacement
from holdfast.load.verification import CheckpointVerification, VerificationResult
from holdfast.observe.warning import warn_caller
from holdfast.ondisk.blocks import BLOCK_BYTES
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.validation import check_keys
from holdfast.run.catalog import checkpoint_path, describe_ignored_files, open_latest
from holdfast.state.arrays import ArrayDecoder
from holdfast.state.tensors import DTYPES
from holdfast.storage.posix import local_path

#: Tensors inside values, which are reached through them.
_INSIDE = frozenset({"state", "ranks"})


class _ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a stored tensor, by its number."""

    tensor: int
    start: int
    stop: int


class Checkpoint:
    """One checkpoint, open for reading. Tensors are named by their group: ``"model/layers.0.weight"``.

    Whatever is read is verified against its CRCs, in whole blocks of 16 MiB. Files are opened when they are read: where
    another process has replaced or removed the checkpoint by then, ``CheckpointReplacedError`` is raised.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stored = sorted((group, name) for group, names in reader.groups.items() for name in names)
        self._number = {f"{group}/{name}": number for number, (group, name) in enumerate(self._stored)}
        for group, names in reader.tied.items():
            for alias, name in names.items():
                self._number.setdefault(f"{group}/{alias}", self._number[f"{group}/{name}"])
        self._checks = ChecksumVerifier(reader, self._stored)

    @property
    def path(self) -> Path:
        """Its folder or file."""
        return self._reader.path

    @property
    def format(self) -> str:
        """The name of its format."""
        return self._reader.format

    def keys(self) -> list[str]:
        """The names of the tensors of models and optimizers; further names of tied ones are not among them."""
        return [f"{group}/{name}" for group, name in self._stored if group not in _INSIDE]

    def info(self, name: str) -> TensorInfo:
        """The dtype (by its safetensors name), shape and size in bytes of a tensor."""
        return self._info(self._find(name))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of a tensor in row-major order, as a 1-D CPU tensor."""
        info = self.info(name)
        size = dtype_width(info.dtype)
        if not 0 <= start <= stop <= info.nbytes // size:
            raise InvalidArgumentError(
                f"{name} has {info.nbytes // size} elements; there are no elements {start} to {stop}"
            )
        first, last = (
            start * size // BLOCK_BYTES * BLOCK_BYTES,
            min(info.nbytes, -(-stop * size // BLOCK_BYTES) * BLOCK_BYTES),
        )
        blocks = torch.empty(max(0, last - first) // size, dtype=DTYPES[info.dtype], device="cpu")
        self._fill({_ByteRange(self._find(name), first, first + blocks.nbytes): blocks})
        wanted = blocks[start - first // size : stop - first // size]
        return wanted if wanted.numel() == blocks.numel() else wanted.clone()

    def __getitem__(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU. Raises ``FormatError`` for one that holdfast does not read."""
        info = self.info(name)
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
        self._fill({_ByteRange(self._find(name), 0, info.nbytes): tensor})
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._number

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    @property
    def values(self) -> dict[str, Any]:
        """The plain values, tensors in them included: ``optimizer``, ``scheduler``, ``user_content``, as saved.

        Raises ``FormatError`` naming one that holdfast does not read, if there is one.
        """
        check_read(self._reader, lambda one: one.is_value)
        found, arrays = self._decoded()
        inside = {self._number[f"state/{name}"]: tensor for name, tensor in arrays.items()}
        self._fill({_ByteRange(number, 0, tensor.nbytes): tensor for number, tensor in inside.items()})
        return found

    def _decoded(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The values, and the tensors in them, by name, to be filled."""
        arrays, own = (
            ArrayDecoder(self._reader.groups.get("state", {})),
            ArrayDecoder(self._reader.groups.get("ranks", {})),
        )
        with detect_replacement(self._reader):
            return dict(self._reader.values(0, arrays, own).shared), arrays.tensors

    def verify(self) -> Iterator[VerificationResult]:
        """Read every byte and check every CRC, and tell of each part read. What is damaged is told, not raised.

        Of other systems' files those of ``torch.save`` and of ``torch.distributed.checkpoint`` have CRCs.

        Raises ``CheckpointReplacedError`` where another process replaces or removes the checkpoint meanwhile.
        """
        with detect_replacement(self._reader):
            for part in self._parts():
                if part.problem is not None and not self._reader.is_current():
                    raise CheckpointReplacedError(f"{self.path} was replaced or removed while it was verified")
                yield part

    def _parts(self) -> Iterator[VerificationResult]:
        if isinstance(self._reader, NativeReader):
            yield from (VerificationResult("", 0, str(error)) for error in self._reader.damaged_files())
        try:
            if not isinstance(self._reader, NativeReader):
                self._reader.check_files()
            self._decoded()
        except CorruptCheckpointError as error:
            yield VerificationResult("", 0, str(error))
        for unread in self._reader.unread:
            why = f"{self.path}: {unread.group} {unread.name!r} {unread.why}"
            yield VerificationResult(f"{unread.group}/{unread.name}", 0, why)
        yield from CheckpointVerification(self._reader).parts()

    def _find(self, name: str) -> int:
        if name not in self._number:
            check_read(self._reader, lambda one: f"{one.group}/{one.name}" == name)
            close = [key for key in self._number if name in key][:3]
            raise KeyError(f"{name!r} is not in {self.path}" + (f"; did you mean {', '.join(close)}?" if close else ""))
        return self._number[name]

    def _info(self, number: int) -> TensorInfo:
        group, name = self._stored[number]
        return self._reader.groups[group][name]

    def _fill(self, parts: Mapping[_ByteRange, torch.Tensor]) -> None:
        """Read parts of stored tensors, whole blocks, into tensors of that size, and verify them."""
        files: dict[Source, int] = {}
        pieces = [piece for part in parts for piece in self._pieces(part, files)]
        sinks = {part.tensor: TensorBytes(tensor) for part, tensor in parts.items()}
        with detect_replacement(self._reader):
            self._checks.check_own(read_pieces(list(files), pieces, sinks.__getitem__))

    def _pieces(self, part: _ByteRange, files: dict[Source, int]) -> Iterator[FileRange]:
        for extent in self._reader.extents(*self._stored[part.tensor], part.start, part.stop):
            file = files.setdefault(extent.file, len(files))
            yield FileRange(part.tensor, extent.start, extent.stop, extent.start - part.start, file, extent.offset)


def open(  # noqa: A001 - the public name
    path: str | PathLike[str], tag: str | None = None, *, keys: Mapping[str, str] | None = None
) -> Checkpoint:
    """Open a checkpoint of any format for reading.

    Args:
        path: a checkpoint, or a run's folder.
        tag: of a run's folder, which checkpoint; without it the latest.
        keys: where a checkpoint of another system has its parts, if they are not found by their names:
            ``{"model": "app.net"}``.

    Raises:
        NoCheckpointError: there is no checkpoint at the path, or none of this tag in the run.
        InvalidArgumentError: a tag for a path that is a checkpoint itself; a tag or keys of another type.
        FormatError: not a format that is known here.
        CorruptCheckpointError: not what was saved.
    """
    check_keys(keys)
    place = local_path(path)
    opened = Checkpoint(open_latest(place if tag is None else checkpoint_path(place, tag), keys))
    if tag is None and opened.path != place and (ignored := describe_ignored_files(place)):
        warn_caller(ignored)
    return opened
