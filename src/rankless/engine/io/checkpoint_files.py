"""Rank 0's part of a save: it creates the data files, and writes all that is not tensor data.

:mod:`rankless.save.folder_output` creates the files in the vote that opens the output, and finalizes them in the vote
on the writing, before the rename; a conversion to the format does the same. An upload and a generation of a tier use
:func:`build_headers` and :func:`build_indexes` alone. The order must stay: all files and folders are synced before
:meth:`CheckpointFiles.finalize` returns, because the caller renames then. Headers and records are parts of the format.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from rankless.engine.io.extend_crcs import combine_groups
from rankless.engine.io.fragments import BlockCrcs, GatheredFragments
from rankless.engine.io.requests import KnownFragments
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import RankMismatchError
from rankless.observe.spans import span, traced
from rankless.ondisk import block_crcs, manifest
from rankless.ondisk.block_crcs import Fragment
from rankless.ondisk.data_files import DataFile, build_index, index_path
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.process.worker_threads import THREADS, count_threads, run_in_threads
from rankless.storage import posix
from rankless.storage.direct_io import BufferedWriter
from rankless.storage.filesystem_kind import is_in_memory, is_local

#: So many files of a local disk are synced by the calling thread: to start threads takes longer than they save.
_FEW_FILES = 32

#: ``{path inside the checkpoint: contents}``.
SmallFiles = Mapping[str, bytes]

#: Builds the manifest of the given files.
MakeManifest = Callable[[dict[str, FileRecord]], Manifest]


class UnchangedBlocks(msgspec.Struct, frozen=True):
    """The parts of an earlier checkpoint that a save takes: linked files, by number, and blocks of tensors.

    ``crcs`` has the CRCs of these blocks: by the number of the tensor, and of the block.
    """

    linked: frozenset[int] = frozenset()
    crcs: Mapping[int, Mapping[int, int]] = msgspec.field(default_factory=dict)


NOTHING_UNCHANGED = UnchangedBlocks()


class CheckpointFiles(msgspec.Struct, frozen=True):
    """The planned files of a checkpoint in a directory that will be renamed to the checkpoint's path."""

    folder: Path
    plan: SavePlan

    def create_files(self, existing: Collection[int] = ()) -> None:
        """Create the data files with their final sizes, so that all ranks can write into them.

        ``existing`` are the numbers of files that exist already.

        Rank 0 calls it in its decision in the vote on the preparation: all ranks write into the files afterwards.
        """
        self._create([file for number, file in enumerate(self.plan.files) if number not in existing])

    def create_file(self, number: int) -> None:
        """Create one data file with its final size.

        An incremental save also calls it on rank 0 for a file that it cannot share after all.
        """
        self._create([self.plan.files[number]])

    def _create(self, files: Sequence[DataFile]) -> None:
        for name in _one_of_each_folder(file.path for file in files):
            posix.make_parents(self.folder, name)
        for file in files:
            posix.allocate_space(self.folder / file.path, file.size)

    @traced("write the headers and the manifest", "commit")
    def finalize(
        self,
        fragments: KnownFragments,
        small_files: SmallFiles,
        make_manifest: MakeManifest,
        unchanged: UnchangedBlocks = NOTHING_UNCHANGED,
    ) -> Manifest:
        """Write the headers, indexes, small files and the manifest, and make them durable; the data is durable already.

        ``fragments`` come from all ranks, and cover all bytes except the ``unchanged`` blocks. Raises
        ``RankMismatchError`` if they leave a gap in a tensor.

        Rank 0 calls it in the decision of the vote on the writing.
        """
        headers, records = {}, {}
        for number, (header, record) in enumerate(build_headers(self.plan, fragments, unchanged)):
            path = self.plan.files[number].path
            records[path] = record
            if number not in unchanged.linked:  # these have their headers already
                headers[path] = header
        contents = {**build_indexes(self.plan), **small_files}
        records |= {name: FileRecord(len(data), f"{block_crcs.crc64(data):016x}") for name, data in contents.items()}
        finished = make_manifest(dict(sorted(records.items())))
        contents[manifest.NAME] = manifest.encode_manifest(finished)
        self._write_files(headers, contents)
        return finished

    def _write_files(self, headers: Mapping[str, bytes], contents: SmallFiles) -> None:
        """Write the headers of data files and the small files, by path, and make them and their names durable.

        All is written, and the writeback of all has begun, before anything is synced. Then the first sync commits the
        entries of all files in ext4's journal, and the others find little to do: six files took two thirds of the time,
        150 took a third. More threads help if there are many files, or if a server answers each sync.
        """
        nbytes = sum(map(len, (*headers.values(), *contents.values())))
        for name in _one_of_each_folder(contents):
            posix.make_parents(self.folder, name)
        writes = [partial(_write_header, self.folder / name, header) for name, header in headers.items()]
        writes += [partial(_write_small, self.folder / name, data) for name, data in contents.items()]
        in_memory = is_in_memory(self.folder)
        run_in_threads(lambda write: write(), writes, count_threads(nbytes, 1 if in_memory else THREADS))
        files = [self.folder / name for name in (*headers, *contents)]
        names = _one_of_each_folder([*contents, *(file.path for file in self.plan.files)])
        folders = {self.folder / parent for name in names for parent in Path(name).parents}
        few = len(files) <= _FEW_FILES and is_local(self.folder)
        with span("sync", "sync"):
            run_in_threads(posix.fsync_path, [*files, *folders], 1 if in_memory or few else THREADS)


