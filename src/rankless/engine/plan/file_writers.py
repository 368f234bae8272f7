"""The ranks that may write each byte of the files of a save. Pure functions.

A rank knows its own bytes. This map tells it, for a few bytes of a file, which ranks have the bytes next to its own.
Every rank derives the same answer from the specs of all ranks, without a message.

:mod:`rankless.engine.plan.save_plan` and, for conversions, :mod:`rankless.conversion.work_shares` build the map;
:mod:`rankless.engine.plan.writer_cells` asks it on every rank, if several hosts write or parts are uploaded. All ranks
must get the same pieces and fractions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.engine.plan.cell_transfers import Numbers
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.tensor_writers import (
    TensorKey,
    TensorWriters,
    WriterColumns,
    WriterNumbers,
    Writers,
    merge_columns,
)


class PlacedTensor(NamedTuple):
    """Bytes ``[start, stop)`` of a file that contain a tensor's bytes from byte ``tensor_start`` on."""

    start: int
    stop: int
    tensor: TensorKey
    tensor_start: int


class FilePiece(NamedTuple):
    """Bytes ``[start, stop)`` of a file, and the ranks that may write them; no ranks if they belong to no tensor."""

    start: int
    stop: int
    writers: Writers


class WriterMap:
    """The writers of the bytes of all files. ``spans`` are the places of the tensors in each file, by its number.

    Ranks that hold the same bytes share the writing of all tensors of a kind, in the order of the files.
    """

    def __init__(
        self, spans: Mapping[int, Sequence[PlacedTensor]], file_sizes: Sequence[int], tensor_writers: TensorWriters
    ) -> None:
        self.file_sizes, self._tensor_writers = file_sizes, tensor_writers
        self._spans = {file: sorted(of_file) for file, of_file in spans.items()}
        self._starts = {file: [span.start for span in of_file] for file, of_file in self._spans.items()}
        #: The number of the first span of each file, over all files.
        files = sorted(self._spans)
        counts = accumulate((len(self._spans[file]) for file in files), initial=0)
        self._first_numbers = dict(zip(files, counts, strict=False))
        #: The bytes of tensors of each kind, and of these the bytes before each span of each file.
        self._totals: dict[object, int] = {}
        self._before: dict[int, list[int]] = {
            file: [self._count_span(span) for span in self._spans[file]] for file in sorted(self._spans)
        }

    def _count_span(self, span: PlacedTensor) -> int:
        """Count the bytes of a span. Return the number of bytes of its kind before it."""
        kind = self._tensor_writers.kind_of(span.tensor)
        before = self._totals.get(kind, 0)
        self._totals[kind] = before + span.stop - span.start
        return before

    def fraction_before(self, file: int, position: int) -> float:
        """Return the fraction of the bytes of a kind of tensors that lies before a byte of one of them."""
        number = bisect_right(self._starts[file], position) - 1
        span = self._spans[file][number]
        kind = self._tensor_writers.kind_of(span.tensor)
        return (self._before[file][number] + position - span.start) / self._totals[kind]

    def fractions_before(self, file: int, positions: Numbers) -> NDArray[np.float64]:
        """Return the same for many bytes of tensors, ascending."""
        if not len(positions):
            return np.empty(0)
        first, stop = (bisect_right(self._starts[file], edge) for edge in (positions[0], positions[-1]))
        spans = self._spans[file][first - 1 : stop]
        totals = np.array([self._totals[self._tensor_writers.kind_of(span.tensor)] for span in spans])
        starts = np.array([span.start for span in spans])
        before = np.array(self._before[file][first - 1 : stop])
        span_numbers = np.searchsorted(starts, positions, "right") - 1
        fractions: NDArray[np.float64] = (before[span_numbers] + positions - starts[span_numbers]) / totals[
            span_numbers
        ]
        return fractions

    def first_tensor_start(self, file: int, start: int, stop: int) -> int:
        """Return the first byte in ``[start, stop)`` that begins a tensor; ``start`` if there is none."""
        starts = self._starts.get(file, [])
        number = bisect_right(starts, start - 1)
        return starts[number] if number < len(starts) and starts[number] < stop else start

    def tensor_number(self, file: int, position: int) -> int:
        """Return the number, over all files, of the tensor that has a byte of a file, or that is next to it."""
        return self._first_numbers[file] + max(0, bisect_right(self._starts[file], position) - 1)

    def has_gap(self, file: int, start: int, stop: int) -> bool:
        """Return whether any of the bytes ``[start, stop)`` of a file belong to no tensor."""
        reached, stop = start, min(stop, self.file_sizes[file])
        for span in self._spans_from(file, start):
            if span.start > reached or reached >= stop:
                break
            reached = max(reached, span.stop)
        return reached < stop

    def _spans_from(self, file: int, start: int) -> Iterator[PlacedTensor]:
        """Yield the spans of a file from the last one that begins at byte ``start`` or before."""
        spans = self._spans.get(file, [])
        for number in range(max(0, bisect_right(self._starts.get(file, []), start) - 1), len(spans)):
            yield spans[number]

    def iter_pieces(self, file: int, start: int, stop: int) -> Iterator[FilePiece]:
        """Yield the pieces of bytes ``[start, stop)`` of a file, ascending; adjacent ones have different writers."""
        current: FilePiece | None = None
        for piece in self._iter_unmerged(file, start, min(stop, self.file_sizes[file])):
            if current is not None and current.writers == piece.writers:
                current = current._replace(stop=piece.stop)
                continue
            if current is not None:
                yield current
            current = piece
        if current is not None:
            yield current

    def tabulate_pieces(self, file: int, start: int, stop: int) -> WriterColumns:
        """Return the pieces with writers as columns."""
        columns = [WriterColumns(*np.empty((len(WriterColumns._fields), 0), np.int64))]
        for span, low, high in self._clip_spans(file, start, min(stop, self.file_sizes[file])):
            shift = span.start - span.tensor_start
            starts, stops, writers = self._tensor_writers.tabulate(span.tensor, low - shift, high - shift)
            columns.append(WriterColumns(starts + shift, stops + shift, writers))
        return merge_columns(columns)

    @property
    def numbers(self) -> WriterNumbers:
        """The numbers of writers in the columns."""
        return self._tensor_writers.numbers

    def iter_gaps(self, file: int) -> Iterator[ElementRange]:
        """Yield the bytes of a file that belong to no tensor, such as its header."""
        reached = 0
        for span in self._spans.get(file, ()):
            if span.start > reached:
                yield ElementRange(reached, span.start)
            reached = max(reached, span.stop)
        if reached < self.file_sizes[file]:
            yield ElementRange(reached, self.file_sizes[file])

    def _iter_unmerged(self, file: int, start: int, stop: int) -> Iterator[FilePiece]:
        reached = start
        for span, low, high in self._clip_spans(file, start, stop):
            if low > reached:
                yield FilePiece(reached, low, ())
            shift = span.start - span.tensor_start
            for piece_range, writers in self._tensor_writers.iter_writers(span.tensor, low - shift, high - shift):
                yield FilePiece(piece_range.start + shift, piece_range.stop + shift, writers)
            reached = high
        if reached < stop:
            yield FilePiece(reached, stop, ())

    def _clip_spans(self, file: int, start: int, stop: int) -> Iterator[tuple[PlacedTensor, int, int]]:
        """Yield the spans with bytes in ``[start, stop)``, and the first of these bytes and the end of them."""
        for span in self._spans_from(file, start):
            if span.start >= stop:
                break
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                yield span, low, high
