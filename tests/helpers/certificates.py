"""A certificate authority of the tests, and what it issues for servers of this host."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Authority:
    """A new authority. Clients trust it by ``file``."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self.file = str(folder / "ca.pem")
        self._authority.cert_pem.write_to_path(self.file)

    def issue(self, *names: str, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """Return what a server with these names needs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.maximum_version = version
        self._authority.issue_cert(*names).configure_cert(context)
        return context
