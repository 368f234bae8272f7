"""Storage for ``torch.distributed.checkpoint`` (DCP) in DCP's own format: atomic commit, durable files, checksums.

``dcp.save(state, storage_writer=FileSystemWriter(path))``, ``dcp.load(state, storage_reader=FileSystemReader(path))``.
"""

from holdfast.dcp.reader import FileSystemReader
from holdfast.dcp.writer import FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter"]
