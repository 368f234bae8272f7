"""Storage for ``torch.distributed.checkpoint``: its own format, committed in one step, durable, and with checksums.

``dcp.save(state, storage_writer=FileSystemWriter(path))``, ``dcp.load(state, storage_reader=FileSystemReader(path))``.
"""

from holdfast.dcp.reader import FileSystemReader
from holdfast.dcp.writer import FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter"]
