"""Messages of the ranks of one host that its last rank joins, so that a host sends one message to the store.

:class:`~rankless.engine.comm.session.Session` opens them in the work of a vote, on each rank, and
:mod:`rankless.engine.integrity.crc_gather` posts the CRCs of the rank. No rank waits: the one that finds the messages
of all ranks of its host gets them. If a message is lost, none does, and the ranks have to send their own.
"""

from __future__ import annotations

from rankless.engine.comm.host_map import HostMap
from rankless.storage.host_mailbox import HostMailbox

#: The name of the message of the rank that joins the messages.
_JOIN = "join"


class HostMessages:
    """The messages between the ranks of one ``host``, a number. This ``rank`` is one of them."""

    def __init__(self, board: HostMailbox, hosts: HostMap, rank: int) -> None:
        self._board, self._rank, self.host = board, rank, hosts.host_of[rank]
        self._ranks = hosts.ranks_of[self.host]

    def post(self, message: bytes) -> list[bytes]:
        """Post the message of this rank. Return all messages on the last rank of the host, else none."""
        if not self._board.post(str(self._rank), message):
            return []
        names = self._board.names()
        if not all(str(rank) in names for rank in self._ranks) or not self._board.claim(_JOIN):
            return []
        messages = [self._board.read(str(rank)) for rank in self._ranks]
        present = [posted for posted in messages if posted is not None]
        return present if len(present) == len(messages) else []

    def withdraw(self) -> None:
        """Remove the message of this rank, and the last rank of the host all that is left."""
        self._board.withdraw(str(self._rank))
        if not any(name.isdecimal() for name in self._board.names()):
            self._board.remove()
