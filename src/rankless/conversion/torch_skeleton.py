"""The bytes of a ``torch.save`` file that belong to no planned tensor, kept in memory: no file is written.

:class:`~rankless.conversion.torch_target.PlannedTorchFile` lays out with it, on rank 0 of a save of one component. The
bytes become the file: they must be exactly the bytes that ``torch.save`` writes.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path

#: No file has this path: readers of a skeleton do not look at it.
SKELETON_PATH = Path("skeleton")


class TorchSkeleton:
    """A file in memory with holes, for ``torch.save``, which skips the bytes of tensors without data.

    It is a reader of itself, too: holes are zeros.
    """

    def __init__(self) -> None:
        self._position = 0
        self._starts: list[int] = []
        self._pieces: list[bytearray] = []

    def write(self, data: memoryview) -> int:
        """Write bytes at the position, behind all others."""
        if not self._pieces or self._starts[-1] + len(self._pieces[-1]) != self._position:
            self._starts.append(self._position)
            self._pieces.append(bytearray())
        self._pieces[-1] += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        """Leave a hole of ``offset`` bytes."""
        if whence != os.SEEK_CUR:
            raise ValueError("torch.save seeks forwards only")
        self._position += offset
        return self._position

    def flush(self) -> None:
        """Do nothing: ``torch.save`` calls it."""

    @property
    def size(self) -> int:
        """The size of the file in bytes, with its holes. The file on the disk gets it."""
        return self._position

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """See :class:`rankless.formats.torchfile.zip_reader.FileRangeReader`."""
        del path
        into[:] = bytes(len(into))
        for start, piece in self._pieces_from(offset):
            low, high = max(start, offset), min(start + len(piece), offset + len(into))
            if start >= offset + len(into):
                break
            if low < high:
                into[low - offset : high - offset] = piece[low - start : high - start]

    def _pieces_from(self, offset: int) -> Iterator[tuple[int, bytearray]]:
        first = max(0, bisect_right(self._starts, offset) - 1)
        return zip(self._starts[first:], self._pieces[first:], strict=True)

    def fill(self, contents: Mapping[int, bytes]) -> list[tuple[int, bytes]]:
        """Return all bytes that are known, by offset, with the ``contents``, which are in holes.

        They are written into the file as they are.
        """
        written = ((start, bytes(piece)) for start, piece in zip(self._starts, self._pieces, strict=True))
        return sorted([*written, *contents.items()])
