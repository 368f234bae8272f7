"""The formats of other systems that holdfast reads and writes, by name.

A format that belongs to one system (NxD, ColossalAI) is in a package of its own above this one. It is named here by its
module, so that nothing below imports it, and a program that does not meet the format never loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class ReadableFormat:
    """A format that can be read.

    ``detect(path)`` says whether ``path`` has this format. ``reader(path, keys)`` opens it; see
    :func:`holdfast.formats.detect.open_reader` for ``keys``.
    """

    module: str
    detect: str
    reader: str

    def is_at(self, path: Any) -> bool:
        """Return whether ``path`` has this format."""
        return bool(load_attribute(self.module, self.detect)(path))

    def open(self, path: Any, keys: Mapping[str, str]) -> Any:
        """Return a reader for ``path``. Raises ``FormatError``."""
        return load_attribute(self.module, self.reader)(path, keys)


#: NxD's format, as it is named in ``convert(to=)``.
NXD = "nxd"

#: The key that says how NxD divides parameters among tensor-parallel ranks. Only NxD's format takes it.
LAYOUT = "layout"

#: Formats that can be read, in the order in which they are tried.
READABLE: Mapping[str, ReadableFormat] = {
    "lightning-folder": ReadableFormat("holdfast.formats.lightning", "is_lightning", "LightningReader"),
    "dcp": ReadableFormat("holdfast.formats.dcp.dcp_reader", "is_dcp", "DcpReader"),
    "dcp-hf-shards": ReadableFormat("holdfast.formats.dcp.hf_shards", "is_sharded", "ShardsReader"),
    "torch": ReadableFormat("holdfast.formats.torch_file", "is_torch_file", "TorchFileReader"),
    NXD: ReadableFormat("holdfast.compat.nxd.format.nxd_reader", "is_nxd", "NxdReader"),
}

#: Targets of a conversion that belong to one system: ``module`` and the name of the class or function.
TARGETS: Mapping[str, tuple[str, str]] = {
    "colossalai": ("holdfast.compat.colossalai.target", "ColossalaiTarget"),
    NXD: ("holdfast.compat.nxd.convert.operation", "convert_to_nxd"),
}


def load_attribute(module: str, name: str) -> Any:
    """Return a class or function of a module, which is imported if it was not."""
    return getattr(import_module(module), name)


def load_target(name: str) -> Any:
    """Return the class or function that writes a format of :data:`TARGETS`."""
    return load_attribute(*TARGETS[name])
