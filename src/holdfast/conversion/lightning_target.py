"""Into a folder as Lightning's FSDP and model-parallel strategies write it."""

from __future__ import annotations

from pathlib import Path

from holdfast.conversion.dcp_target import DcpTarget
from holdfast.conversion.state_dict_schemas import lightning_metadata, lightning_tensor_names
from holdfast.conversion.target import ConversionSource, FileLayout
from holdfast.conversion.torch_target import TorchTarget
from holdfast.engine.io.requests import Fragments
from holdfast.formats.lightning import META, LightningReader
from holdfast.formats.reader import Reader
from holdfast.storage.posix import fsync_directory


class LightningTarget:
    """A distributed checkpoint, and ``meta.pt`` in the same folder."""

    def __init__(self, material: ConversionSource, draft: Path) -> None:
        self._draft = draft
        self._tensors = DcpTarget(material, draft, lightning_tensor_names)
        self._meta = TorchTarget(material, draft / META, lightning_metadata)

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        self._tensors.prepare()
        self._meta.prepare()

    def places(self) -> FileLayout:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        first, last = self._tensors.places(), self._meta.places()
        tensors = {key: list(spots) for key, spots in first.tensors.items()}
        for key, spots in last.tensors.items():
            tensors.setdefault(key, []).extend(spot._replace(file=spot.file + len(first.files)) for spot in spots)
        return FileLayout([*first.files, *last.files], tensors)

    def finish(self, fragments: Fragments) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        self._meta.finish(fragments)
        self._tensors.finish(fragments)
        fsync_directory(self._draft)

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return LightningReader(self._draft, {})

    @property
    def made(self) -> Path:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return self._draft

    def close(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        self._tensors.close()
