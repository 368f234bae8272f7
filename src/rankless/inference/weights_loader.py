"""Executes the copies of lazy tensors while the model's own ``load_weights`` runs.

Copies are noted, and executed in large batches by a thread next to the caller, which goes on to plan. All other uses of
the memory that a copy fills have to wait for the copy: :mod:`rankless.inference.copies_first` sees to that.

:class:`~rankless.inference.open_weights.ModelWeights` makes one on each rank. Votes are held in the loader's thread
only, in the order of the rounds. Batches are executed in the order of their copies.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.io.requests import Fragments, OnBytesMoved
from rankless.errors import StateError
from rankless.formats.native import MODEL
from rankless.formats.reader import Reader, detect_replacement
from rankless.inference.joined_reads import (
    LOCAL_GAP,
    REMOTE_GAP,
    CopiesByTensor,
    JoinedReads,
    PlannedReads,
    group_by_tensor,
)
from rankless.inference.lazy_tensor import LazyTensor, StoredContent
from rankless.inference.pending_copies import ElementCopy, FilledMemory, PendingCopies, make_copy, memory_of
from rankless.inference.read_rounds import ReadRounds
from rankless.inference.stored_slice import StoredSlice
from rankless.inference.stored_tensors import StoredTensors
from rankless.inference.weights_report import WeightsReport
from rankless.storage.closing import ClosingMixin
from rankless.storage.store import store_of

#: Copies of as many bytes are read next to the caller while it goes on.
_BATCH_BYTES = 256 * 2**20

#: The fragments that were read for some copies.
_Result = tuple[PlannedReads, Fragments]


class WeightsLoader(ClosingMixin):
    """The loader of one model's tensors on one rank.

    It belongs to the thread that makes it. Copies of other threads, which no mode of torch observes, are executed when
    they are made.
    """

    def __init__(
        self,
        reader: Reader,
        group: RankGroup,
        session: Session,
        on_moved: OnBytesMoved,
        *,
        exchange: bool,
        verify: bool,
    ) -> None:
        """Make the loader of the model of a checkpoint. With ``exchange``, ranks send shared bytes."""
        self._reader = reader
        self._stored = StoredTensors(reader)
        self.names = self._stored.names
        gap = REMOTE_GAP if store_of(reader.path).is_remote else LOCAL_GAP
        hashed = verify and any(reader.block_crcs(MODEL, name) is not None for name in self.names)
        self._reads = JoinedReads(reader, self.names, gap, session.rank, on_moved, hashed=hashed)
        self._has_peers = session.size > 1
        sizes = self._stored.sizes
        self._rounds = ReadRounds(sizes, group, session, exchange=exchange) if session.size > 1 else None
        self._pending = PendingCopies()
        self._thread, self._lock = threading.get_ident(), threading.RLock()
        #: The addresses of storages that may be changed without torch.
        self._given_away: set[int] = set()
        #: By the addresses of storages, how many bytes were written into them, by copies and by other operations.
        self._written: Counter[int] = Counter()
        self._executor = DaemonExecutor("rankless weights")
        #: The batches that the thread executes, each with the memory that it fills.
        self._running: list[tuple[Future[_Result], FilledMemory]] = []
        self._is_closed = False
        #: The contents that existing lazy tensors are views of.
        self.contents: WeakSet[StoredContent] = WeakSet()
        #: The numbers of the tensors that something was read of, and the CRCs of the read fragments.
        self.used: set[int] = set()
        self.fragments: Fragments = {}
        self._needed_bytes = self._read_bytes = 0
        #: The tensors that were used other than by a copy, each with the operation.
        self._computed: dict[str, str] = {}
        self._whole: dict[str, str] = {}

    @property
    def is_session_over(self) -> bool:
        """True if the ranks have failed together: there is no further vote."""
        return self._rounds is not None and self._rounds.has_failed

    @property
    def keys(self) -> frozenset[str]:
        """The names of all tensors; tied ones have several."""
        return frozenset(key for name in self.names for key in self._stored.keys(name))

    @property
    def used_keys(self) -> frozenset[str]:
        """The names of the tensors that something was read of."""
        return frozenset(key for number in list(self.used) for key in self._stored.keys(self.names[number]))

    def iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the lazy tensor of each stored tensor, in the order of the files; tied ones twice."""
        try:
            for number in range(len(self.names)):
                self._advance(number)
                yield from self._stored.iterate_lazy(number, self)
        finally:  # a loader that needs no more may wait for ranks that wait for this one's part in later rounds
            self._begin_rounds()

    def slices(self) -> dict[str, StoredSlice]:
        """Return a slice of each stored tensor, by its name; by several names if it is tied."""
        return {
            key: StoredSlice(self._stored.info(name), partial(self._read_index, name))
            for name in self.names
            for key in self._stored.keys(name)
        }

    def _read_index(self, name: str, index: Any) -> torch.Tensor:
        """Return the elements of a stored tensor at an index of any kind that torch knows."""
        lazy = self._stored.make_lazy(name, self)
        self._check_open(lazy.content)
        part = lazy[index]
        if not isinstance(part, LazyTensor):  # a list of indices, or a mask: torch had to read the tensor
            return part
        return self._read(name, part.meta, torch.empty(part.shape, dtype=part.dtype))

    def note_copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """See :class:`~rankless.inference.lazy_tensor.Loader`."""
        self._check_open(source.content)
        if target.is_meta:  # an engine that counts first what it is going to load
            return
        self.note_written(target)
        copy = make_copy(self._stored.numbers[source.content.name], source.meta, target)
        if copy is None:
            self.fill_before_use([target])
            target.copy_(self.read_view(source, "as_strided"))
            return
        with self._lock:
            if threading.get_ident() != self._thread or memory_of(target).start in self._given_away:
                self.fill_before_use([target])
                self._run_now([copy])
            elif not self._pending.add(copy):
                self._begin_batch()  # batches are executed in their order
                self._pending.add(copy)

    def read_view(self, source: LazyTensor, reason: str) -> torch.Tensor:
        """See :class:`~rankless.inference.lazy_tensor.Loader`."""
        self._check_open(source.content)
        self._computed.setdefault(source.content.name, reason)
        target = torch.empty(source.shape, dtype=source.dtype)
        return self._read(source.content.name, source.meta, target).to(source.device)

    def read_content(self, content: StoredContent, reason: str) -> torch.Tensor:
        """See :class:`~rankless.inference.lazy_tensor.Loader`."""
        self._check_open(content)
        self._whole.setdefault(content.name, reason)
        look = content.look
        with torch.inference_mode(mode=False):
            target = torch.empty_strided(look.shape, look.stride(), dtype=look.dtype)
            return self._read(content.name, content.meta, target)

    def _read(self, name: str, meta: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Read elements of a stored tensor into ``target``, and return it."""
        copy = make_copy(self._stored.numbers[name], meta, target)
        if copy is None:  # elements that as_strided mixes
            whole = self._stored.make_meta(name)
            flat = self._read(name, whole, torch.empty(whole.shape, dtype=whole.dtype)).view(-1).view(meta.dtype)
            return target.copy_(flat.as_strided(meta.shape, meta.stride(), meta.storage_offset()))
        self._run_now([copy])
        return target

    def read_held(self) -> None:
        """Read the contents that a lazy tensor exists for, whole: they are plain tensors from now on."""
        for content in [*self.contents]:
            content.make_real("held")

    def fill_before_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """See :class:`~rankless.inference.copies_first.FillingLoader`."""
        if self._pending or self._running:
            with self._lock:
                if any(map(self._fills, tensors)):
                    self.flush()

    def _fills(self, tensor: torch.Tensor) -> bool:
        try:
            memory = memory_of(tensor)
        except (NotImplementedError, RuntimeError):  # a kind of tensor without a storage: its parts have some
            return False
        return self._pending.filled.overlaps(memory) or any(filled.overlaps(memory) for _, filled in self._running)

    def note_written(self, tensor: torch.Tensor) -> None:
        """See :class:`~rankless.inference.copies_first.FillingLoader`."""
        with suppress(NotImplementedError, RuntimeError):  # a kind of tensor without a storage: its parts have some
            self._written[memory_of(tensor).start] += tensor.nbytes

    def count_written(self, tensor: torch.Tensor) -> int:
        """Return how many bytes were written into the storage of a tensor; bytes written twice count twice."""
        return self._written[memory_of(tensor).start]

    def fill_at_once(self, tensor: torch.Tensor) -> None:
        """See :class:`~rankless.inference.copies_first.FillingLoader`."""
        self._given_away.add(memory_of(tensor).start)

    def flush(self) -> None:
        """Execute all copies, and wait for them. Raises the error of a read.

        The end of the block calls it, in the vote "reading the weights".
        """
        self._begin_batch()
        self._join()

    def end_reads(self) -> None:
        """Let lazy tensors and slices that threads still use raise ``StateError`` from now on."""
        with self._lock:
            self._is_closed = True

    def take_part(self) -> None:
        """Take part in all rounds of the ranks. Raises no error of a read: :meth:`flush` does.

        The end of the block calls it on every rank, before that vote.
        """
        self._begin_rounds()
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being read. Raises no error of a read."""
        wait([future for future, _ in self._running])

    def make_report(self, *, verified: bool, seconds: float) -> WeightsReport:
        """Return the report of the reads."""
        path = self._reader.path
        return WeightsReport(path, self._needed_bytes, self._read_bytes, verified, seconds, self._computed, self._whole)

    def close(self) -> None:
        """Forget copies that were not executed, and wait for others. Lazy tensors cannot be used any more."""
        self._is_closed = True
        self._pending.take()
        with suppress(Exception):
            self._join()
        self._executor.close()

    def _check_open(self, content: StoredContent) -> None:
        if self._is_closed:
            raise StateError(
                f"{content.name!r} was used after the end of open_weights(): load the model inside its block. If that "
                "was a load that failed, the model must be made anew: restart the engine"
            )

    def _advance(self, number: int) -> None:
        """Let the thread execute copies, if there are enough, before the caller takes the tensor ``number``."""
        while self._running and self._running[0][0].done():
            self._take_result()
        if self._rounds is None:
            if self._pending.nbytes >= _BATCH_BYTES:
                self._begin_batch()
            return
        while self._rounds.are_due(number):
            self._begin_round(self._rounds)

    def _begin_rounds(self) -> None:
        """Begin all rounds that have not begun."""
        with self._lock:
            while self._rounds is not None and not self._rounds.are_over and not self._is_closed:
                self._begin_round(self._rounds)

    def _begin_round(self, rounds: ReadRounds) -> None:
        rounds.begin()
        self._begin(partial(rounds.run, self._reads))

    def _begin_batch(self) -> None:
        """Let the thread execute the pending copies, if there are any, without the other ranks."""
        if self._pending:
            self._begin(self._run_alone)

    def _begin(self, run: Callable[[CopiesByTensor], _Result]) -> None:
        copies, filled = self._pending.take()
        call = partial(self._run_detecting, run, group_by_tensor(copies))
        self._running.append((self._executor.submit(call), filled))

    def _join(self) -> None:
        while self._running:
            self._take_result()

    def _take_result(self) -> None:
        future, _ = self._running.pop(0)
        self._note_result(future.result())

    def _run_now(self, copies: Sequence[ElementCopy]) -> None:
        result = self._run_detecting(self._run_alone, group_by_tensor(copies))
        with self._lock:
            if self._is_closed:  # meanwhile, and its reads are not verified any more
                raise StateError(
                    "open_weights() ended while a thread was reading: let all threads end inside its block"
                )
            self._note_result(result)

    def _run_alone(self, copies: CopiesByTensor) -> _Result:
        planned = self._reads.plan_alone(copies, has_peers=self._has_peers)
        return planned, self._reads.run(planned)

    def _run_detecting(self, run: Callable[[CopiesByTensor], _Result], copies: CopiesByTensor) -> _Result:
        with detect_replacement(self._reader):
            return run(copies)

    def _note_result(self, result: _Result) -> None:
        planned, fragments = result
        with self._lock:
            self._needed_bytes += planned.needed
            self._read_bytes += planned.nbytes
            self.used |= planned.copies.keys()
            for tensor, read in fragments.items():
                self.fragments.setdefault(tensor, []).extend(read)
