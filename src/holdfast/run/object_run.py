"""The layout of a run in an object store: which keys are a checkpoint of which tag.

An object store cannot rename, so a checkpoint cannot get its name by a rename. Instead, no two saves ever share a key:

- ``RUN/TAG.ID/…`` has all files of one checkpoint, with its manifest: a whole checkpoint, for any reader.
- ``RUN/.tags/TAG/N`` is a *pointer*: a small object that names the id. It is created by a conditional write, which one
  of several writers wins. This is the commit of a save (``N`` = 1) and of an overwrite (``N`` = the highest + 1). The
  pointer with the highest ``N`` counts.

A writer that was stopped for hours can only publish its own checkpoint, which is whole. A prefix ``TAG.ID`` without a
pointer is a save in progress, or an interrupted one. A folder ``NAME`` that was copied into the run, and whose name
does not end with an id, is a checkpoint with this tag.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from holdfast.errors import CorruptCheckpointError, HoldfastError, InvalidArgumentError, StorageError
from holdfast.ondisk.manifest import NAME, Manifest
from holdfast.ondisk.validation import is_tag
from holdfast.process.worker_threads import run_in_threads
from holdfast.storage.object_path import ObjectPath
from holdfast.storage.store import ObjectInfo, store_of

#: The name of the prefix of all pointers.
TAGS = ".tags"

_FOLDER = re.compile(r"(?P<tag>.+)\.(?P<id>[0-9a-f]{16})")

_POINTER_NAME = re.compile("[1-9][0-9]{0,99}")

#: The errors of JSON that is none, or not this one.
_DECODING_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: The most bytes of a pointer.
_MAX_POINTER_BYTES = 2**20

#: The object in a folder that is being deleted, because its save seems to be dead.
_REMOVED = ".removed"

#: How often a pointer is looked for that is listed, but missing, and the seconds between.
_ATTEMPTS, _ATTEMPT_SECONDS = 20, 0.05

#: How many small objects are requested at a time.
_REQUESTS = 16

#: The most pointers that are remembered.
_MAX_REMEMBERED = 2**15

T = TypeVar("T")
Item = TypeVar("Item")


class Pointer(msgspec.Struct, frozen=True):
    """The content of a pointer: the checkpoint that it names, and what a list shows of it.

    So a list needs one small object of each checkpoint. The manifest decides if they differ.
    """

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    run: str
    sequence: int
    time: float
    nbytes: int
    world_size: int
    step: int | float | None = None
    metrics: dict[str, float | None] = {}

    @property
    def age(self) -> tuple[int, float, str]:
        """The key that sorts checkpoints from the oldest to the latest."""
        return self.sequence, self.time, self.id

    @classmethod
    def of(cls, manifest: Manifest) -> Pointer:
        """Return the pointer to a checkpoint."""
        return cls(
            manifest.id,
            manifest.run,
            manifest.sequence,
            manifest.time,
            manifest.nbytes,
            manifest.provenance.world_size,
            manifest.step,
            dict(manifest.metrics),
        )


@dataclass(frozen=True, slots=True)
class TagEntry:
    """The pointer that counts for a tag: its number, and its content, or why that cannot be read.

    ``objects`` are all pointers of the tag, by ascending numbers: the last one counts, the others are outdated.
    """

    tag: str
    number: int
    pointer: Pointer | HoldfastError
    objects: tuple[ObjectInfo, ...]

    @property
    def path(self) -> ObjectPath:
        """The path of the pointer."""
        return self.objects[-1].path

    def names_checkpoint(self, checkpoint_id: str) -> bool:
        """Return whether the pointer names a checkpoint."""
        return isinstance(self.pointer, Pointer) and self.pointer.id == checkpoint_id


def checkpoint_folder(run: ObjectPath, tag: str, checkpoint_id: str) -> ObjectPath:
    """Return the prefix of the keys of a checkpoint."""
    return run / f"{tag}.{checkpoint_id}"


def is_copied_folder(name: str) -> bool:
    """Return whether a prefix in a run may be a checkpoint that was copied there: no save gives such a name."""
    return not name.startswith(".") and _FOLDER.fullmatch(name) is None


def tag_of_folder(name: str) -> str:
    """Return the tag of a checkpoint in a run from the name of its prefix."""
    match = _FOLDER.fullmatch(name)
    return match["tag"] if match else name


def check_output_name(final: ObjectPath) -> None:
    """Raise ``InvalidArgumentError`` if a path has a name as saves give them: a clean-up would remove it."""
    if _FOLDER.fullmatch(final.name):
        raise InvalidArgumentError(
            f"the name of {final} ends with a dot and 16 hexadecimal digits, as those of saves do: choose another name"
        )


def tag_of(checkpoint: Path) -> str:
    """Return the tag of a checkpoint in a run: the name of its directory, in an object store without the id."""
    return tag_of_folder(checkpoint.name) if isinstance(checkpoint, ObjectPath) else checkpoint.name


def list_tags(run: ObjectPath) -> list[TagEntry]:
    """Return the tags of a run, each with the pointer that counts."""
    by_tag: dict[str, list[ObjectInfo]] = {}
    for info in run.store.list_objects(run / TAGS):
        tag = info.path.parent.name
        if info.path.parent.parent == run / TAGS and is_tag(tag) and _number_of(info.path):
            by_tag.setdefault(tag, []).append(info)
    ascending = [sorted(found, key=_number_of_object) for found in by_tag.values()]
    pointers = map_requests(_read_pointer, (found[-1] for found in ascending))
    entries = []
    for tag, found, pointer in zip(by_tag, ascending, pointers, strict=True):
        # If the pointer was removed meanwhile, the tag may have another one, of an overwrite.
        entry = find_tag(run, tag) if pointer is None else _make_entry(tag, found, pointer)
        entries += [entry] if entry is not None else []
    return entries


def find_tag(run: ObjectPath, tag: str) -> TagEntry | None:
    """Return one tag of a run with the pointer that counts; ``None`` if there is none."""
    for _ in range(_ATTEMPTS):
        found = _list_pointers(run, tag)
        pointer = _read_pointer(found[-1]) if found else None
        if pointer is not None:
            return _make_entry(tag, found, pointer)
        if not found:
            return None
        time.sleep(_ATTEMPT_SECONDS)  # it was removed, or the list of the store lags
    return None


def find_highest_number(run: ObjectPath, tag: str) -> int:
    """Return the highest number of a tag's pointers; 0 if there is none."""
    found = _list_pointers(run, tag)
    return _number_of(found[-1].path) if found else 0


