"""The conversion target ``lightning-folder``: a folder as Lightning's FSDP and model-parallel strategies write it.

A conversion makes one on every rank; see :class:`rankless.conversion.target.ConversionTarget` for the ranks of its
methods. The files are those that Lightning loads.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from rankless.conversion.state_dict_schemas import lightning_metadata, lightning_tensor_names
from rankless.conversion.target import ConversionSource, FileLayout
from rankless.conversion.torch_target import TorchTarget
from rankless.dcp.writer.dcp_target import DcpTarget
from rankless.engine.io.requests import KnownFragments
from rankless.formats.reader import Reader
from rankless.lightning.reader import META, LightningReader
from rankless.storage.posix import fsync_directory


class LightningTarget:
    """A distributed checkpoint with ``meta.pt`` in the same folder."""

    output_name = ""

    def __init__(self, source: ConversionSource, pending: Path) -> None:
        self._pending = pending
        self._tensors = DcpTarget(source, pending, lightning_tensor_names)
        self._meta = TorchTarget(source, pending, partial(lightning_metadata, step=source.step), META)

    def create_files(self) -> Collection[int]:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        self._tensors.create_files()
        self._meta.create_files()
        return ()

    def locate_tensors(self) -> FileLayout:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        dcp, meta = self._tensors.locate_tensors(), self._meta.locate_tensors()
        tensors = {key: list(spans) for key, spans in dcp.tensors.items()}
        for key, spans in meta.tensors.items():
            tensors.setdefault(key, []).extend(span._replace(file=span.file + len(dcp.files)) for span in spans)
        return FileLayout([*dcp.files, *meta.files], tensors, [*dcp.header_bytes, *meta.header_bytes])

    def write_metadata(self, fragments: KnownFragments) -> None:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        self._meta.write_metadata(fragments)
        self._tensors.write_metadata(fragments)
        fsync_directory(self._pending)

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return LightningReader(self._pending, {})
