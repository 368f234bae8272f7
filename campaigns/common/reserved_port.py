"""A port of the loopback interface for a server program that cannot choose one itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserve_port() -> Iterator[int]:
    """Hold a free port until the end of the context. Yield its number, for the command line of a server.

    Linux gives the port to no other process that lets it choose one, because a socket is bound to it. A server that
    sets ``SO_REUSEADDR``, as practically all do, may bind the port as well, because that socket does not listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
