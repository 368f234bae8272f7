"""The label of a generation, the layout of its files, and the files without tensor data.

From these and the tables of all parts follows everything that the checkpoint will have in the run directory: headers,
indexes, manifest. They are computed when a generation is loaded or drained, not at each save.

A save describes the generation on rank 0 in the vote "completing the local checkpoint"
(:mod:`rankless.save.tier_stage`), and each host writes the :class:`Common`. Loads, drains and the commands of the tier
build a :class:`Generation` from it. The headers must have the same bytes as after a save without a tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
from msgspec.structs import replace

from rankless.engine.io.checkpoint_files import build_headers, build_indexes
from rankless.engine.io.fragments import FragmentTable, decode_fragments
from rankless.engine.io.requests import KnownFragments
from rankless.engine.plan.file_ranges import FileRange, split_at_blocks
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError, UnsafeNameError
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.data_files import DataFile
from rankless.ondisk.manifest import FileRecord, Manifest, decode_manifest, encode_manifest
from rankless.ondisk.validation import check_relative_path, check_tag
from rankless.process.prepared_types import prepared
from rankless.tier.part import PartRows, PartTable
from rankless.tier.part_names import GenerationKey, PartName


class GenerationLabel(msgspec.Struct, frozen=True):
    """The description of a generation.

    ``manifest`` is the checkpoint's manifest without its files. ``replaces``: the checkpoint may replace one of its
    tag. ``keep_full_every``: a drain writes the checkpoint in full if its number is a multiple of it; 1 if all are.
    """

    manifest: Manifest
    replaces: bool = False
    keep_full_every: int = 1

    @property
    def key(self) -> GenerationKey:
        """The identity of the generation."""
        return GenerationKey(self.manifest.incarnation, self.manifest.sequence, self.manifest.id)

    @property
    def size(self) -> int:
        """The number of ranks that saved."""
        return self.manifest.provenance.world_size


@prepared
class Common(msgspec.Struct, frozen=True):
    """The contents that all hosts have: the label, the files of each group, the files without tensor data."""

    label: GenerationLabel
    groups: dict[str, list[DataFile]]
    small_files: dict[str, bytes]


def layout_plan(groups: Mapping[str, Sequence[DataFile]]) -> SavePlan:
    """Return a plan that has the files and tensors of a checkpoint, and no work."""
    files = [file for group_files in groups.values() for file in group_files]
    names = [(group, name) for group, group_files in groups.items() for file in group_files for name in file.entries]
    return replace(EMPTY_PLAN, files=files, groups=groups, tensors=names)


class Generation:
    """A generation with known tables of all its parts."""

    def __init__(self, common: Common, tables: Mapping[int, PartTable]) -> None:
        """``tables`` are the tables of all parts, by the rank that staged the part."""
        self.common, self.tables = common, tables
        self.plan = layout_plan(common.groups)
        for table in tables.values():
            self._check_rows(table)

    def _check_rows(self, table: PartTable) -> None:
        """Raise ``CorruptCheckpointError`` if a range is not in a tensor or file of the checkpoint."""
        rows, plan = table.rows, self.plan
        is_known = (rows.tensor < len(plan.tensors)).all() and (rows.file < len(plan.files)).all()
        if is_known:
            sizes = np.array([file.size for file in plan.files], np.uint64)[rows.file]
            lengths = rows.stop - rows.start
            is_known = ((lengths <= sizes) & (rows.offset <= sizes - np.minimum(lengths, sizes))).all()
        if not is_known:
            raise CorruptCheckpointError(f"{table.name.name} of the local tier is corrupt: a range is in no file")

    @cached_property
    def fragments(self) -> KnownFragments:
        """The fragments of all tensors, merged."""
        rows = [table.rows for table in self.tables.values()]
        encoded = [FragmentTable(row.tensor, row.start, row.stop, row.crc).to_bytes() for row in rows]
        return decode_fragments(encoded)

    @cached_property
    def headers(self) -> Sequence[tuple[bytes, FileRecord]]:
        """The header and the record of each data file.

        Raises ``RankMismatchError`` if the parts leave a gap in a tensor.
        """
        return list(build_headers(self.plan, self.fragments))

    @cached_property
    def small_files(self) -> Mapping[str, bytes]:
        """All files without tensor data except the manifest, by name."""
        return {**build_indexes(self.plan), **self.common.small_files}

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest that the checkpoint has in the run directory."""
        records = {file.path: record for file, (_, record) in zip(self.plan.files, self.headers, strict=True)}
        for name, data in self.small_files.items():
            records[name] = FileRecord(len(data), f"{crc64(data):016x}")
        return replace(self.common.label.manifest, files=dict(sorted(records.items())))


def check_common(common: Common, key: GenerationKey, file: str) -> Common:
    """Return the common that was read from a file, if it belongs to the key in the file's name.

    Raises ``CorruptCheckpointError`` if it is of another generation, or cannot become a checkpoint.
    """
    if common.label.key != key:
        raise CorruptCheckpointError(f"{file} is corrupt: it is of another generation")
    try:
        check_tag(common.label.manifest.tag)
        decode_manifest(encode_manifest(common.label.manifest), file)
        for path in (*common.small_files, *(data.path for files in common.groups.values() for data in files)):
            check_relative_path(path, file)
    except (FormatError, InvalidArgumentError, UnsafeNameError) as error:
        raise CorruptCheckpointError(f"{file} is corrupt: {error.args[-1]}") from error
    return common


def check_table(common: Common, table: PartTable, file: str) -> PartTable:
    """Return a table if its ranges are where the generation has their tensors. Raises ``CorruptCheckpointError``."""
    places = [
        (number, data_file.data_start + entry.data_offsets[0], entry.nbytes)
        for number, data_file in enumerate(layout_plan(common.groups).files)
        for entry in data_file.entries.values()
    ]
    rows = table.rows
    is_known = table.name.rank < table.name.size == common.label.size and bool((rows.tensor < len(places)).all())
    if is_known and len(rows.tensor):
        number, first, nbytes = np.array(places, np.uint64).T[:, rows.tensor]
        is_known = bool(
            ((rows.start <= rows.stop) & (rows.stop <= nbytes) & (rows.file == number)).all()
            and (rows.offset == first + rows.start).all()
        )
    if not is_known:
        raise CorruptCheckpointError(f"{file} is corrupt: it does not fit the generation")
    return table


def describe_layout(common: Common) -> PartTable:
    """Return a table that covers all tensors, without CRCs: from it follow the headers of a checkpoint to be shown."""
    plan = layout_plan(common.groups)
    files = [number for number, file in enumerate(plan.files) for _ in file.entries]
    sizes = zip(files, plan.tensor_sizes, strict=True)
    whole = [FileRange(tensor, 0, nbytes, 0, file, 0) for tensor, (file, nbytes) in enumerate(sizes)]
    rows = PartRows.from_ranges([(part, 0) for file_range in whole for part in split_at_blocks(file_range)])
    return PartTable(PartName(common.label.key, 0, 1), "", 0, rows)
