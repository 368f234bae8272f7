"""Small messages between ranks through the job's key-value store.

A rank that receives a few bytes from each of thousands of ranks needs no connection to them: all ranks are connected to
the store. Large messages do not go this way, because the store keeps them in the memory of one process.

:class:`~rankless.engine.io.cell_exchange.CellExchange` uses it for messages up to a limit, in a save from several hosts
and in an upload, in the thread that writes, inside the vote on the writing. Sender and receiver must derive from the
plan alone which messages go this way, and the round of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.polling import poll_until
from rankless.engine.comm.session import Session, translate_store_errors
from rankless.engine.comm.vote import format_ranks
from rankless.errors import RankFailedError, RankTimeoutError

#: The most messages that are received with one call.
_BATCH = 256

_PHASE = "exchanging bytes of files"


class StoreMessages:
    """The messages of one rank in one round of a session: at most one to each rank, and one from each."""

    def __init__(self, session: Session, number: int = 0) -> None:
        """Begin with the round ``number``."""
        self._session, self._round = session, number

    def for_round(self, number: int) -> StoreMessages:
        """Return the messages of the n-th round from this one on. Messages of different rounds do not mix."""
        return StoreMessages(self._session, self._round + number)

    def send(self, message: bytes, receiver: int) -> None:
        """Send a message. Do not wait until it is received.

        Each rank that the plan makes a sender calls it before it receives.
        """
        with translate_store_errors(_PHASE):
            self._store.set(self._key(self._session.rank, receiver), message)

    def receive(self, senders: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Wait for the messages of ranks, and yield each sender with its message.

        Raises ``PeerFailedError`` if another rank has failed, ``RankTimeoutError`` after the session's timeout.
        """
        for first in range(0, len(senders), _BATCH):
            batch = senders[first : first + _BATCH]
            yield from zip(batch, self._receive_batch(batch), strict=True)

    def _receive_batch(self, senders: Sequence[int]) -> list[bytes]:
        keys = [self._key(sender, self._session.rank) for sender in senders]

        def are_sent() -> bool:
            self._session.raise_if_peer_failed()
            return self._store.check(keys)

        def describe_missing() -> str:
            missing = [sender for sender, key in zip(senders, keys, strict=True) if not self._store.check([key])]
            return f"{format_ranks(missing)} while {_PHASE}" if missing else ""

        with translate_store_errors(_PHASE):
            if not poll_until(are_sent, self._session.timeout, describe_missing):
                raise RankTimeoutError(f"waited in vain for {describe_missing()}")
            messages = self._store.get(*keys)
            self._store.delete_keys(*keys)
        return messages

    @property
    def _store(self) -> DeadlineStore:
        if self._session.store is None:
            raise RankFailedError("a single rank has no other rank to exchange bytes with")
        return self._session.store

    def _key(self, sender: int, receiver: int) -> str:
        return f"message/{self._round}/{receiver}/{sender}"
