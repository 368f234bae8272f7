"""The files of a checkpoint that an edit leaves unchanged in every byte: the output shares them by hard links.

:class:`rankless.conversion.native_target.NativeTarget` asks on rank 0, in the vote "preparing", before it creates the
other files. Their tensors are not written. They are read if the output is, and compared with the CRCs of the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankless.conversion.target import ConversionSource
from rankless.engine.io.checkpoint_files import CheckpointFiles, UnchangedBlocks
from rankless.engine.plan.save_plan import SavePlan
from rankless.formats.edited_reader import EditedReader, StoredKey
from rankless.formats.native import NativeReader
from rankless.formats.remapped_reader import underlying_reader
from rankless.ondisk.manifest import FileRecord
from rankless.save.equal_file import StoredFile, link_equal_file
from rankless.storage.links_and_clones import Sharing, identify_file
from rankless.storage.store import store_of

#: A file of a checkpoint that is edited, and its record in the manifest.
RecordedFile = tuple[Path, FileRecord]


def link_equal_files(source: ConversionSource, files: CheckpointFiles) -> UnchangedBlocks:
    """Link the files that the output has in common with the edited checkpoints. Return the linked ranges.

    A file that cannot be linked, such as one on another file system, is left out: the conversion writes it.
    """
    plan, sharing = files.plan, Sharing()
    linked: set[int] = set()
    crcs: dict[int, dict[int, int]] = {}
    for number, (path, record) in find_equal_files(source, plan).items():
        identity, file = identify_file(path), plan.files[number]
        by_name = identity and link_equal_file(StoredFile(path, identity, record), files.folder, file, sharing)
        if by_name is not None:
            linked.add(number)
            tensors = zip(plan.tensors_by_file[number], file.entries, strict=True)
            crcs |= {tensor: dict(enumerate(by_name[name])) for tensor, name in tensors}
    return UnchangedBlocks(frozenset(linked), crcs)


def find_equal_files(source: ConversionSource, plan: SavePlan) -> Mapping[int, RecordedFile]:
    """Return the stored file that each planned file may be equal to, by the number of the planned one.

    All tensors of such a file are stored ones of one native checkpoint on a file system. The caller compares headers,
    which have names, places and CRCs of all tensors.
    """
    reader = underlying_reader(source.reader)
    if not isinstance(reader, EditedReader):
        return {}
    equal: dict[int, RecordedFile] = {}
    for number, tensors in enumerate(plan.tensors_by_file):
        keys = [plan.tensors[tensor] for tensor in tensors]
        stored = [_stored_key(source, reader, key) for key in keys]
        first = stored[0]
        if first is not None and all(
            key == StoredKey(first.source, first.group, name) for key, (_, name) in zip(stored, keys, strict=True)
        ):
            original = reader.readers[first.source]
            file = _file_of(original, first) if isinstance(original, NativeReader) else None
            if file is not None and not store_of(file[0]).is_remote:
                equal[number] = file
    return equal


def _stored_key(source: ConversionSource, reader: EditedReader, key: tuple[str, str]) -> StoredKey | None:
    """Return the stored tensor that an output's tensor is, byte for byte; ``None`` if there is none."""
    group, name = source.selected.sources.get(key, ("", ""))
    tensor = reader.content.tensors.get(group, {}).get(name)
    return tensor.whole if tensor is not None and tensor.info == source.selected.infos[key] else None


def _file_of(reader: NativeReader, key: StoredKey) -> RecordedFile | None:
    """Return the file of a stored tensor; ``None`` if it has no bytes."""
    for extent in reader.find_extents(key.group, key.name, 0, reader.groups[key.group][key.name].nbytes):
        if isinstance(extent.file, Path):
            return (extent.file, reader.manifest.files[str(extent.file.relative_to(reader.path))])
    return None
