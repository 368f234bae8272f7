"""Rounds of reads: all ranks plan each together, so that elements that several of them need are read once.

A round is for the tensors in some stretch of the files. Each rank sends the others which elements it needs of them,
when its model's loader has come to the end of the stretch.

:class:`~rankless.inference.weights_loader.WeightsLoader` has one on each rank of several, and its thread runs the
rounds. The stretches must be the same on all ranks, which follows from the sizes of the stored tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.io.p2p import P2PExchange
from rankless.engine.io.requests import Fragments
from rankless.errors import StateError
from rankless.inference.joined_reads import CopiesByTensor, JoinedReads, PlannedReads
from rankless.inference.sharing_plan import RankViews

#: The stored bytes of a round.
_ROUND_BYTES = 256 * 2**20

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankViews).decode


class ReadRounds:
    """The rounds of one rank. All ranks take part in all of them, in the same order.

    ``sizes`` are the sizes of all stored tensors in the order of the files. With ``exchange``, one rank reads the
    elements that several need, and sends them; else all of them read them, through the page cache of their host.
    """

    def __init__(self, sizes: list[int], group: RankGroup, session: Session, *, exchange: bool) -> None:
        self._ends = _divide(sizes)
        self._group, self._session, self._exchange = group, session, exchange
        #: Whether a round has failed: no rank takes part in another vote of the session then.
        self.has_failed = False

    @property
    def are_over(self) -> bool:
        """True if all rounds have begun."""
        return not self._ends

    def are_due(self, tensor: int) -> bool:
        """Return whether a round ends before a tensor, which the loader is going to take."""
        return not self.are_over and self._ends[0] <= tensor

    def begin(self) -> None:
        """Note that the next round begins."""
        self._ends.popleft()

    def run(self, reads: JoinedReads, copies: CopiesByTensor) -> tuple[PlannedReads, Fragments]:
        """Plan the reads of a round with all ranks, and execute this rank's reads, in a thread of their own.

        Raises ``StateError`` if an earlier round has failed: no rank comes to this one, and all have that error.

        All ranks call it, in the thread of the loader. It holds the votes "exchanging what is needed" and "reading a
        round of weights".
        """
        if self.has_failed:
            raise StateError("an earlier round of reads has failed")
        self.has_failed = True
        views = RankViews({tensor: [copy.view for copy in group] for tensor, group in copies.items()})
        _, raw = self._session.vote("exchanging what is needed", lambda: _encode(views), lambda own: own, _encode)
        of_ranks = [_decode(own).views for own in msgspec.msgpack.decode(raw, type=list[bytes])]

        def read() -> tuple[PlannedReads, Fragments]:
            planned = reads.plan_together(copies, of_ranks, exchange=self._exchange)
            with P2PExchange(self._group.gloo_group(self._session.timeout), self._session) as p2p:
                return planned, reads.run(planned, p2p)

        result = self._session.run_on_all("reading a round of weights", read)
        self.has_failed = False
        return result


def _divide(sizes: Iterable[int]) -> deque[int]:
    """Return, for each round, the number of the first tensor after it; for the last one, the number of all tensors."""
    ends: deque[int] = deque()
    nbytes = count = 0
    for count, size in enumerate(sizes, start=1):
        nbytes += size
        if nbytes >= _ROUND_BYTES:
            ends.append(count)
            nbytes = 0
    if nbytes or not ends:
        ends.append(count)
    return ends
