"""Rank 0's part of an incremental save: it shares the unchanged files and ranges of the base.

A file that may be unchanged is linked first. Then it does not matter if the base is removed, and nothing has to be
written if all ranks find that they hold the bytes of the file. Else the link is replaced by a new file. A linked file
is never opened for writing: it belongs to a committed checkpoint.

:mod:`rankless.save.folder_output` uses it: it links in the vote that opens the output, settles in the vote "finding
unchanged bytes", and checks the links in the commit. The check must be the last step before the rename.

A file counts as the committed one if inode, size and modification time are, after it was opened; never by the time of
its change, which each link changes. It must have the header that the new checkpoint would have for the base's CRCs.
``make crash`` refuses calls that write to a linked file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from rankless.engine.integrity.block_sums import has_all_blocks
from rankless.engine.io.checkpoint_files import CheckpointFiles, UnchangedBlocks
from rankless.engine.plan.element_ranges import ElementRange, merge_ranges
from rankless.engine.plan.omitted_ranges import OmittedRanges, whole_files
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import CorruptCheckpointError
from rankless.ondisk import block_crcs
from rankless.ondisk.data_files import DataFile
from rankless.ondisk.manifest import FileRecord
from rankless.save.base_checkpoint import BaseCheckpoint, BaseFile
from rankless.save.equal_file import StoredFile, link_equal_file
from rankless.save.shared_files import SettledFiles
from rankless.storage import posix
from rankless.storage.links_and_clones import MIN_CLONE_BYTES, Sharing, is_fragmented, make_read_only

#: Clones begin and end at multiples of this many bytes.
_PAGE_BYTES = 4096


class BaseFiles(msgspec.Struct, dict=True):
    """The files of the base that the new checkpoint in ``files`` may share: the :class:`SharedFiles` of a folder.

    ``crcs`` are the CRCs of the blocks of all tensors in the files that are linked, by the tensor's number.
    """

    base: BaseCheckpoint
    files: CheckpointFiles
    sharing: Sharing
    crcs: dict[int, list[int]] = msgspec.field(default_factory=dict)
    linked: list[int] = msgspec.field(default_factory=list)

    @property
    def base_path(self) -> Path:
        """See :class:`SharedFiles`."""
        return self.base.path

    def link_files(self, numbers: Iterable[int]) -> list[int]:
        """Link some files of the base, by their numbers in the plan. Return those that could be linked.

        A file of the base with another layout is not linked.

        Called when the output begins, before the other files are created.
        """
        self.linked = [number for number in numbers if self._link_file(number)]
        return self.linked

    def find_equal(self, records: Mapping[str, FileRecord]) -> list[int]:
        """Return the numbers of the files that the base has with the same record, and so the same CRCs.

        A drain calls it when its output begins: nothing is compared then.
        """
        base, files = self.base.files, self._plan.files
        return [
            number
            for number, file in enumerate(files)
            if file.path in base and base[file.path].record == records.get(file.path)
        ]

    def keep_links(self, numbers: Collection[int]) -> UnchangedBlocks:
        """Let the links of some files stay, and replace the others by files. Return the blocks of the links.

        A drain calls it on rank 0, in the vote "comparing with the checkpoint before".
        """
        linked, self.linked = self.linked, []
        for number in linked:
            if number in numbers:
                make_read_only(self.files.folder / self._plan.files[number].path)
                self.linked.append(number)
            else:
                self._replace_link(number, [])
        return self.unchanged_blocks(whole_files(self._plan.files, self.linked))

    def _link_file(self, number: int) -> bool:
        file = self._plan.files[number]
        base_file = self.base.files.get(file.path)
        if base_file is None:
            return False
        stored = StoredFile(self.base.path / file.path, *base_file)
        crcs = link_equal_file(stored, self.files.folder, file, self.sharing)
        if crcs is not None:
            self.crcs |= {tensor: crcs[name] for tensor, name in self._tensors_of(number)}
        return crcs is not None

    def settle(self, matching: Mapping[int, Collection[int]]) -> SettledFiles:
        """See :class:`SharedFiles`. The links of unchanged files stay, the others are replaced by files."""
        omitted: dict[int, list[ElementRange]] = {}
        linked, self.linked = self.linked, []
        for number in linked:
            file = self._plan.files[number]
            if all(
                has_all_blocks(matching.get(tensor, ()), file.entries[name].nbytes)
                for tensor, name in self._tensors_of(number)
            ):
                omitted[number] = [ElementRange(0, file.size)]
                make_read_only(self.files.folder / file.path)
                self.linked.append(number)
                continue
            ranges = self._replace_link(number, list(self._ranges_to_clone(number, matching)))
            if ranges:
                omitted[number] = ranges
        shared = sum(stop - start for ranges in omitted.values() for start, stop in ranges)
        posix.check_space(self.files.folder, sum(file.size for file in self._plan.files) - shared)
        return SettledFiles(omitted)

    def check_links(self, files: dict[str, BaseFile]) -> Mapping[str, BaseFile]:
        """Check that no linked file was changed since it was linked, and return ``files``, right before the commit.

        Raises ``CorruptCheckpointError``.
        """
        for number in self.linked:
            path = self._plan.files[number].path
            if path not in files or files[path].identity != self.base.files[path].identity:
                raise CorruptCheckpointError(
                    f"{self.base.path / path} was changed by another program while the new checkpoint was about to "
                    "share it; the next save writes everything. Nothing was saved"
                )
        return files

    def _replace_link(self, number: int, ranges: list[ElementRange]) -> list[ElementRange]:
        """Create a new file in place of a link. Return the ranges of it that are cloned from the linked file."""
        name = self._plan.files[number].path
        path, identity = self.files.folder / name, self.base.files[name].identity
        with posix.open_to_read(path) as source:
            posix.remove_file(path)
            self.files.create_file(number)
            can_clone = bool(ranges) and not is_fragmented(source)
            is_cloned = can_clone and self.sharing.clone_ranges(source, path, ranges, identity)
        return ranges if is_cloned else []

    def _ranges_to_clone(self, number: int, matching: Mapping[int, Collection[int]]) -> Iterator[ElementRange]:
        """Yield the whole pages of a file with unchanged blocks only."""
        file = self._plan.files[number]
        for start, stop in merge_ranges(
            _block_in_file(file, name, block)
            for tensor, name in self._tensors_of(number)
            for block in sorted(matching.get(tensor, ()))
        ):
            low, high = -(-start // _PAGE_BYTES) * _PAGE_BYTES, stop // _PAGE_BYTES * _PAGE_BYTES
            if high - low >= MIN_CLONE_BYTES:
                yield ElementRange(low, high)

    def unchanged_blocks(self, omitted: OmittedRanges) -> UnchangedBlocks:
        """See :class:`SharedFiles`."""
        by_tensor: dict[int, dict[int, int]] = {}
        for number, ranges in omitted.items():
            file = self._plan.files[number]
            for tensor, name in self._tensors_of(number):
                for block, crc in enumerate(self.crcs[tensor]):
                    start, stop = _block_in_file(file, name, block)
                    if any(start < high and low < stop for low, high in ranges):
                        by_tensor.setdefault(tensor, {})[block] = crc
        return UnchangedBlocks(frozenset(self.linked), by_tensor)

    @property
    def _plan(self) -> SavePlan:
        return self.files.plan

    def _tensors_of(self, number: int) -> list[tuple[int, str]]:
        """Return the numbers and names of the tensors of a file."""
        return list(zip(self._plan.tensors_by_file[number], self._plan.files[number].entries, strict=True))


def _block_in_file(file: DataFile, name: str, block: int) -> ElementRange:
    start, stop = block_crcs.block_range(block, file.entries[name].nbytes)
    origin = file.data_start + file.entries[name].data_offsets[0]
    return ElementRange(origin + start, origin + stop)
