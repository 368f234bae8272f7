"""Reads a checkpoint that several hosts wrote back from the file system, before older checkpoints are removed.

Adjacent ranks write parts of one page of a file. If hosts cache pages and the file system does not keep the caches
coherent, one host may write back its stale copy of the page and so undo the write of another host.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.formats.native import NativeReader
from holdfast.observe.warning import warn_caller
from holdfast.ondisk import blocks
from holdfast.storage import filesystems, posix
from holdfast.storage.page_cache import drop_cache

#: The directories for which a warning was issued.
_warned: set[Path] = set()


def may_lose_writes(folder: Path, hosts: int) -> bool:
    """Return whether ``hosts`` hosts that save to ``folder`` may undo each other's writes. Warn once in a process."""
    if hosts == 1 or filesystems.is_coherent(folder):
        return False
    if folder not in _warned:
        _warned.add(folder)
        kind = filesystems.filesystem_kind(folder)
        warn_caller(
            f"{hosts} hosts save to {folder}, on a file system ({kind}) that is not known to "
            "keep parts of one page that several hosts write: checkpoints are read back before older ones are removed"
        )
    return True


def read_back(folder: Path, rank: int, size: int) -> None:
    """Verify one rank's share of a checkpoint as the file system has it, bypassing the host's page cache.

    The share was mostly written by distant ranks, which are probably on another host. Raises
    ``CorruptCheckpointError`` if a block does not match its CRC.
    """
    for file in posix.walk_files(folder):
        drop_cache(file)
    reader = NativeReader(folder)
    if rank == 0:
        reader.check_files()
    tensors = [(group, name) for group, infos in reader.groups.items() for name in infos]
    checks = ChecksumVerifier(reader, tensors)
    all_blocks = [
        (tensor, block)
        for tensor, (group, name) in enumerate(tensors)
        for block in range(blocks.count_blocks(reader.groups[group][name].nbytes))
    ]
    share = (rank + size // 2) % size
    for tensor, block in all_blocks[len(all_blocks) * share // size : len(all_blocks) * (share + 1) // size]:
        checks.verify_block(tensor, block)
