"""What ranks tell rank 0 of what they have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.engine.ballot import Failure
from holdfast.formats.dcp.checksums import Record
from holdfast.layout import blocks
from holdfast.storage.bulk import BulkReader


@dataclass(frozen=True)
class Written:
    """What a rank tells of a record: what torch keeps of it, and its CRCs."""

    info: _StorageInfo
    crcs: str


def check_all(results: Sequence[Sequence[WriteResult]]) -> None:
    """Raise the error of the first rank that failed."""
    for rank, row in enumerate(results):
        for one in row:
            if isinstance(one.storage_data, Failure):
                failure = one.storage_data
                raise structs.replace(failure, message=f"rank {rank} of {len(results)}: {failure.message}").rebuild()


def indices(metadata: Metadata) -> Sequence[MetadataIndex]:
    """All that the metadata names."""
    return [
        index
        for name, entry in metadata.state_dict_metadata.items()
        for index in (
            [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
            if isinstance(entry, TensorStorageMetadata)
            else [MetadataIndex(name)]
        )
    ]


def records(written: Mapping[MetadataIndex, Written]) -> dict[str, list[Record]]:
    """What the checksums tell of each file."""
    found: dict[str, list[Record]] = {}
    for one in written.values():
        found.setdefault(one.info.relative_path, []).append(Record(one.info.offset, one.info.length, one.crcs))
    return found


def hashed(folder: Path, result: WriteResult) -> WriteResult:
    """A result with the CRCs of what is in the file."""
    info = result.storage_data
    crcs = []
    with BulkReader(folder / info.relative_path) as reader:
        for block in range(blocks.count(info.length)):
            start, stop = blocks.span(block, info.length)
            data = memoryview(bytearray(stop - start))
            reader.read(info.offset + start, data)
            crcs.append(blocks.crc64(data))
    return replace(result, storage_data=Written(info, blocks.to_hex(crcs)))