def _list_pointers(run: ObjectPath, tag: str) -> list[ObjectInfo]:
    found = (info for info in run.store.list_objects(run / TAGS / tag) if _number_of(info.path))
    return sorted(found, key=_number_of_object)


def _make_entry(tag: str, ascending: Sequence[ObjectInfo], pointer: Pointer | HoldfastError) -> TagEntry:
    return TagEntry(tag, _number_of(ascending[-1].path), pointer, tuple(ascending))


@dataclass(frozen=True, slots=True)
class UnpublishedFolder:
    """A folder that no pointer names, of a save in progress or an interrupted one: its last change, and its size."""

    path: ObjectPath
    time: float
    nbytes: int


def list_unpublished(run: ObjectPath, entries: Sequence[TagEntry]) -> list[UnpublishedFolder]:
    """Return the folders of saves that no pointer names. ``entries`` are all tags of the run.

    Folders of a tag whose pointer cannot be read are left out: it may name any of them.
    """
    published = {f"{entry.tag}.{entry.pointer.id}" for entry in entries if isinstance(entry.pointer, Pointer)}
    unreadable = {entry.tag for entry in entries if not isinstance(entry.pointer, Pointer)}
    changes: dict[str, list[tuple[float, int]]] = {}
    for upload, began in run.store.list_uploads(run):
        changes.setdefault(_folder_in(run, upload.path), []).append((began, 0))
    names = {*run.store.list_names(run), *changes}
    for name in names:
        if _FOLDER.fullmatch(name) and name not in published:
            changes.setdefault(name, []).extend((info.time, info.size) for info in run.store.list_objects(run / name))
    return [
        UnpublishedFolder(run / name, max(time for time, _ in found), sum(size for _, size in found))
        for name, found in sorted(changes.items())
        if found and name not in published and tag_of_folder(name) not in unreadable
    ]


def _folder_in(run: ObjectPath, path: ObjectPath) -> str:
    return path.relative_to(run).parts[0]


def _number_of(path: ObjectPath) -> int:
    """Return the number of a pointer, which is 1 or more; 0 for another object."""
    return int(path.name) if _POINTER_NAME.fullmatch(path.name) else 0


def _number_of_object(info: ObjectInfo) -> int:
    return _number_of(info.path)


def pointer_path(run: ObjectPath, tag: str, number: int) -> ObjectPath:
    """Return the path of a pointer."""
    return run / TAGS / tag / str(number)


