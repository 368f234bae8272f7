"""Into a folder as Lightning's FSDP and model-parallel strategies write it."""

from __future__ import annotations

from pathlib import Path

from holdfast.conversion.dcp import DcpTarget
from holdfast.conversion.shapes import lightning_meta, lightning_tensors
from holdfast.conversion.target import Material, Places
from holdfast.conversion.torchfile import TorchTarget
from holdfast.engine.transfer import Fragments
from holdfast.formats.lightning import META, LightningReader
from holdfast.formats.reader import Reader
from holdfast.storage.local import sync_folder


class LightningTarget:
    """A distributed checkpoint, and ``meta.pt`` in the same folder."""

    def __init__(self, material: Material, draft: Path) -> None:
        self._draft = draft
        self._tensors = DcpTarget(material, draft, lightning_tensors)
        self._meta = TorchTarget(material, draft / META, lightning_meta)

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        self._tensors.prepare()
        self._meta.prepare()

    def places(self) -> Places:
        """See :class:`holdfast.conversion.target.Target`."""
        first, last = self._tensors.places(), self._meta.places()
        tensors = {key: list(spots) for key, spots in first.tensors.items()}
        for key, spots in last.tensors.items():
            tensors.setdefault(key, []).extend(spot._replace(file=spot.file + len(first.files)) for spot in spots)
        return Places([*first.files, *last.files], tensors)

    def finish(self, fragments: Fragments) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        self._meta.finish(fragments)
        self._tensors.finish(fragments)
        sync_folder(self._draft)

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.Target`."""
        return LightningReader(self._draft, {})

    @property
    def made(self) -> Path:
        """See :class:`holdfast.conversion.target.Target`."""
        return self._draft

    def close(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        self._tensors.close()
