"""ETags of servers that report no checksum of the bytes that they have received.

Old servers, such as Ceph 16, ignore the CRC of a body. Nearly all servers answer with its MD5 as the ETag. Some answer
with another text that looks like one, which differs from the MD5 of each body.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from rankless.storage.body import Body

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')

#: After so many ETags in a row that are no MD5, ETags are not compared any more.
_MOST_DIFFERENCES = 3


class ETags:
    """Compares the ETags of a server with the MD5 of what was sent."""

    def __init__(self) -> None:
        self._differences = 0

    def is_plausible(self, headers: Mapping[str, str], body: Body) -> bool:
        """Return false if an answer has another MD5 than the bytes that were sent."""
        match = _MD5.fullmatch(headers.get("etag", ""))
        if match is None or _is_encrypted(headers) or self._differences >= _MOST_DIFFERENCES:
            return True
        if match[1] == _compute_md5(body):
            self._differences = 0
            return True
        self._differences += 1
        return self._differences >= _MOST_DIFFERENCES


def _compute_md5(body: Body) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in body.pieces:
        digest.update(piece)
    return digest.hexdigest()


def _is_encrypted(headers: Mapping[str, str]) -> bool:
    """Return whether the server has encrypted an object with a key of its own service, or of the caller."""
    name = "x-amz-server-side-encryption"
    return headers.get(name, "AES256") != "AES256" or f"{name}-customer-algorithm" in headers
