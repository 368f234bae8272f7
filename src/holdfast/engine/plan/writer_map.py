"""The ranks that may write each byte of the files of a save. Pure functions.

A rank knows its own bytes. This map tells it, for a few bytes of a file, whose bytes lie next to its own: every rank
derives the same answer from the specs of all ranks, without a message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.engine.plan.global_spec import GlobalTensor
from holdfast.engine.plan.placements import Coordinate, Division
from holdfast.engine.plan.ranges import ElementRange
from holdfast.engine.plan.routes import is_striped
from holdfast.engine.plan.shards import local_shard
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


class WriterMap:
    """The writers of the bytes of all files. ``spans`` are the places of the tensors in each file, by its number."""

    def __init__(
        self, spans: Mapping[int, Sequence[FileSpan]], file_sizes: Sequence[int], iter_writers: IterWriters
    ) -> None:
        self.file_sizes, self._iter_writers = file_sizes, iter_writers
        self._spans = {file: sorted(of_file) for file, of_file in spans.items()}
        self._starts = {file: [span.start for span in of_file] for file, of_file in self._spans.items()}

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
        spans = self._spans.get(file, [])
        for span in spans[max(0, bisect_right(self._starts.get(file, []), start) - 1) :]:
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

    def iter_writers(
        self, key: tuple[str, str], start: int, stop: int
    ) -> Iterator[tuple[ElementRange, tuple[int, ...]]]:
        """Yield the parts of bytes ``[start, stop)`` of a tensor with the ranks that may write them, ascending."""
        tensor = self._tensors[key]
        if key in self._first_stripes:
            yield from self._iter_stripe_owners(tensor, self._first_stripes[key], start, stop)
            return
        shards = self._locate_shards(tensor)
        first = bisect_right(shards, start, key=lambda shard: shard[0].stop)
        for shard_range, coordinate in shards[first:]:
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
