"""Verification of bytes that were read: each rank checks blocks that it read whole, all ranks together the others.

A load calls :meth:`~ChecksumVerifier.verify_local` on each rank inside the vote "reading", and
:meth:`~ChecksumVerifier.verify_across_ranks` on rank 0 in its decision; conversions and the loader of weights do the
same. A block is corrupt only if it was read wrong twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from rankless.engine.io.requests import Fragments, KnownFragments
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.file_ranges import CHUNK
from rankless.errors import CorruptCheckpointError, UnstableReadError
from rankless.observe.spans import traced
from rankless.ondisk.block_crcs import BLOCK_BYTES, assemble_crcs, block_range, combine_crcs, crc64
from rankless.ondisk.data_files import TensorInfo
from rankless.storage.direct_io import BufferedReader
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.second_read import UncachedReader

#: Opens a file of a file system.
OpenReader = Callable[[Path], BufferedReader]


class VerifiedTensors(Protocol):
    """The part of a checkpoint's reader that verification needs."""

    @property
    def groups(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """The tensors, by group and name."""

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Return the CRC of each block, or ``None``."""

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[tuple[Source, int, int, int]]:
        """Return file, offset, start and stop of each range that contains bytes of a tensor."""


class ChecksumVerifier:
    """The expected CRCs of a checkpoint's tensors; ``numbered`` has their keys by number.

    ``reads_again``: whether this rank can read any byte, if the reads of all ranks do not tell the CRC of a block.
    """

    def __init__(
        self, source: VerifiedTensors, numbered: Sequence[tuple[str, str]], *, reads_again: bool = True
    ) -> None:
        self._source, self._numbered, self._reads_again = source, numbered, reads_again

    @traced("verify", "verify")
    def verify_local(self, fragments_by_tensor: Fragments) -> Fragments:
        """Verify blocks that this rank read whole. Return the other fragments, to be verified across ranks."""
        partial: Fragments = {}
        for _, error in self.find_wrong_blocks(fragments_by_tensor, partial):
            raise error
        return partial

    def find_wrong_blocks(
        self, fragments_by_tensor: Fragments, partial: Fragments
    ) -> Iterator[tuple[int, CorruptCheckpointError | UnstableReadError]]:
        """Yield errors of wrong blocks that were read whole, by tensor; add other fragments to ``partial``."""
        for tensor, fragments in fragments_by_tensor.items():
            group, name = self._numbered[tensor]
            crcs = self._source.block_crcs(group, name)
            if crcs is None:
                continue
            nbytes = self._source.groups[group][name].nbytes
            for fragment in fragments:
                start, stop, crc = fragment
                block, before = divmod(start, BLOCK_BYTES)
                if before or stop != min(nbytes, start + BLOCK_BYTES):
                    partial.setdefault(tensor, []).append(fragment)
                elif crc != crcs[block]:
                    yield tensor, self._find_cause(tensor, block)

    @traced("verify across ranks", "verify")
    def verify_across_ranks(self, partial: KnownFragments) -> None:
        """Verify blocks that several ranks read in parts. If the parts do not tile a block, read it again."""
        for tensor, fragments in partial.items():
            expected = self._expected_crcs(tensor)
            crc_by_range: dict[tuple[int, int], int] = {}
            for start, stop, crc in fragments:
                if crc_by_range.setdefault((start, stop), crc) != crc:
                    raise self._find_cause(tensor, start // BLOCK_BYTES)
            assembled = assemble_crcs(fragments, self._tensor_bytes(tensor))
            for block in sorted({fragment.start // BLOCK_BYTES for fragment in fragments}):
                whole = assembled[block]
                if whole is None and not self._reads_again:
                    continue
                crc = self._crc_from_storage(tensor, block) if whole is None else whole
                if expected is not None and expected[block] != crc:
                    raise self._find_cause(tensor, block)

    def verify_block(self, tensor: int, block: int) -> None:
        """Read one block and verify it."""
        expected = self._expected_crcs(tensor)
        if expected is not None and expected[block] != self._crc_from_storage(tensor, block):
            raise self._find_cause(tensor, block)

    @cached_property
    def has_every_crc(self) -> bool:
        """True if all tensors of the checkpoint have CRCs."""
        return None not in itertools.starmap(self._source.block_crcs, self._numbered)

    def has_all_crcs(self, keys: Iterable[tuple[str, str]]) -> bool:
        """Return whether all of these tensors have CRCs."""
        return self.has_every_crc or all(self._source.block_crcs(*key) is not None for key in keys)

    def _expected_crcs(self, tensor: int) -> Sequence[int] | None:
        return self._source.block_crcs(*self._numbered[tensor])

    def _tensor_bytes(self, tensor: int) -> int:
        group, name = self._numbered[tensor]
        return self._source.groups[group][name].nbytes

    def _find_cause(self, tensor: int, block: int) -> CorruptCheckpointError | UnstableReadError:
        """Read a wrong block once more, into another buffer.

        Return the error, which says what is wrong: the file, or a read.
        """
        group, name = self._numbered[tensor]
        start, stop = block_range(block, self._tensor_bytes(tensor))
        file = self._source.find_extents(group, name, start, stop)[0][0]
        expected = self._expected_crcs(tensor)
        stored = self._crc_from_storage(tensor, block, UncachedReader) if self._reads_again else None
        if expected is not None and stored == expected[block]:
            return UnstableReadError(
                f"bytes {start} to {stop} of {group} tensor {name!r} in {file} were read wrong, and right the second "
                "time: the file is intact; if that happens again, suspect the memory of this host"
            )
        return CorruptCheckpointError(
            f"{group} tensor {name!r} in {file} is corrupt: its bytes {start} to {stop} do not match their CRC"
        )

    def _crc_from_storage(self, tensor: int, block: int, open_reader: OpenReader = BufferedReader) -> int:
        start, stop = block_range(block, self._tensor_bytes(tensor))
        crcs = []
        for file, offset, first, last in self._source.find_extents(*self._numbered[tensor], start, stop):
            with SourceReader([file], ReaderPool(open_reader)) as reader:
                for start_in_extent in range(0, last - first, CHUNK):
                    data = bytearray(min(CHUNK, last - first - start_in_extent))
                    reader.read(0, offset + start_in_extent, memoryview(data))
                    crcs.append((crc64(data), len(data)))
        return combine_crcs(crcs)
