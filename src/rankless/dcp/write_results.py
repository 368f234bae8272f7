"""Write results: each rank's report to rank 0 about the records that it has written.

:class:`~rankless.dcp.storage_writer.FileSystemWriter` hashes on each rank, and checks on rank 0 in ``finish``. Records
are hashed as they are read back from the file. All ranks must see the same files: rank 0 looks for each one before the
metadata is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from rankless.dcp.reader.checksums_json import ChecksumRecord
from rankless.engine.comm.vote import RankFailure
from rankless.errors import RankMismatchError
from rankless.ondisk import block_crcs
from rankless.storage import posix
from rankless.storage.reader_pool import ReaderPool


@dataclass(frozen=True)
class WrittenItem:
    """A written record: torch's description of it, and the CRCs of its blocks."""

    info: _StorageInfo
    crcs: str


def check_all_written(results: Sequence[Sequence[WriteResult]]) -> None:
    """Raise the error of the first rank that failed.

    Rank 0 calls it in torch's ``finish``.
    """
    for rank, row in enumerate(results):
        for result in row:
            if isinstance(result.storage_data, RankFailure):
                failure = result.storage_data
                raise structs.replace(failure, message=f"rank {rank} of {len(results)}: {failure.message}").to_error()


def check_all_present(folder: Path, written: Iterable[WrittenItem]) -> None:
    """Raise ``RankMismatchError`` if rank 0 does not see a file that some rank has written."""
    names = {item.info.relative_path for item in written} - set(posix.list_names(folder))
    missing = sorted(name for name in names if not posix.is_file(folder / name))  # a list may be older than the file
    if missing:
        raise RankMismatchError(
            f"{folder} does not have {missing[0]}, which a rank has written: "
            "all ranks must save to a shared file system"
        )


def metadata_indices(metadata: Metadata) -> Sequence[MetadataIndex]:
    """Return the indices of all records that the metadata names."""
    return [
        index
        for name, entry in metadata.state_dict_metadata.items()
        for index in (
            [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
            if isinstance(entry, TensorStorageMetadata)
            else [MetadataIndex(name)]
        )
    ]


def checksum_records(written: Mapping[MetadataIndex, WrittenItem]) -> dict[str, list[ChecksumRecord]]:
    """Group the checksum records by file."""
    records: dict[str, list[ChecksumRecord]] = {}
    for item in written.values():
        records.setdefault(item.info.relative_path, []).append(
            ChecksumRecord(item.info.offset, item.info.length, item.crcs)
        )
    return records


def hash_chunks(folder: Path, result: WriteResult, readers: ReaderPool) -> WriteResult:
    """Read a record back from its file, and return its result with the CRCs of its blocks.

    Each rank calls it in torch's ``write_data``.
    """
    info = result.storage_data
    crcs = []
    for block in range(block_crcs.count_blocks(info.length)):
        start, stop = block_crcs.block_range(block, info.length)
        data = memoryview(bytearray(stop - start))
        readers.read(folder / info.relative_path, info.offset + start, data)
        crcs.append(block_crcs.crc64(data))
    return replace(result, storage_data=WrittenItem(info, block_crcs.to_hex(crcs)))
