"""Verification of what was read: each rank checks the blocks that it read whole, all together check the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from holdfast.engine.io.requests import Fragments
from holdfast.engine.io.source_reader import SourceReader
from holdfast.engine.io.sources import Source
from holdfast.engine.plan.file_ranges import CHUNK
from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.blocks import BLOCK_BYTES, assemble_crcs, block_range, combine_crcs, crc64
from holdfast.ondisk.files import TensorInfo


class VerifiedTensors(Protocol):
    """What verification asks of a checkpoint's reader."""

    @property
    def groups(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """The tensors, by group and name."""

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRC of each block, or ``None``."""

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[tuple[Source, int, int, int]]:
        """File, offset, start and stop of each range that holds part of a tensor."""


class ChecksumVerifier:
    """The expected CRCs of a checkpoint's tensors; ``numbered`` are their keys, by number."""

    def __init__(self, source: VerifiedTensors, numbered: Sequence[tuple[str, str]]) -> None:
        self._source, self._numbered = source, numbered

    def check_own(self, found: Fragments) -> Fragments:
        """Verify blocks that this rank read whole. Returns the fragments of all others, to be checked together."""
        partial: Fragments = {}
        for _, error in self.damage(found, partial):
            raise error
        return partial

    def damage(self, found: Fragments, partial: Fragments) -> Iterator[tuple[int, CorruptCheckpointError]]:
        """The blocks read whole that are not what was saved, by tensor; other fragments go into ``partial``."""
        for tensor, fragments in found.items():
            crcs = self._crcs(tensor)
            if crcs is None:
                continue
            nbytes = self._nbytes(tensor)
            for fragment in fragments:
                block = fragment.start // BLOCK_BYTES
                if (fragment.start, fragment.stop) != block_range(block, nbytes):
                    partial.setdefault(tensor, []).append(fragment)
                elif fragment.crc != crcs[block]:
                    yield tensor, self._damaged(tensor, block)

    def check_shared(self, partial: Fragments) -> None:
        """Verify blocks of which several ranks read parts. Those that the parts do not tile are read again, whole."""
        for tensor, fragments in partial.items():
            expected = self._crcs(tensor)
            said: dict[tuple[int, int], int] = {}
            for start, stop, crc in fragments:
                if said.setdefault((start, stop), crc) != crc:
                    raise self._damaged(tensor, start // BLOCK_BYTES)
            assembled = assemble_crcs(fragments, self._nbytes(tensor))
            for block in sorted({fragment.start // BLOCK_BYTES for fragment in fragments}):
                whole = assembled[block]
                found = self._read_again(tensor, block) if whole is None else whole
                if expected is not None and expected[block] != found:
                    raise self._damaged(tensor, block)

    def check_block(self, tensor: int, block: int) -> None:
        """Read one block and verify it."""
        expected = self._crcs(tensor)
        if expected is not None and expected[block] != self._read_again(tensor, block):
            raise self._damaged(tensor, block)

    def cover(self, keys: Iterable[tuple[str, str]]) -> bool:
        """Whether all of these tensors have CRCs."""
        return all(self._source.crcs(*key) is not None for key in keys)

    def _crcs(self, tensor: int) -> Sequence[int] | None:
        return self._source.crcs(*self._numbered[tensor])

    def _nbytes(self, tensor: int) -> int:
        group, name = self._numbered[tensor]
        return self._source.groups[group][name].nbytes

    def _damaged(self, tensor: int, block: int) -> CorruptCheckpointError:
        group, name = self._numbered[tensor]
        start, stop = block_range(block, self._nbytes(tensor))
        file = self._source.extents(group, name, start, stop)[0][0]
        return CorruptCheckpointError(
            f"{group} tensor {name!r} in {file} is damaged: its bytes {start} to {stop} do not match their CRC"
        )

    def _read_again(self, tensor: int, block: int) -> int:
        start, stop = block_range(block, self._nbytes(tensor))
        pieces = []
        for file, offset, first, last in self._source.extents(*self._numbered[tensor], start, stop):
            with SourceReader([file]) as opened:
                for at in range(0, last - first, CHUNK):
                    data = bytearray(min(CHUNK, last - first - at))
                    opened.read(0, offset + at, memoryview(data))
                    pieces.append((crc64(data), len(data)))
        return combine_crcs(pieces)
