"""Storage for ``torch.distributed.checkpoint`` (DCP) in DCP's own format: atomic commit, durable files, checksums.

``dcp.save(state, storage_writer=FileSystemWriter(path))``, ``dcp.load(state, storage_reader=FileSystemReader(path))``.
"""

from rankless.dcp.reader import FileSystemReader
from rankless.dcp.writer import FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter"]
