"""Reads of the stored elements that copies need: sorted, joined over small gaps, straight into the targets.

Elements that several ranks need are read once: through the page cache of their host, or by one rank that sends them to
the others.

:class:`~rankless.inference.weights_loader.WeightsLoader` has one on each rank; its thread plans and runs.
:mod:`rankless.inference.planned_reads` plans only. All ranks must get the same stripes, in the same order, from the
same views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rankless.engine.io.p2p import P2PExchange
from rankless.engine.io.read import read_file_ranges
from rankless.engine.io.read_mapped import read_mapped
from rankless.engine.io.read_shared import read_shared
from rankless.engine.io.requests import Fragments, OnBytesMoved
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.element_ranges import ElementRange, TensorRange
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.stripe_owners import OwnedStripe, RemoteStripe, ShardContribution, StripeTask
from rankless.formats.native import MODEL
from rankless.formats.reader import Reader, find_file_ranges
from rankless.inference.packed_stripes import PackedSlice, PackedStripes
from rankless.inference.pending_copies import ElementCopy
from rankless.inference.scattered_bytes import ScatteredBytes
from rankless.inference.sharing_plan import SharedStripe, ViewsByTensor, iterate_stripes, split_by_use
from rankless.inference.strided_view import StridedView, join_spans
from rankless.storage.direct_io import BufferedReader
from rankless.storage.exact_reader import ExactReaderFactory
from rankless.storage.reader_pool import ReaderPool

#: The most bytes of a read past the page cache. Four times as many need 12 MB more of new memory on each rank, and to
#: touch that took as long as to read 80 MB.
_READ_BYTES = 2**20

#: The most bytes between two needed ranges that are read with them, in files and in an object store: a request to a
#: store takes longer than they do.
LOCAL_GAP, REMOTE_GAP = 64 * 2**10, 2**20

#: The number of each file, as :func:`~rankless.formats.reader.find_file_ranges` gives them.
_Files = dict[Source, int]

#: Copies by the number of their stored tensor.
CopiesByTensor = Mapping[int, Sequence[ElementCopy]]


class PlannedReads(NamedTuple):
    """The reads for some copies.

    ``exact`` are ranges that only this rank needs, and ``host_shared`` ranges that others of the host read, too. The
    stripes in ``exchanged`` are read by one rank each. ``stops`` has the end of each by its tensor and its start.
    """

    files: Sequence[Source]
    copies: CopiesByTensor
    exact: Sequence[FileRange]
    host_shared: Sequence[FileRange]
    exchanged: Sequence[StripeTask] = ()
    stops: Mapping[int, Mapping[int, int]] = {}

    @property
    def needed(self) -> int:
        """The size of the elements in bytes."""
        return sum(copy.view.nbytes for group in self.copies.values() for copy in group)

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank reads."""
        owned = (task.file_ranges for task in self.exchanged if isinstance(task, OwnedStripe))
        return count_bytes(self.exact) + count_bytes(self.host_shared) + sum(map(count_bytes, owned))


def group_by_tensor(copies: Iterable[ElementCopy]) -> CopiesByTensor:
    """Group copies by their stored tensor."""
    by_tensor: dict[int, list[ElementCopy]] = {}
    for copy in copies:
        by_tensor.setdefault(copy.tensor, []).append(copy)
    return by_tensor


