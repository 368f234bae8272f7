"""A reader of a generation in the local tier: as of a checkpoint's folder, with tensor data in parts.

:mod:`rankless.load.tier_load` opens one on each rank of a load, and ``rankless show`` for a tier opens one in its
process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from rankless.errors import CorruptCheckpointError
from rankless.formats.native import NativeReader
from rankless.formats.reader import FileExtent
from rankless.formats.safetensors import SafetensorsFile
from rankless.ondisk import header
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.tier.generation import Generation

#: A range of a tensor in a part: its first byte, the byte after the last one, the part, and the offset there.
_Piece = tuple[int, int, int, int]


class GenerationReader(NativeReader):
    """A reader of a generation. ``path`` is the checkpoint's path in the run directory, which need not exist.

    ``paths`` are the files with the bytes of the parts, by the rank that staged the part.
    """

    def __init__(
        self,
        path: Path,
        generation: Generation,
        paths: Mapping[int, Path],
        *,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self._generation, self._paths = generation, paths
        self._headers = {
            file.path: raw for file, (raw, _) in zip(generation.plan.files, generation.headers, strict=True)
        }
        super().__init__(path, keys=keys)

    def _read_manifest(self) -> Manifest:
        return self._generation.manifest

    def _open_file(self, name: str, record: FileRecord) -> SafetensorsFile:
        return SafetensorsFile(
            self.path / name, header.decode_header(self._headers[name], record.size, str(self.path / name))
        )

    def _read_file(self, name: str) -> bytes:
        return self._generation.small_files[name]

    def is_current(self) -> bool:
        """Return true: the parts of a generation that is being loaded are not removed."""
        return True

    @cached_property
    def _pieces(self) -> Mapping[tuple[str, str], Sequence[_Piece]]:
        """The pieces of each tensor, in order; adjacent ones of one part are joined, and no byte is in two."""
        pieces: dict[int, list[_Piece]] = {}
        for part, table in self._generation.tables.items():
            for found, _ in table.rows.iter_ranges():
                pieces.setdefault(found.tensor, []).append((found.start, found.stop, part, found.local))
        names = self._generation.plan.tensors
        return {names[tensor]: _join_pieces(sorted(found)) for tensor, found in pieces.items()}

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        pieces = self._pieces.get((self._stored_group(group), name), ())
        extents = []
        position = start
        for first, last, part, local in pieces[bisect_right(pieces, position, key=_stop_of) :]:
            if position >= stop:
                break
            if first > position:
                break
            until = min(stop, last)
            extents.append(FileExtent(self._paths[part], local + position - first, position, until))
            position = until
        if position < stop:
            raise CorruptCheckpointError(
                f"no part of {self.path} in the local tier has byte {position} of {group} {name!r}"
            )
        return extents

    def _stored_group(self, group: str) -> str:
        """Return the name of a group in the checkpoint; the group of a selected model has another name there."""
        return self._opened[0] if group == "model" else group


def _stop_of(piece: _Piece) -> int:
    return piece[1]


def _join_pieces(pieces: Sequence[_Piece]) -> list[_Piece]:
    joined: list[_Piece] = []
    for start, stop, part, local in pieces:
        last = joined[-1] if joined else None
        if last is not None and (stop <= last[1]):
            continue
        if last is not None and last[1] == start and last[2] == part and last[3] + last[1] - last[0] == local:
            joined[-1] = (last[0], stop, part, last[3])
        else:
            joined.append((start, stop, part, local))
    return joined
