"""The work of a conversion to NxD's format: the first rank plans and writes, the others wait for it."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from holdfast.conversion.carried import carried
from holdfast.conversion.nxd import NxdWriter
from holdfast.conversion.nxd_options import NxdOptions
from holdfast.conversion.target import Material
from holdfast.conversion.work import Wish
from holdfast.engine.ranks import Session
from holdfast.errors import StorageError
from holdfast.layout.hidden import Hidden
from holdfast.storage import folders, local


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
        reader, choice, final = self._wish.open(), self._wish.choice, self._wish.final
        material = Material(reader, choice.of(reader), carried(reader, choice), self._wish.limit)
        draft = final.parent / Hidden(final.name, secrets.token_hex(8), secrets.token_hex(8), "partial").name
        local.make_durable_folder(final.parent)
        try:
            NxdWriter(material, self._options).write(draft)
            folders.publish(draft, final)
        except BaseException:
            with suppress(StorageError):
                folders.remove_tree(draft)
            raise
        return b""
