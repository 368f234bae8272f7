"""The ranks that may write each byte of the files of a save. Pure functions.

A rank knows its own bytes. This map tells it, for a few bytes of a file, whose bytes lie next to its own: every rank
derives the same answer from the specs of all ranks, without a message.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from holdfast.engine.plan.global_spec import GlobalTensor
from holdfast.engine.plan.placements import Coordinate, Division
from holdfast.engine.plan.ranges import ElementRange
from holdfast.engine.plan.routes import is_striped
from holdfast.engine.plan.shards import end_of_shard, has_range_per_shard, local_shard
from holdfast.engine.plan.stripes import split_into_stripes
from holdfast.ondisk.files import TensorInfo

#: Returns the ranks, ascending, that may write a shard of a tensor.
WritersOf = Callable[[GlobalTensor, Coordinate], tuple[int, ...]]


class FileSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a file that contain a tensor's bytes from byte ``tensor_start`` on."""

    start: int
    stop: int
    tensor: tuple[str, str]
    tensor_start: int


class FilePiece(NamedTuple):
    """Bytes ``[start, stop)`` of a file, and the ranks that may write them; no ranks if they belong to no tensor."""

    start: int
    stop: int
    writers: tuple[int, ...]


#: Yields the parts of bytes ``[start, stop)`` of a tensor with the ranks that may write them, ascending.
IterWriters = Callable[[tuple[str, str], int, int], Iterable[tuple[ElementRange, tuple[int, ...]]]]


#: Returns a value that is equal for tensors that are divided among the same ranks.
KindOf = Callable[[tuple[str, str]], object]


class WriterMap:
    """The writers of the bytes of all files. ``spans`` are the places of the tensors in each file, by its number.

    Ranks that hold the same bytes share the writing of all tensors of a kind, in the order of the files.
    """

    def __init__(
        self,
        spans: Mapping[int, Sequence[FileSpan]],
        file_sizes: Sequence[int],
        iter_writers: IterWriters,
        kind_of: KindOf = lambda _: None,
    ) -> None:
        self.file_sizes, self._iter_writers, self._kind_of = file_sizes, iter_writers, kind_of
        self._spans = {file: sorted(of_file) for file, of_file in spans.items()}
        self._starts = {file: [span.start for span in of_file] for file, of_file in self._spans.items()}
        #: The bytes of tensors of each kind, and of these the bytes before each span of each file.
        self._totals: dict[object, int] = {}
        self._before: dict[int, list[int]] = {
            file: [self._count_span(span) for span in self._spans[file]] for file in sorted(self._spans)
        }

    def _count_span(self, span: FileSpan) -> int:
        """Count the bytes of a span, and return those of its kind before it."""
        kind = self._kind_of(span.tensor)
        before = self._totals.get(kind, 0)
        self._totals[kind] = before + span.stop - span.start
        return before

    def fraction_before(self, file: int, position: int) -> float:
        """Return which part of the bytes of tensors of its kind is before a byte of a tensor."""
        number = bisect_right(self._starts[file], position) - 1
        span = self._spans[file][number]
        return (self._before[file][number] + position - span.start) / self._totals[self._kind_of(span.tensor)]

    def first_tensor_start(self, file: int, start: int, stop: int) -> int:
        """Return the first byte in ``[start, stop)`` at which a tensor begins; ``start`` if there is none."""
        starts = self._starts.get(file, [])
        number = bisect_right(starts, start - 1)
        return starts[number] if number < len(starts) and starts[number] < stop else start

    def has_gap(self, file: int, start: int, stop: int) -> bool:
        """Return whether any of the bytes ``[start, stop)`` of a file belong to no tensor."""
        reached, stop = start, min(stop, self.file_sizes[file])
        for span in self._spans_from(file, start):
            if span.start > reached or reached >= stop:
                break
            reached = max(reached, span.stop)
        return reached < stop

    def _spans_from(self, file: int, start: int) -> Iterator[FileSpan]:
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
        for span in self._spans_from(file, start):
            if span.start >= stop:
                break
            low, high = max(start, span.start), min(stop, span.stop)
            if low >= high:
                continue
            if low > reached:
                yield FilePiece(reached, low, ())
            shift = span.start - span.tensor_start
            for piece_range, writers in self._iter_writers(span.tensor, low - shift, high - shift):
                yield FilePiece(piece_range.start + shift, piece_range.stop + shift, writers)
            reached = high
        if reached < stop:
            yield FilePiece(reached, stop, ())