def map_requests(request: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    """Return the results of a function that sends a request for each item; several at a time."""
    return run_in_threads(request, items, _REQUESTS)


#: The pointers that were read, by their path and version. They never change.
_pointers: dict[tuple[Path, str], Pointer] = {}


def _read_pointer(info: ObjectInfo) -> Pointer | HoldfastError | None:
    """Return a pointer, or why it cannot be read; ``None`` if it was removed meanwhile."""
    key = info.path, info.etag
    if info.etag and key in _pointers:
        return _pointers[key]
    try:
        pointer = _decode_pointer(info.path) or _decode_pointer(info.path)
    except StorageError as error:
        return None if error.errno == errno.ENOENT else error
    if pointer is None:
        return CorruptCheckpointError(f"{info.path} is corrupt: it is no pointer to a checkpoint")
    if info.etag:
        if len(_pointers) >= _MAX_REMEMBERED:
            _pointers.clear()
        _pointers[key] = pointer
    return pointer


def _decode_pointer(path: ObjectPath) -> Pointer | None:
    """Read a pointer. Return ``None`` if it is corrupt, or if its bytes have changed on their way."""
    with suppress(*_DECODING_ERRORS):
        return msgspec.json.decode(path.store.read_small(path, _MAX_POINTER_BYTES), type=Pointer)
    return None


def is_pointer(data: bytes) -> bool:
    """Return whether these bytes are a pointer."""
    try:
        msgspec.json.decode(data, type=Pointer)
    except _DECODING_ERRORS:
        return False
    return True


def is_published(run: ObjectPath, tag: str, checkpoint_id: str) -> bool:
    """Return whether a pointer of a tag, also an older one, names a checkpoint.

    Raises ``StorageError`` or ``CorruptCheckpointError`` if a pointer cannot be read: it may name this one.
    """
    for _ in range(_ATTEMPTS):
        pointers = map_requests(_read_pointer, _list_pointers(run, tag))
        if checkpoint_id in {pointer.id for pointer in pointers if isinstance(pointer, Pointer)}:
            return True
        if errors := [pointer for pointer in pointers if isinstance(pointer, HoldfastError)]:
            raise errors[0]
        if None not in pointers:
            return False
        time.sleep(_ATTEMPT_SECONDS)  # one was removed meanwhile, or an answer was wrong
    raise StorageError(errno.EIO, f"a pointer of the tag {tag!r} in {run} is listed, but cannot be read")


def delete_checkpoint_objects(run: ObjectPath, entry: TagEntry) -> None:
    """Delete a checkpoint that is no longer wanted: its pointer after older ones, then its folder.

    Another process may have removed the tag, and have saved it again, with the same number: its pointer stays.
    """
    for info in entry.objects:
        run.store.remove_version(info.path, info.etag)
    left = {(info.path, info.etag) for info in _list_pointers(run, entry.tag)}
    if left & {(info.path, info.etag) for info in entry.objects}:
        raise StorageError(errno.EBUSY, f"{entry.path} could not be deleted, so its checkpoint was left as it is")
    if isinstance(entry.pointer, Pointer):
        delete_prefix(checkpoint_folder(run, entry.tag, entry.pointer.id))


def discard_folder(folder: ObjectPath) -> None:
    """Delete a folder that its own save has not published, and abort the uploads into it."""
    for upload, _ in folder.store.list_uploads(folder):
        folder.store.abort_upload(upload)
    delete_prefix(folder)


def discard_abandoned(folder: ObjectPath) -> bool:
    """Delete a folder that seems to be abandoned by another process. Return false if that has published it meanwhile.

    Raises ``StorageError`` or ``CorruptCheckpointError``, and deletes nothing, if that is unknown.

    The process may wake up. So the folder is marked first, and after that it must have no pointer. The save does the
    opposite: it creates the pointer first, and after that looks for the mark. So at least one of both sees the other.
    """
    mark = folder / _REMOVED
    folder.store.replace_small(mark, b"")
    is_kept = True
    try:
        match = _FOLDER.fullmatch(folder.name)
        is_kept = match is None or is_published(folder.parent, match["tag"], match["id"])
    finally:
        if is_kept:
            folder.store.remove_file(mark)
    if not is_kept:
        discard_folder(folder)
    return not is_kept


def is_intact(folder: ObjectPath, sizes: Mapping[str, int]) -> bool:
    """Return whether a folder has all these files with these sizes, and no process has begun to delete it."""
    found = {str(info.path.relative_to(folder)): info.size for info in folder.store.list_objects(folder)}
    return found.items() >= sizes.items() and _REMOVED not in found


def has_lost_files(folder: Path) -> bool:
    """Return whether a pointer names a folder in an object store, although its manifest is missing."""
    match = _FOLDER.fullmatch(folder.name) if isinstance(folder, ObjectPath) else None
    if match is None or not isinstance(folder, ObjectPath) or store_of(folder).is_file(folder / NAME):
        return False
    entry = find_tag(folder.parent, match["tag"])
    return entry is not None and entry.names_checkpoint(match["id"])


def lost_files_error(folder: Path) -> CorruptCheckpointError:
    """Return the error of a checkpoint whose files are missing."""
    return CorruptCheckpointError(
        f"{folder} has no manifest, but its tag still names it: something else than holdfast has removed its files"
    )


def delete_prefix(folder: ObjectPath) -> None:
    """Delete all objects of a checkpoint, its manifest first."""
    paths = [info.path for info in folder.store.list_objects(folder)]
    first, last = folder / NAME, folder / _REMOVED
    for batch in ([first], [path for path in paths if path not in {first, last}], [last]):
        map_requests(folder.store.remove_file, (path for path in batch if path in paths))
