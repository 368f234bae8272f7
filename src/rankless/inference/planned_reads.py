"""The plan of the reads of each rank of an engine from a stored model: in one process, from the headers alone.

Each rank's model takes lazy tensors. Their copies are noted and never executed. Then the same planner as for a real
load divides the reads among the ranks.

``rankless show --for vllm`` calls it (:mod:`rankless.cli.show.engine_reads`), with the models of
:mod:`rankless.vllm.lone_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

import torch

from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.formats.reader import Reader
from rankless.inference.joined_reads import LOCAL_GAP, REMOTE_GAP, JoinedReads
from rankless.inference.lazy_tensor import LazyTensor, StoredContent
from rankless.inference.pending_copies import make_copy
from rankless.inference.sharing_plan import ViewsByTensor
from rankless.inference.stored_tensors import StoredTensors
from rankless.inference.strided_view import join_spans

#: Lets the model of a rank take the weights. Returns the size of its parameters in bytes.
LoadOnRank = Callable[[int, "PlannedWeights"], int]


@dataclass(frozen=True)
class RankReads:
    """The reads of one rank, in bytes.

    Attributes:
        parameters: The size of the rank's parameters.
        needed: The size of the elements that the loader of its model asks for.
        alone: From files: bytes that no other rank of the host reads.
        shared: From files: bytes that others read, too. It leaves the disk once, if all are on one host.
        from_store: From an object store, or if the ranks are on several hosts: ranks send each other the bytes that
            they share.
        computed: The tensors that the loader uses other than by a copy, each with the first operation.
    """

    parameters: int
    needed: int
    alone: int
    shared: int
    from_store: int
    computed: dict[str, str]


class PlannedLoad(NamedTuple):
    """The reads of all ranks, and the bytes that leave the disk of a host which has them all."""

    ranks: list[RankReads]
    from_disk: int


@dataclass
class PlannedWeights:
    """The weights that the model of one rank takes. Nothing is read: it computes with zeros.

    Lazy tensors call it: it must have the methods of :class:`~rankless.inference.lazy_tensor.Loader`.
    """

    stored: StoredTensors
    contents: WeakSet[StoredContent] = field(default_factory=WeakSet)
    #: The elements that are copied, and those that are read by themselves because they are used otherwise.
    copied: ViewsByTensor = field(default_factory=dict)
    used: ViewsByTensor = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(len(self.stored.names)):
            yield from self.stored.iterate_lazy(number, self)

    def note_copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """See :class:`~rankless.inference.lazy_tensor.Loader`."""
        self._note(self.copied, source.content.name, source.meta, target)

    def read_view(self, source: LazyTensor, reason: str) -> torch.Tensor:
        """See :class:`~rankless.inference.lazy_tensor.Loader`."""
        self.computed.setdefault(source.content.name, reason)
        self._note(self.used, source.content.name, source.meta, source.meta)
        return torch.zeros(source.shape, dtype=source.dtype)

    def read_content(self, content: StoredContent, reason: str) -> torch.Tensor:
        """See :class:`~rankless.inference.lazy_tensor.Loader`."""
        self.computed.setdefault(content.name, reason)
        self._note(self.used, content.name, content.meta, content.meta)
        with torch.inference_mode(mode=False):
            look = content.look
            return torch.empty_strided(look.shape, look.stride(), dtype=look.dtype).zero_()

    def _note(self, views: ViewsByTensor, name: str, meta: torch.Tensor, target: torch.Tensor) -> None:
        number = self.stored.numbers[name]
        copy = make_copy(number, meta, target)
        if copy is None:  # elements that as_strided mixes: the tensor is read whole
            whole = self.stored.make_meta(name)
            copy = make_copy(number, whole, whole)
        if copy is not None:
            views.setdefault(number, []).append(copy.view)


def plan_reads(reader: Reader, size: int, load: LoadOnRank) -> PlannedLoad:
    """Plan the reads of ``size`` ranks; ``load`` is called for each."""
    stored = StoredTensors(reader)
    loads = [PlannedWeights(stored) for _ in range(size)]
    parameters = [load(rank, weights) for rank, weights in enumerate(loads)]
    copied = [weights.copied for weights in loads]
    ranks, from_files = [], list[FileRange]()
    for rank, weights in enumerate(loads):
        local, remote = (
            JoinedReads(reader, stored.names, gap, rank, _ignore_bytes, hashed=False) for gap in (LOCAL_GAP, REMOTE_GAP)
        )
        used = [weights.used if other == rank else {} for other in range(size)]  # is never shared
        plans = [reads.plan_together({}, views, exchange=False) for reads, views in ((local, copied), (local, used))]
        exchanged = [remote.plan_together({}, views, exchange=True).nbytes for views in (copied, used)]
        from_files += [one for plan in plans for one in (*plan.exact, *plan.host_shared)]
        ranks.append(
            RankReads(
                parameters[rank],
                sum(view.nbytes for views in (weights.copied, weights.used) for one in views.values() for view in one),
                sum(count_bytes(plan.exact) for plan in plans),
                sum(count_bytes(plan.host_shared) for plan in plans),
                sum(exchanged),
                weights.computed,
            )
        )
    return PlannedLoad(ranks, _count_distinct(from_files))


def _count_distinct(ranges: Iterable[FileRange]) -> int:
    """Return how many bytes are in any of the ranges."""
    by_tensor: dict[int, list[ElementRange]] = {}
    for one in ranges:
        by_tensor.setdefault(one.tensor, []).append(ElementRange(one.start, one.stop))
    return sum(stop - start for spans in by_tensor.values() for start, stop in join_spans(spans, 0))


def _ignore_bytes(count: int) -> None:
    """Ignore progress: nothing is read."""
    del count
