"""Point-to-point exchange of bytes between ranks, with a timeout and a check for failed ranks.

Sends and receives use a gloo group. Between two ranks the n-th send matches the n-th receive. Daemon threads wait for
them, so that a rank does not hang if its peer has left or another rank has failed.

Saves, loads, live copies and transfers of a local tier have one for each exchange, on every rank that takes part. The
exchange is inside a vote: an error of a rank sets a flag, and the other ranks look for this flag. The order of sends
and receives between two ranks comes from the plan, and must be the same on both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta
from enum import IntEnum
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.polling import Deadline
from rankless.engine.comm.session import Session
from rankless.errors import RankFailedError, RankTimeoutError
from rankless.storage.aligned_memory import Bytes

#: Seconds between two checks whether another rank has failed.
_POLL_SECONDS = 0.25

#: The wait has its own deadline; the process group must not time out earlier.
_FOREVER = timedelta(days=365)


class SentBytes(NamedTuple):
    """A send to a rank, or a receive from it, in progress."""

    work: dist.Work
    peer: int


#: More than the sessions of a job. Tags have 31 bits.
_SESSIONS = 2**24

#: Sends and receives in progress.
Works = Sequence[SentBytes]


class Lane(IntEnum):
    """Sends and receives are waited for apart: neither kind holds up the other."""

    SENDS = 0
    RECEIVES = 1


class P2PExchange:
    """One rank's part in the exchange of one save or load."""

    def __init__(self, group: dist.ProcessGroup | None, session: Session, attempt: int = 0) -> None:
        """Begin an exchange in a group; ``None`` if there is one rank, which sends nothing.

        ``attempt`` counts the exchanges of a session, because an earlier one may have left messages.
        """
        self.rank = session.rank
        self._group, self._session = group, session
        self._tag = session.number + attempt * _SESSIONS
        self._executors = [DaemonExecutor("rankless p2p") for _ in Lane]
        self._awaited = self.rank

    def send(self, data: Bytes, receiver: int) -> SentBytes:
        """Start to send. ``data`` must not change until the work is done.

        The thread that exchanges calls it, on the sender alone; the receiver calls :meth:`receive` in the same order.
        """
        work = dist.isend(torch.from_numpy(data), group=self._group, tag=self._tag, group_dst=receiver)
        return self._require_work(work, receiver)

    def receive(self, buffer: Bytes, sender: int) -> SentBytes:
        """Start to receive as many bytes as ``buffer`` has."""
        work = dist.irecv(torch.from_numpy(buffer), group=self._group, tag=self._tag, group_src=sender)
        return self._require_work(work, sender)

    @staticmethod
    def _require_work(work: dist.Work | None, peer: int) -> SentBytes:
        if work is None:
            raise RankFailedError(f"this process group cannot exchange data with rank {peer}")
        return SentBytes(work, peer)

    def begin_wait(self, works: Works, lane: Lane) -> Future[None]:
        """Return a future that is done when all sends and receives are, and those that were begun before in the lane.

        Its error is ``RankFailedError`` if a connection breaks.

        :mod:`rankless.tier.part_transfers` waits so for many messages at a time.
        """
        return self._executors[lane].submit(partial(self._wait_for_all, works))

    def wait(self, works: Works) -> None:
        """Wait until all sends and receives are done.

        Raises ``PeerFailedError`` if another rank has failed, ``RankTimeoutError`` after the session's timeout,
        ``RankFailedError`` if a connection breaks.
        """
        future = self.begin_wait(works, Lane.RECEIVES)
        self.wait_for_any([future])
        future.result()

    def wait_for_any(self, futures: Collection[Future[None]], seconds: float = math.inf) -> None:
        """Wait until one of the futures is done, for at most ``seconds``.

        Raises the errors of :meth:`wait`, but not the errors of the futures.
        """
        deadline, until = Deadline(self._session.timeout), time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if wait_for_futures(futures, min(_POLL_SECONDS, left), FIRST_COMPLETED).done:
                return
            self._session.raise_if_peer_failed()
            deadline.warn_if_slow(lambda: f"rank {self._awaited} while exchanging shards of tensors")
            if deadline.is_over:
                raise RankTimeoutError(
                    "another rank did not send or receive its part of the exchange within the timeout"
                )

    def _wait_for_all(self, works: Works) -> None:
        try:
            for sent in works:
                self._awaited = sent.peer
                sent.work.wait(_FOREVER)
        except RuntimeError as error:
            raise RankFailedError(f"the connection to rank {self._awaited} broke: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in self._executors:
            executor.close()