class JoinedReads:
    """Plans and executes the reads of the stored tensors of a model by one rank.

    ``names`` has their names by number. Needed ranges are joined over gaps of at most ``gap`` bytes. If not ``hashed``,
    no CRCs are computed.
    """

    def __init__(
        self, reader: Reader, names: Sequence[str], gap: int, rank: int, on_moved: OnBytesMoved, *, hashed: bool
    ) -> None:
        self._reader, self._names, self._gap = reader, names, gap
        self._rank, self._on_moved, self._hashed = rank, on_moved, hashed

    def plan_alone(self, copies: CopiesByTensor, *, has_peers: bool) -> PlannedReads:
        """Plan the reads of some copies without knowledge of the needs of other ranks, if there are any."""
        files, exact, host_shared = _Files(), list[FileRange](), list[FileRange]()
        for tensor, group in copies.items():
            spans = self._join_spans(copy.view for copy in group)
            # Other ranks of the host may need the same bytes, and the bytes in the gaps are elements of them.
            has_gaps = sum(stop - start for start, stop in spans) > sum(copy.view.nbytes for copy in group)
            (host_shared if has_peers or has_gaps else exact).extend(self._locate_all(files, tensor, spans))
        return PlannedReads(list(files), copies, exact, host_shared)

    def plan_together(self, copies: CopiesByTensor, views: Sequence[ViewsByTensor], *, exchange: bool) -> PlannedReads:
        """Plan the reads of copies with ``views`` that all ranks know. With ``exchange``, one rank reads each byte.

        Each rank calls it in the vote "reading a round of weights".
        """
        files, exact, host_shared = _Files(), list[FileRange](), list[FileRange]()
        exchanged: list[StripeTask] = []
        stops: dict[int, dict[int, int]] = {}
        turn = 0
        for tensor in sorted({tensor for of_rank in views for tensor in of_rank}):
            of_tensor = {rank: of_rank[tensor] for rank, of_rank in enumerate(views) if tensor in of_rank}
            for region in split_by_use(of_tensor, self._gap):
                if exchange and len(region.ranks) > 1:
                    for stripe in iterate_stripes(tensor, region, turn):
                        turn += 1
                        exchanged += self._make_task(files, stripe, of_tensor)
                        stops.setdefault(tensor, {})[stripe.start] = stripe.stop
                elif self._rank in region.ranks:
                    spans = _clip(self._join_spans(of_tensor[self._rank]), region.range)
                    (exact if len(region.ranks) == 1 else host_shared).extend(self._locate_all(files, tensor, spans))
        return PlannedReads(list(files), copies, exact, host_shared, exchanged, stops)

    def _make_task(self, files: _Files, stripe: SharedStripe, views: ViewsByTensor) -> Iterator[StripeTask]:
        """Yield this rank's part in a stripe, if it has one."""
        tensor, start, stop, owner, ranks = stripe
        slices = {rank: PackedSlice(views[rank], start, stop) for rank in ranks}
        parts = {rank: ShardContribution((rank,), rank, start, part.size) for rank, part in slices.items()}
        file_ranges = self._locate(files, TensorRange(tensor, start, stop))
        if owner == self._rank:
            contributions = tuple((parts[rank], slices[rank]) for rank in ranks if parts[rank].size)
            yield OwnedStripe(file_ranges, contributions)  # type: ignore[arg-type]  # reading only calls copy_out
        elif self._rank in ranks and parts[self._rank].size:
            yield RemoteStripe(file_ranges, owner, parts[self._rank])

    def _join_spans(self, views: Iterable[StridedView]) -> list[ElementRange]:
        return join_spans([span for view in views for span in view.spans(self._gap)], self._gap)

    def _locate_all(self, files: _Files, tensor: int, spans: Iterable[ElementRange]) -> Iterator[FileRange]:
        for start, stop in spans:
            yield from self._locate(files, TensorRange(tensor, start, stop))

    def _locate(self, files: _Files, tensor_range: TensorRange) -> list[FileRange]:
        key = MODEL, self._names[tensor_range.tensor]
        ranges = find_file_ranges(self._reader, key, tensor_range, files)
        return [file_range._replace(local=file_range.start) for file_range in ranges]

    def run(self, reads: PlannedReads, p2p: P2PExchange | None = None) -> Fragments:
        """Execute reads. Return the CRCs of the fragments, by the number of the stored tensor.

        The thread of the loader calls it, or the one that needs elements at once.
        """
        files, rank, on_moved = reads.files, self._rank, self._on_moved
        fragments: Fragments = {}
        if p2p is not None and reads.exchanged:
            packed = {tensor: PackedStripes(reads.copies.get(tensor, ()), ends) for tensor, ends in reads.stops.items()}
            fragments = read_shared(files, reads.exchanged, packed.__getitem__, p2p, on_moved, hashed=self._hashed)
        sinks = {tensor: ScatteredBytes(group) for tensor, group in reads.copies.items()}
        for more in (
            read_mapped(files, reads.host_shared, rank, sinks.__getitem__, on_moved, hashed=self._hashed),
            read_file_ranges(
                files, reads.exact, sinks.__getitem__, on_moved, make_readers=_make_readers, hashed=self._hashed
            ),
        ):
            for tensor, read in more.items():
                fragments.setdefault(tensor, []).extend(read)
        return fragments


def _make_readers(open_reader: Callable[[Path], BufferedReader]) -> ReaderPool:
    """Make the readers of ranges that no other rank reads, with smaller buffers than ``open_reader`` has."""
    del open_reader
    return ReaderPool(ExactReaderFactory(_READ_BYTES))


def _clip(spans: Iterable[ElementRange], region: ElementRange) -> Iterator[ElementRange]:
    """Yield the spans that are in a region. Each is in one region as a whole."""
    return (span for span in spans if region.start <= span.start < region.stop)
