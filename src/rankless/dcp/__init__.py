"""Storage for ``torch.distributed.checkpoint`` (DCP) in DCP's own format: atomic commit, durable files, checksums.

``dcp.save(state, storage_writer=FileSystemWriter(path))``, ``dcp.load(state, storage_reader=FileSystemReader(path))``.
``reader`` and ``writer`` read and write DCP's folders without ``dcp.load`` and ``dcp.save``. Other systems build on
that format, so their packages may import this one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankless.dcp.storage_reader import FileSystemReader
    from rankless.dcp.storage_writer import FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter"]

#: The modules of the public names.
_MODULES = {"FileSystemReader": "storage_reader", "FileSystemWriter": "storage_writer"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the readers in this package need no torch."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
