"""Rank 0's part of a save: a hidden folder with files of the right size, and its publication under the final name.

A folder with its final name is complete: it appears by one rename, after everything in it is durable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from holdfast.engine.plan import SavePlan
from holdfast.engine.transfer import Fragments
from holdfast.errors import DisagreementError
from holdfast.layout import blocks, manifest
from holdfast.layout.files import DataFile, index, index_path
from holdfast.layout.manifest import FileRecord, Manifest
from holdfast.storage import local
from holdfast.storage.bulk import BulkWriter

#: ``{path inside the checkpoint: contents}``.
SmallFiles = Mapping[str, bytes]


def draft_name(tag: str, checkpoint_id: str) -> str:
    """The hidden name of a save in progress."""
    return f".{tag}.{checkpoint_id}.partial"


def open_draft(draft: Path, plan: SavePlan) -> None:
    """Create the folder of a save in progress, and its data files at their final sizes."""
    local.make_folder(draft)
    for file in plan.files:
        path = draft / file.path
        local.make_folder(path.parent)
        local.allocate(path, file.size)


def publish(
    draft: Path,
    final: Path,
    plan: SavePlan,
    fragments: Fragments,
    small: SmallFiles,
    describe: Callable[[dict[str, FileRecord]], Manifest],
) -> Manifest:
    """Complete a draft whose data is durable, and give it its final name.

    ``fragments`` is what all ranks hashed; ``describe`` makes the manifest of the files. Raises
    ``DisagreementError`` where the fragments leave part of a tensor unwritten.
    """
    records = dict(_finish_data(draft, plan, fragments))
    indexes = {index_path(group): index(files) for group, files in plan.groups.items() if len(files) > 1}
    for name, data in sorted({**indexes, **small}.items()):
        local.make_folder((draft / name).parent)
        local.write_small(draft / name, data)
        records[name] = FileRecord(len(data), f"{blocks.crc64(data):016x}")
    described = describe(dict(sorted(records.items())))
    local.write_small(draft / manifest.NAME, manifest.encode(described))
    for folder in sorted({(draft / name).parent for name in records} | {draft}, reverse=True):
        local.sync_folder(folder)
    local.publish(draft, final)
    return described


def _finish_data(draft: Path, plan: SavePlan, fragments: Fragments) -> Iterator[tuple[str, FileRecord]]:
    number = itertools.count()
    for file in plan.files:
        crcs = [_crcs(plan, next(number), nbytes, fragments) for nbytes in _sizes(file)]
        header = file.header(itertools.chain(*crcs))
        with BulkWriter(draft / file.path) as writer:
            writer.write(0, memoryview(header))
            writer.sync()
        header_crc = blocks.crc64(header)
        yield (
            file.path,
            FileRecord(file.size, f"{_whole(header_crc, file, crcs):016x}", len(header), f"{header_crc:016x}"),
        )


def _sizes(file: DataFile) -> list[int]:
    return [entry.nbytes for entry in file.entries.values()]


def _crcs(plan: SavePlan, tensor: int, nbytes: int, fragments: Fragments) -> list[int]:
    found = blocks.assemble(fragments.get(tensor, []), nbytes)
    whole = [crc for crc in found if crc is not None]
    if len(whole) != len(found):
        group, name = plan.tensors[tensor]
        start, stop = blocks.span(found.index(None), nbytes)
        raise DisagreementError(
            f"{group} tensor {name!r}: no rank saved all of bytes {start} to {stop}; some rank of its mesh did not pass it to the save"
        )
    return whole


def _whole(header_crc: int, file: DataFile, crcs: list[list[int]]) -> int:
    """The CRC of a file from those of its header and of its tensors' blocks."""
    pieces = [
        (crc, stop - start)
        for nbytes, row in zip(_sizes(file), crcs, strict=True)
        for block, crc in enumerate(row)
        for start, stop in [blocks.span(block, nbytes)]
    ]
    return blocks.join([(header_crc, file.data_start), *pieces])