def _one_of_each_folder(names: Iterable[str]) -> list[str]:
    """Return one name for each folder that has some of them: a checkpoint may have thousands of files."""
    return list({name.rpartition("/")[0]: name for name in names}.values())


def _write_header(path: Path, header: bytes) -> None:
    with BufferedWriter(path) as writer:
        writer.write(0, memoryview(header))
        writer.start_writeback()


def _write_small(path: Path, data: bytes) -> None:
    with posix.new_file(path) as file:
        file.write(data)
        file.flush()
        posix.start_writeback(file.fileno())


def build_headers(
    plan: SavePlan, fragments: KnownFragments, unchanged: UnchangedBlocks = NOTHING_UNCHANGED
) -> Iterator[tuple[bytes, FileRecord]]:
    """Yield the header of each file of a plan, which contains the CRCs of all blocks, and the record of the file.

    ``fragments`` come from all ranks. Raises ``RankMismatchError`` if they leave a gap in a tensor.

    Rank 0 calls it in a commit or for an upload; a generation of a local tier builds its headers on each rank that
    reads it.
    """
    blocks = None if unchanged.crcs or not isinstance(fragments, GatheredFragments) else _find_blocks(plan, fragments)
    if blocks is not None:
        yield from _build_headers_at_once(plan, blocks)
        return
    numbers = itertools.count()
    for file in plan.files:
        crcs = []
        for entry in file.entries.values():
            tensor = next(numbers)
            group, name = plan.tensors[tensor]
            known = _with_unchanged(fragments.get(tensor, []), unchanged.crcs.get(tensor, {}), entry.nbytes)
            crcs.append(require_block_crcs(known, entry.nbytes, f"{group} tensor {name!r}"))
        header = file.build_header(itertools.chain(*crcs))
        crc = block_crcs.crc64(header)
        yield header, FileRecord(file.size, f"{_file_crc(crc, file, crcs):016x}", len(header), f"{crc:016x}")


def _find_blocks(plan: SavePlan, fragments: GatheredFragments) -> BlockCrcs | None:
    return fragments.find_blocks([entry.nbytes for file in plan.files for entry in file.entries.values()])


def _build_headers_at_once(plan: SavePlan, blocks: BlockCrcs) -> Iterator[tuple[bytes, FileRecord]]:
    """Yield the same as :func:`build_headers`, given the CRCs of all blocks as columns.

    A checkpoint of terabytes has hundreds of thousands of blocks, and all ranks wait for their headers.
    """
    ends = np.append(0, np.cumsum(blocks.counts))[[0, *(numbers.stop for numbers in plan.tensors_by_file)]]
    data_crcs = combine_groups(blocks.crc, blocks.length, np.diff(ends)).tolist()
    text = blocks.crc.astype(">u8").tobytes().hex()
    for number, file in enumerate(plan.files):
        start, stop = (block_crcs.DIGITS * int(end) for end in ends[number : number + 2])
        header = file.build_header_from_text(text[start:stop])
        crc = block_crcs.crc64(header)
        whole = block_crcs.combine(crc, data_crcs[number], file.size - file.data_start)
        yield header, FileRecord(file.size, f"{whole:016x}", len(header), f"{crc:016x}")


def build_indexes(plan: SavePlan) -> dict[str, bytes]:
    """Return the index of each group of several files, by its path."""
    return {index_path(files): build_index(files) for files in plan.groups.values() if len(files) > 1}


def _with_unchanged(fragments: Sequence[Fragment], unchanged: Mapping[int, int], nbytes: int) -> Sequence[Fragment]:
    """Return the fragments of a tensor, with one for each unchanged block, also if ranks have written parts of it."""
    if not unchanged:
        return fragments
    written = [fragment for fragment in fragments if fragment.start // block_crcs.BLOCK_BYTES not in unchanged]
    return written + [Fragment(*block_crcs.block_range(block, nbytes), crc) for block, crc in unchanged.items()]


def require_block_crcs(fragments: Sequence[Fragment], nbytes: int, tensor_text: str) -> list[int]:
    """Return the CRC of each block of a tensor from the fragments of all ranks.

    Raises ``RankMismatchError`` naming a gap.

    :mod:`rankless.components.component_files` calls it on rank 0, for files of other formats.
    """
    crcs = block_crcs.assemble_crcs(fragments, nbytes)
    complete_crcs = [crc for crc in crcs if crc is not None]
    if len(complete_crcs) != len(crcs):
        start, stop = block_crcs.block_range(crcs.index(None), nbytes)
        raise RankMismatchError(
            f"{tensor_text}: no rank saved all of bytes {start} to {stop}; "
            "some rank of its mesh did not pass it to the save"
        )
    return complete_crcs


def _file_crc(header_crc: int, file: DataFile, crcs: list[list[int]]) -> int:
    """Combine the CRCs of a file's header and of its tensors' blocks into the CRC of the file."""
    crcs_and_lengths = [(header_crc, file.data_start)]
    for entry, block_row in zip(file.entries.values(), crcs, strict=True):
        crcs_and_lengths += zip(block_row, block_crcs.block_sizes(entry.nbytes), strict=True)
    return block_crcs.combine_crcs(crcs_and_lengths)
