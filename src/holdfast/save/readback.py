"""A checkpoint that several hosts have written, read back before anything else is given up for it.

Neighbouring ranks write parts of one page of a file. Where hosts cache pages, and the file system does not keep these
caches coherent, one host may write back what it knows of the page, and undo what another one wrote.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.formats.native import NativeReader
from holdfast.observe.warning import warn_caller
from holdfast.ondisk import blocks
from holdfast.storage import filesystems, posix
from holdfast.storage.page_cache import drop_cache

#: The folders that have been warned of.
_warned: set[Path] = set()


def is_unsafe(folder: Path, hosts: int) -> bool:
    """Whether so many hosts may undo what another one writes there. Warns of it once in a process."""
    if hosts == 1 or filesystems.is_coherent(folder):
        return False
    if folder not in _warned:
        _warned.add(folder)
        warn_caller(
            f"{hosts} hosts save into {folder}, on a file system ({filesystems.filesystem_kind(folder)}) that is not known to "
            "keep parts of one page that several hosts write: checkpoints are read back before older ones are removed"
        )
    return True


def read_back(folder: Path, rank: int, size: int) -> None:
    """Check one rank's share of a checkpoint, as the file system has it, and not the host's cache.

    It is that of ranks which are far from this one, and so mostly on another host. Raises ``CorruptCheckpointError``.
    """
    for file in posix.walk_files(folder):
        drop_cache(file)
    reader = NativeReader(folder)
    if rank == 0:
        reader.check_files()
    tensors = [(group, name) for group, infos in reader.groups.items() for name in infos]
    checks = ChecksumVerifier(reader, tensors)
    every = [
        (tensor, block)
        for tensor, (group, name) in enumerate(tensors)
        for block in range(blocks.count_blocks(reader.groups[group][name].nbytes))
    ]
    share = (rank + size // 2) % size
    for tensor, block in every[len(every) * share // size : len(every) * (share + 1) // size]:
        checks.check_block(tensor, block)