class ShardWriters:
    """The ranks that may write the bytes of each tensor: those that hold a shard, or that assemble a stripe.

    ``tensors`` are in the order in which stripes are assigned to ranks.
    """

    def __init__(self, tensors: Mapping[tuple[str, str], GlobalTensor], writers_of: WritersOf) -> None:
        self._tensors, self._writers_of = tensors, writers_of
        self._first_stripes = _number_stripes(tensors)
        self._stripes: dict[tuple[TensorInfo, Division], list[ElementRange]] = {}
        self._shards: dict[tuple[TensorInfo, Division], list[tuple[ElementRange, Coordinate]]] = {}
        self._kinds: dict[tuple[str, str], object] = {}

    def kind_of(self, key: tuple[str, str]) -> object:
        """Return a value that is equal for tensors whose first shards have the same writers, and for all in stripes.

        Of the writers only the number and the ends are compared: a wrong answer costs time, and changes no bytes.
        """
        if key not in self._kinds:
            tensor = self._tensors[key]
            kind: tuple[object, ...] = ()
            if key not in self._first_stripes:
                writers = self._writers_of(tensor, (0,) * len(tensor.division))
                kind = (len(writers), writers[:1], writers[-1:])
            self._kinds[key] = kind
        return self._kinds[key]

    def iter_writers(
        self, key: tuple[str, str], start: int, stop: int
    ) -> Iterator[tuple[ElementRange, tuple[int, ...]]]:
        """Yield the parts of bytes ``[start, stop)`` of a tensor with the ranks that may write them, ascending."""
        tensor = self._tensors[key]
        if key in self._first_stripes:
            yield from self._iter_stripe_owners(tensor, self._first_stripes[key], start, stop)
            return
        for shard_range, coordinate in self._iter_shards(tensor, start, stop):
            if shard_range.start >= stop:
                break
            clipped = ElementRange(max(start, shard_range.start), min(stop, shard_range.stop))
            yield clipped, self._writers_of(tensor, coordinate)

    def _iter_stripe_owners(
        self, tensor: GlobalTensor, first_number: int, start: int, stop: int
    ) -> Iterator[tuple[ElementRange, tuple[int, ...]]]:
        candidates, stripes = tensor.all_ranks(), self._locate_stripes(tensor)
        for number in range(bisect_right(stripes, start, key=_range_end), len(stripes)):
            if stripes[number].start >= stop:
                break
            clipped = ElementRange(max(start, stripes[number].start), min(stop, stripes[number].stop))
            yield clipped, (candidates[(first_number + number) % len(candidates)],)

    def _locate_stripes(self, tensor: GlobalTensor) -> list[ElementRange]:
        """Return the stripes of a tensor, ascending."""
        stripes = self._stripes.get((tensor.info, tensor.division))
        if stripes is None:
            stripes = self._stripes[tensor.info, tensor.division] = list(_iter_stripes(tensor))
        return stripes

    def _iter_shards(self, tensor: GlobalTensor, start: int, stop: int) -> Iterator[tuple[ElementRange, Coordinate]]:
        """Yield the ranges of shards, ascending: at least those with bytes in ``[start, stop)``."""
        info, division = tensor.info, tensor.division
        if not has_range_per_shard(division):
            shards = self._locate_shards(tensor)
            yield from itertools.islice(shards, bisect_right(shards, start, key=lambda shard: shard[0].stop), None)
            return
        # Of thousands of shards a few are needed, and the last ones may all be empty.
        numbers, end_of = range(division[0][0]), partial(end_of_shard, info, division)
        for index in numbers[bisect_right(numbers, start, key=end_of) : bisect_left(numbers, stop, key=end_of) + 1]:
            yield from ((shard_range, (index,)) for shard_range in local_shard(info, division, (index,)).iter_ranges())

    def _locate_shards(self, tensor: GlobalTensor) -> list[tuple[ElementRange, Coordinate]]:
        """Return the ranges of all shards of a tensor, ascending, with the coordinates of their shards."""
        table = self._shards.get((tensor.info, tensor.division))
        if table is None:
            table = self._shards[tensor.info, tensor.division] = sorted(
                (shard_range, coordinate)
                for coordinate in tensor.iter_coordinates()
                for shard_range in local_shard(tensor.info, tensor.division, coordinate).iter_ranges()
            )
        return table


def _number_stripes(tensors: Mapping[tuple[str, str], GlobalTensor]) -> dict[tuple[str, str], int]:
    """Return the number of the first stripe of each striped tensor, as ``StripeRoutes`` counts them."""
    counts: dict[tuple[int, ...], int] = {}
    numbers: dict[tuple[str, str], int] = {}
    for key, tensor in tensors.items():
        if is_striped(tensor):
            candidates = tensor.all_ranks()
            numbers[key] = counts.get(candidates, 0)
            counts[candidates] = numbers[key] + sum(1 for _ in _iter_stripes(tensor))
    return numbers


def _iter_stripes(tensor: GlobalTensor) -> Iterator[ElementRange]:
    shape = local_shard(tensor.info, tensor.division, (0,) * len(tensor.division)).shape
    return split_into_stripes(shape)


def _range_end(element_range: ElementRange) -> int:
    return element_range.stop
