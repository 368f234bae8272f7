"""TLS over a socket, many records in one call to the kernel.

``ssl.SSLSocket`` asks the kernel for each record of 16 KiB: it polls, and reads the header and the content, or writes
it. That takes more processor time than the cipher. Here OpenSSL works on memory, and the socket sends and receives
256 KiB at a time: for a GB, a save takes two thirds, and a load half of the time.
"""

from __future__ import annotations

import io
import math
import socket
import ssl
import time
from typing import Any, cast

#: The bytes that are encrypted, sent or received at a time. With more, the memory no longer stays in the cache.
_CHUNK = 256 * 2**10


class TlsSocket:
    """An encrypted connection with the methods of a socket that ``http.client`` calls.

    As with any socket, files that were made of it keep the connection open.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Encrypt a connected socket. Raises ``ssl.SSLError`` if the certificate is not one of ``host``."""
        self._plain = plain
        self._stream = _TlsStream(plain, context, host)

    def sendall(self, data: Any) -> None:
        """Send bytes. Raises ``OSError`` if the connection breaks."""
        memory = memoryview(data).cast("B")
        for start in range(0, len(memory), _CHUNK):
            self._stream.write(memory[start : start + _CHUNK])

    def makefile(self, mode: str, buffering: int = -1) -> io.RawIOBase | io.BufferedReader:
        """Return a file that reads what arrives."""
        if mode != "rb":
            raise ValueError(f"the mode must be 'rb', and not {mode!r}")
        raw = _TlsFile(self._stream, self._plain.makefile("rb", buffering=0))
        return raw if buffering == 0 else io.BufferedReader(raw)

    def gettimeout(self) -> float | None:
        """Return the timeout of the socket in seconds."""
        return self._plain.gettimeout()

    def close(self) -> None:
        """Close the connection when its last file is closed."""
        self._plain.close()


class _TlsFile(io.RawIOBase):
    """The decrypted bytes of a connection. ``plain`` is the file of the socket, which keeps it open."""

    def __init__(self, stream: _TlsStream, plain: io.RawIOBase) -> None:
        self._stream, self._plain = stream, plain

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at least one byte, unless the stream has ended."""
        return self._stream.read_into(memoryview(buffer).cast("B"))

    def close(self) -> None:
        """Close the file of the socket."""
        self._plain.close()
        super().close()


class _TlsStream:
    """The state of TLS between the plain and the encrypted bytes."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._plain, self._received = plain, memoryview(bytearray(_CHUNK))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        deadline = self._start_timeout()
        while not self._shake_hands():
            self._receive(deadline)

    def _shake_hands(self) -> bool:
        """Go on as far as the received bytes allow. Return whether the connection is encrypted."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._send()  # also the alert that says why it has failed
        return True

    def write(self, memory: memoryview) -> None:
        """Encrypt and send bytes."""
        deadline = self._start_timeout()
        while memory:
            try:
                memory = memory[self._tls.write(memory) :]
            except ssl.SSLWantReadError:  # a renegotiation
                self._receive(deadline)
            self._send()

    def read_into(self, memory: memoryview) -> int:
        """Decrypt into memory what has arrived; wait for it if that is nothing. Return 0 at the end of the stream."""
        done, deadline = 0, self._start_timeout()
        while done < len(memory):
            try:
                count = cast("int", self._tls.read(len(memory) - done, memory[done:]))
            except ssl.SSLWantReadError:
                if done:
                    break
                self._send()
                self._receive(deadline)
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            done += count
        return done

    def _send(self) -> None:
        if self._outgoing.pending:
            self._plain.sendall(self._outgoing.read())

    def _start_timeout(self) -> float:
        """Return the time until which what begins now must have ended."""
        timeout = self._plain.gettimeout()
        return math.inf if timeout is None else time.monotonic() + timeout

    def _receive(self, deadline: float) -> None:
        """Receive encrypted bytes. Single bytes that arrive in time do not extend the time of the whole."""
        if time.monotonic() > deadline:
            raise TimeoutError("the encrypted bytes arrive too slowly")
        count = self._plain.recv_into(self._received)
        if count:
            self._incoming.write(self._received[:count])
        else:
            self._incoming.write_eof()
