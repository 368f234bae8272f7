"""Ranks of one machine that take different ids for their host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from rankless.engine.comm.host_vote_channel import HostVoteChannel
from rankless.engine.comm.session import RankGroup, Session
from rankless.storage import host_mailbox


@contextmanager
def simulated_host(name: str, folder: str) -> Iterator[None]:
    """Take another id and name of this rank's host, and a folder for what ranks of one host post to each other."""
    with (
        mock.patch.object(host_mailbox, "_SHARED_MEMORY", Path(folder)),
        mock.patch.object(host_mailbox, "host_id", return_value=f"host {name}"),
        mock.patch("rankless.save.save_negotiation.host_id", return_value=f"host {name}"),
        mock.patch("rankless.conversion.pipeline.host_id", return_value=f"host {name}"),
        mock.patch("platform.node", return_value=name),
    ):
        yield


def vote_ranks(session: Session) -> bytes:
    return session.vote("voting", lambda: None, lambda _: bytes([session.rank]), b"".join)[1]


def open_session(timeout: float = 20.0) -> Session:
    """Return a session whose ranks know each other's hosts."""
    group = RankGroup()
    session = group.open_session(timeout)
    vote_ranks(session)
    assert isinstance(session._open_channel(session.store, "test"), HostVoteChannel)  # type: ignore[arg-type]
    return session
