"""Bytes from one rank to another, with an eye on the clock and on the other ranks.

Sends and receives go over a gloo group; between two ranks they meet in the order in which both make them. A helper
thread waits for them, so that a rank which others have left, or which hears that another failed, does not hang.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from holdfast.engine.local import Bytes
from holdfast.engine.ranks import Session
from holdfast.errors import RankFailedError, RankTimeoutError

#: Seconds between looks at whether another rank has failed.
_LOOK = 0.25

#: Sends and receives on their way.
Works = Sequence[dist.Work]


class Wire:
    """One rank's end of the exchange of one save or load."""

    def __init__(self, group: dist.ProcessGroup, session: Session) -> None:
        self.rank = session.rank
        self._group, self._session = group, session
        self._waiting: queue.SimpleQueue[tuple[Works, Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._wait_in_turn, name="holdfast wire", daemon=True).start()

    def send(self, data: Bytes, to: int) -> dist.Work:
        """Begin to send. ``data`` must stay as it is until the work is done."""
        work = dist.isend(torch.from_numpy(data), group=self._group, tag=self._session.number, group_dst=to)
        return self._begun(work, to)

    def receive(self, into: Bytes, source: int) -> dist.Work:
        """Begin to receive as many bytes as ``into`` has."""
        work = dist.irecv(torch.from_numpy(into), group=self._group, tag=self._session.number, group_src=source)
        return self._begun(work, source)

    @staticmethod
    def _begun(work: dist.Work | None, peer: int) -> dist.Work:
        if work is None:
            raise RankFailedError(f"nothing can be exchanged with rank {peer} over this process group")
        return work

    def wait(self, works: Works) -> None:
        """Until all of these are done.

        Raises ``AbandonedError`` when another rank has failed, ``RankTimeoutError`` after the session's
        timeout, ``RankFailedError`` when a connection breaks.
        """
        done: Future[None] = Future()
        self._waiting.put((works, done))
        started = time.monotonic()
        while True:
            try:
                return done.result(_LOOK)
            except NotYet:
                self._session.check_others()
                if time.monotonic() - started > self._session.timeout:
                    raise RankTimeoutError(
                        "another rank did not send or take its part of the exchange within the timeout"
                    ) from None

    def _wait_in_turn(self) -> None:
        while (item := self._waiting.get()) is not None:
            works, done = item
            try:
                for work in works:
                    work.wait()
                done.set_result(None)
            except RuntimeError as error:
                done.set_exception(RankFailedError(f"the connection to another rank broke: {error}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.put(None)
