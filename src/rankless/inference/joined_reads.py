"""Reads of the stored elements that copies need: sorted, joined over small gaps, straight into the targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rankless.engine.io.read import read_file_ranges, read_host_shared
from rankless.engine.io.requests import Fragments, OnBytesMoved
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.element_ranges import TensorRange
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.formats.native import MODEL
from rankless.formats.reader import Reader, find_file_ranges
from rankless.inference.pending_copies import ElementCopy
from rankless.inference.scattered_bytes import ScatteredBytes
from rankless.inference.strided_view import join_spans


class PlannedReads(NamedTuple):
    """The reads for some copies: of bytes that only this rank needs, and of bytes that others of the host read, too.

    ``copies`` are by the number of the stored tensor. ``needed`` is the size of the elements in bytes.
    """

    copies: Mapping[int, Sequence[ElementCopy]]
    exact: Sequence[FileRange]
    shared: Sequence[FileRange]
    needed: int

    @property
    def nbytes(self) -> int:
        """The number of bytes that are read."""
        return count_bytes(self.exact) + count_bytes(self.shared)


class JoinedReads:
    """Plans and executes the reads of the stored tensors of a model. ``names`` has their names by number."""

    def __init__(self, reader: Reader, names: Sequence[str], gap: int) -> None:
        self._reader, self._names, self._gap = reader, names, gap
        self._files: dict[Source, int] = {}

    def plan(self, copies: Iterable[ElementCopy]) -> PlannedReads:
        """Plan the reads of some copies."""
        by_tensor: dict[int, list[ElementCopy]] = {}
        for copy in copies:
            by_tensor.setdefault(copy.tensor, []).append(copy)
        exact: list[FileRange] = []
        shared: list[FileRange] = []
        for tensor, group in by_tensor.items():
            spans = join_spans([span for copy in group for span in copy.view.spans(self._gap)], self._gap)
            # The bytes in the gaps are elements of other ranks.
            has_gaps = sum(stop - start for start, stop in spans) > sum(copy.view.nbytes for copy in group)
            for start, stop in spans:
                (shared if has_gaps else exact).extend(self._locate(TensorRange(tensor, start, stop)))
        needed = sum(copy.view.nbytes for group in by_tensor.values() for copy in group)
        return PlannedReads(by_tensor, exact, shared, needed)

    def run(self, reads: PlannedReads, rank: int, on_moved: OnBytesMoved) -> Fragments:
        """Execute reads. Return the CRCs of what was read, by the number of the stored tensor."""
        sinks = {tensor: ScatteredBytes(group) for tensor, group in reads.copies.items()}
        files = list(self._files)
        fragments = read_host_shared(files, reads.shared, rank, sinks.__getitem__, on_moved)
        return fragments | read_file_ranges(files, reads.exact, sinks.__getitem__, on_moved)

    def _locate(self, tensor_range: TensorRange) -> list[FileRange]:
        key = MODEL, self._names[tensor_range.tensor]
        ranges = find_file_ranges(self._reader, key, tensor_range, self._files)
        return [file_range._replace(local=file_range.start) for file_range in ranges]
