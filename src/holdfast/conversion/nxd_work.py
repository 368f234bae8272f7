"""The work of a conversion to NxD's format: the first rank plans and writes, the others wait for it."""

from __future__ import annotations

from pathlib import Path

from holdfast.conversion.nxd import NxdWriter
from holdfast.conversion.nxd_options import NxdOptions
from holdfast.conversion.work import Wish
from holdfast.drafts import drafted
from holdfast.engine.ranks import Session
from holdfast.formats.reader import as_opened


class NxdConversion:
    """One conversion; on failure nothing is left, and all ranks raise the same error."""

    def __init__(self, wish: Wish, session: Session, options: NxdOptions) -> None:
        self._wish, self._session, self._options = wish, session, options

    def run(self) -> Path:
        """All of it."""
        self._session.vote("converting", lambda: None, lambda _: b"", lambda _: self._convert())
        return self._wish.final

    def _convert(self) -> bytes:
        self._wish.check()
        self._options.check()
        material = self._wish.material()
        with as_opened(material.reader):
            writer = NxdWriter(material, self._options)
            with drafted(self._wish.final) as draft:
                writer.write(draft)
        return b""
