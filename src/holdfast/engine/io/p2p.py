"""Bytes from one rank to another, with an eye on the clock and on the other ranks.

Sends and receives go over a gloo group; between two ranks they meet in the order in which both make them. They are
waited for aside, so that a rank which others have left, or which hears that another failed, does not hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from holdfast.engine.comm.daemon_executor import DaemonExecutor
from holdfast.engine.comm.polling import Deadline
from holdfast.engine.comm.session import Session
from holdfast.errors import RankFailedError, RankTimeoutError
from holdfast.storage.memory import Bytes

#: Seconds between looks at whether another rank has failed.
_LOOK = 0.25

#: Who waits for the exchange has a deadline, and the group none that comes before.
_FOREVER = timedelta(days=365)


class SentBytes(NamedTuple):
    """Bytes on their way to or from a rank."""

    work: dist.Work
    peer: int


#: Sends and receives on their way.
Works = Sequence[SentBytes]


class P2PExchange:
    """One rank's end of the exchange of one save or load."""

    def __init__(self, group: dist.ProcessGroup, session: Session) -> None:
        self.rank = session.rank
        self._group, self._session = group, session
        self._aside = DaemonExecutor("holdfast wire")
        self._awaited = self.rank

    def send(self, data: Bytes, to: int) -> SentBytes:
        """Begin to send. ``data`` must stay as it is until the work is done."""
        work = dist.isend(torch.from_numpy(data), group=self._group, tag=self._session.number, group_dst=to)
        return self._begun(work, to)

    def receive(self, into: Bytes, source: int) -> SentBytes:
        """Begin to receive as many bytes as ``into`` has."""
        work = dist.irecv(torch.from_numpy(into), group=self._group, tag=self._session.number, group_src=source)
        return self._begun(work, source)

    @staticmethod
    def _begun(work: dist.Work | None, peer: int) -> SentBytes:
        if work is None:
            raise RankFailedError(f"nothing can be exchanged with rank {peer} over this process group")
        return SentBytes(work, peer)

    def wait(self, works: Works) -> None:
        """Until all of these are done.

        Raises ``PeerFailedError`` when another rank has failed, ``RankTimeoutError`` after the session's
        timeout, ``RankFailedError`` when a connection breaks.
        """
        done = self._aside.begin(partial(self._wait_for, works))
        wait = Deadline(self._session.timeout)
        while True:
            try:
                return done.result(_LOOK)
            except TimeoutError:
                self._session.check_others()
                wait.tell(lambda: f"rank {self._awaited} while exchanging parts of tensors")
                if wait.is_over:
                    raise RankTimeoutError(
                        "another rank did not send or take its part of the exchange within the timeout"
                    ) from None

    def _wait_for(self, works: Works) -> None:
        try:
            for sent in works:
                self._awaited = sent.peer
                sent.work.wait(_FOREVER)
        except RuntimeError as error:
            raise RankFailedError(f"the connection to another rank broke: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._aside.close()
