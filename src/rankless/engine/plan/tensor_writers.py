"""The ranks that may write each byte of the tensors of a save. Pure functions.

Most questions are about a few bytes, and an answer is a list of pieces. If the shards of a tensor are tiny, thousands
of ranks have bytes in one cell of a file: then an answer has columns of numbers, and no loop looks at each piece.

:mod:`rankless.engine.plan.file_writers` asks it on every rank while it plans a save from several hosts, an upload, or a
conversion by several ranks. The turns of stripes must equal the turns in
:class:`~rankless.engine.plan.stripe_owners.StripeRoutes`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.engine.plan.cell_transfers import Numbers
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.global_spec import GlobalTensor
from rankless.engine.plan.layout_types import Coordinate, Division
from rankless.engine.plan.shard_byte_ranges import even_shards, local_shard
from rankless.engine.plan.stripe_owners import StripeOwners, StripeTurns, first_shard, is_striped
from rankless.engine.plan.stripes import split_into_stripes
from rankless.ondisk.data_files import TensorInfo

#: The ranks, ascending, that may write the same bytes.
Writers = tuple[int, ...]

#: Returns the ranks that may write a shard of a tensor.
WritersOf = Callable[[GlobalTensor, Coordinate], Writers]

#: The group and name of a tensor.
TensorKey = tuple[str, str]


class WriterColumns(NamedTuple):
    """Pieces ``[start, stop)`` of a tensor or file, ascending, and the number of the ranks that may write each one."""

    starts: Numbers
    stops: Numbers
    writers: Numbers


class WriterNumbers:
    """Numbers for tuples of ranks. ``writers`` has the ranks with each number."""

    def __init__(self) -> None:
        self.writers: list[Writers] = []
        self._numbers: dict[Writers, int] = {}
        #: The ranks of all ``writers``, and of each the number of ranks and the place of the first.
        self._ranks = self._counts = self._firsts = np.empty(0, np.int64)

    def number(self, writers: Writers) -> int:
        """Return the number of a tuple of ranks: a new one if it has none."""
        number = self._numbers.setdefault(writers, len(self.writers))
        if number == len(self.writers):
            self.writers.append(writers)
        return number

    def choose_shares(self, numbers: Numbers, find_fractions: Callable[[], NDArray[np.float64]]) -> Numbers:
        """Return a rank of each of these writers: the one after a fraction of their ranks, which need not be known."""
        if len(self._counts) < len(self.writers):
            self._ranks = np.fromiter(itertools.chain.from_iterable(self.writers), np.int64)
            self._counts = np.fromiter(map(len, self.writers), np.int64)
            self._firsts = np.cumsum(self._counts) - self._counts
        counts, firsts = self._counts[numbers], self._firsts[numbers]
        if (counts == 1).all():
            return self._ranks[firsts]
        return self._ranks[firsts + np.minimum((find_fractions() * counts).astype(np.int64), counts - 1)]


def choose_share(writers: Writers, fraction: float) -> int:
    """Return one of the writers: the one after this fraction of their ranks."""
    return writers[min(int(fraction * len(writers)), len(writers) - 1)]


class TensorWriters(ABC):
    """The ranks that may write the bytes of each tensor. The columns use ``numbers``."""

    def __init__(self) -> None:
        self.numbers = WriterNumbers()

    @abstractmethod
    def iter_writers(self, key: TensorKey, start: int, stop: int) -> Iterator[tuple[ElementRange, Writers]]:
        """Yield the parts of bytes ``[start, stop)`` of a tensor, ascending, with the ranks that may write them."""

    def tabulate(self, key: TensorKey, start: int, stop: int) -> WriterColumns:
        """Return the same as columns."""
        rows = ((*part, self.numbers.number(writers)) for part, writers in self.iter_writers(key, start, stop))
        return WriterColumns(*np.array(list(rows), np.int64).reshape(-1, len(WriterColumns._fields)).T)

    @abstractmethod
    def kind_of(self, key: TensorKey) -> object:
        """Return a value that is equal for tensors that are divided among the same ranks.

        A wrong answer costs time, and changes no bytes.
        """


class EqualWriters(TensorWriters):
    """Tensors where the same ranks may write all bytes."""

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__()
        self._ranks = tuple(ranks)

    def iter_writers(self, key: TensorKey, start: int, stop: int) -> Iterator[tuple[ElementRange, Writers]]:  # noqa: ARG002
        """See :class:`TensorWriters`."""
        yield ElementRange(start, stop), self._ranks

    def kind_of(self, key: TensorKey) -> object:  # noqa: ARG002
        """See :class:`TensorWriters`."""
        return None


class ShardWriters(TensorWriters):
    """The ranks that hold a shard, or that assemble a stripe.

    :class:`StripeRoutes` routes the ``tensors`` in the same order: both count the turns of ranks at stripes.
    """

    def __init__(self, tensors: Mapping[TensorKey, GlobalTensor], writers_of: WritersOf) -> None:
        super().__init__()
        self._tensors, self._writers_of = tensors, writers_of
        turns = StripeTurns()
        self._stripe_owners = {
            key: turns.assign_owners(tensor) for key, tensor in tensors.items() if is_striped(tensor)
        }
        self._stripes: dict[tuple[TensorInfo, Division], list[ElementRange]] = {}
        self._shards: dict[tuple[TensorInfo, Division], list[tuple[ElementRange, Coordinate]]] = {}
        self._numbers_by_shard: dict[object, Numbers] = {}
        self._kinds: dict[TensorKey, object] = {}

    def kind_of(self, key: TensorKey) -> object:
        """Return a value that is equal for tensors with the same writers of their first shards, and for all in stripes.

        Of the writers only the number and the ends are compared.
        """
        if key not in self._kinds:
            tensor = self._tensors[key]
            kind: tuple[object, ...] = ()
            if key not in self._stripe_owners:
                writers = self._writers_of(tensor, (0,) * len(tensor.division))
                kind = (len(writers), writers[:1], writers[-1:])
            self._kinds[key] = kind
        return self._kinds[key]

    def iter_writers(self, key: TensorKey, start: int, stop: int) -> Iterator[tuple[ElementRange, Writers]]:
        """See :class:`TensorWriters`."""
        tensor = self._tensors[key]
        if key in self._stripe_owners:
            yield from self._iter_stripe_owners(tensor, self._stripe_owners[key], start, stop)
            return
        for shard_range, coordinate in self._iter_shards(tensor, start, stop):
            if shard_range.start >= stop:
                break
            clipped = ElementRange(max(start, shard_range.start), min(stop, shard_range.stop))
            yield clipped, self._writers_of(tensor, coordinate)

    def tabulate(self, key: TensorKey, start: int, stop: int) -> WriterColumns:
        """See :class:`TensorWriters`."""
        tensor = self._tensors[key]
        even = even_shards(tensor.info, tensor.division)
        if even is None or key in self._stripe_owners:
            return super().tabulate(key, start, stop)
        indices = np.arange(even.index_at(start), even.index_at(stop - 1) + 1)
        starts = np.maximum(indices * even.size - even.shift, start)
        stops = np.minimum((indices + 1) * even.size - even.shift, stop)
        return WriterColumns(starts, stops, self._number_writers(tensor)[indices])

    def _number_writers(self, tensor: GlobalTensor) -> Numbers:
        """Return the number of the writers of each shard of a tensor with even shards."""
        reporting_ranks = () if tensor.is_complete else tensor.reporting_ranks
        count = tensor.division[0][0]
        key = tensor.layouts, tensor.whole_ranks, reporting_ranks, tensor.shared, count
        numbers = self._numbers_by_shard.get(key)
        if numbers is None:
            writers = (self._writers_of(tensor, (index,)) for index in range(count))
            numbers = self._numbers_by_shard[key] = np.array(list(map(self.numbers.number, writers)), np.int64)
        return numbers

    def _iter_stripe_owners(
        self, tensor: GlobalTensor, owners: StripeOwners, start: int, stop: int
    ) -> Iterator[tuple[ElementRange, Writers]]:
        stripes = self._locate_stripes(tensor)
        for number in range(bisect_right(stripes, start, key=_range_end), len(stripes)):
            if stripes[number].start >= stop:
                break
            clipped = ElementRange(max(start, stripes[number].start), min(stop, stripes[number].stop))
            yield clipped, (owners.owner_of(number),)

    def _locate_stripes(self, tensor: GlobalTensor) -> list[ElementRange]:
        """Return the stripes of a tensor, ascending."""
        stripes = self._stripes.get((tensor.info, tensor.division))
        if stripes is None:
            stripes = self._stripes[tensor.info, tensor.division] = list(split_into_stripes(first_shard(tensor).shape))
        return stripes

    def _iter_shards(self, tensor: GlobalTensor, start: int, stop: int) -> Iterator[tuple[ElementRange, Coordinate]]:
        """Yield the ranges of shards, ascending: at least those with bytes in ``[start, stop)``."""
        even = even_shards(tensor.info, tensor.division)
        if even is None:
            shards = self._locate_shards(tensor)
            yield from itertools.islice(shards, bisect_right(shards, start, key=lambda shard: shard[0].stop), None)
            return
        for index in range(even.index_at(start), even.index_at(stop - 1) + 1):
            yield even.range_of(index), (index,)

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


def _range_end(element_range: ElementRange) -> int:
    return element_range.stop


def merge_columns(columns: Sequence[WriterColumns]) -> WriterColumns:
    """Return all pieces, ascending; adjacent ones have different writers."""
    starts, stops, writers = (np.concatenate(column) for column in zip(*columns, strict=True))
    if not len(starts):
        return WriterColumns(starts, stops, writers)
    is_first = np.concatenate([[True], (stops[:-1] != starts[1:]) | (writers[:-1] != writers[1:])])
    is_last = np.concatenate([is_first[1:], [True]])
    return WriterColumns(starts[is_first], stops[is_last], writers[is_first])
