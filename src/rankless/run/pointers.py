"""The pointers of a run in an object store. Each gives a checkpoint its tag.

A *pointer* ``RUN/.tags/TAG/N`` is a small object that names the id of a checkpoint. It is created by a conditional
write, which one of several writers wins. This is the commit of a save (``N`` = 1) and of an overwrite (``N`` = the
highest + 1). The pointer with the highest ``N`` counts: for example ``.tags/step_10/2`` after an overwrite of
``step_10``.

:mod:`rankless.save.object_publication` creates them on rank 0, in the vote "completing the files"; lists, loads,
clean-ups and commands read them. A pointer is never changed, so it may be remembered by its path and version. Its JSON
is in stores: fields keep their names.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from rankless.errors import CorruptCheckpointError, RanklessError, StorageError
from rankless.ondisk.manifest import NAME, Count, Hex64, Manifest, Step
from rankless.ondisk.validation import is_tag
from rankless.process.prepared_types import prepared
from rankless.run.folder_names import abandoned_prefix, checkpoint_folder, tag_of_folder
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import ObjectInfo, map_requests, store_of

#: The name of the prefix of all pointers.
TAGS = ".tags"

_POINTER_NAME = re.compile("[1-9][0-9]{0,99}")

#: The errors of JSON that is none, or not this one.
_DECODING_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: The year 10000, which calendars of programs do not know, in seconds since 1970.
_END_OF_TIME = 253_402_300_800

#: The most bytes of a pointer.
_MAX_POINTER_BYTES = 2**20

#: How often a pointer is looked for that is listed, but missing, and the seconds between.
_ATTEMPTS, _ATTEMPT_SECONDS = 20, 0.05

#: The most pointers that are remembered.
_MAX_REMEMBERED = 2**15


@prepared
class Pointer(msgspec.Struct, frozen=True):
    """The content of a pointer: the checkpoint that it names, and its values for lists.

    So a list needs one small object of each checkpoint. The manifest decides if they differ.

    ``id`` is the id in the name of the folder. ``checkpoint`` is the manifest's id, if it is another one: each attempt
    to drain a checkpoint of the local tier has a folder of its own. ``saved_as`` is the tag in the name of the folder,
    if the checkpoint has got another one since.
    """

    id: Hex64
    run: Hex64
    sequence: Count
    time: Annotated[float, msgspec.Meta(ge=0, lt=_END_OF_TIME)]
    nbytes: Count
    world_size: Count
    step: Step | float | None = None
    metrics: dict[str, float | None] = {}
    checkpoint: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")] = ""
    incarnation: Count = 0
    saved_as: str = ""

    @property
    def checkpoint_id(self) -> str:
        """The id of the checkpoint, as its manifest has it."""
        return self.checkpoint or self.id

    @property
    def age(self) -> tuple[int, float, str]:
        """The key that sorts checkpoints from the oldest to the latest."""
        return self.sequence, self.time, self.checkpoint_id

    @classmethod
    def of(cls, manifest: Manifest, folder_id: str) -> Pointer:
        """Return the pointer to a checkpoint in the folder with an id."""
        return cls(
            folder_id,
            manifest.run,
            manifest.sequence,
            manifest.time,
            manifest.nbytes,
            manifest.provenance.world_size,
            manifest.step,
            dict(manifest.metrics),
            "" if manifest.id == folder_id else manifest.id,
            manifest.incarnation,
        )


class TagEntry(msgspec.Struct, frozen=True):
    """The pointer that counts for a tag: its number, and its content, or why that cannot be read.

    ``objects`` are all pointers of the tag, by ascending numbers: the last one counts, the others are outdated.
    """

    tag: str
    number: int
    pointer: Pointer | RanklessError
    objects: tuple[ObjectInfo, ...]

    @property
    def path(self) -> ObjectPath:
        """The path of the pointer."""
        return self.objects[-1].path

    def folder_in(self, run: ObjectPath) -> ObjectPath:
        """Return the folder of the checkpoint in its run. The pointer must be readable."""
        pointer = self.pointer
        if not isinstance(pointer, Pointer):
            raise pointer
        return checkpoint_folder(run, pointer.saved_as or self.tag, pointer.id)

    def names_checkpoint(self, checkpoint_id: str) -> bool:
        """Return whether the pointer names the checkpoint with an id, in whatever folder."""
        return isinstance(self.pointer, Pointer) and self.pointer.checkpoint_id == checkpoint_id

    def names_folder(self, folder_id: str) -> bool:
        """Return whether the pointer names the folder with an id."""
        return isinstance(self.pointer, Pointer) and self.pointer.id == folder_id


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


def check_readable(entries: Sequence[TagEntry]) -> None:
    """Raise ``StorageError`` if a pointer could not be read: it may name any checkpoint of its tag."""
    for entry in entries:
        if isinstance(entry.pointer, StorageError):
            raise entry.pointer


def find_tag(run: ObjectPath, tag: str) -> TagEntry | None:
    """Return one tag of a run with the pointer that counts; ``None`` if there is none.

    A pointer that stays listed, but is not found, was removed a moment ago if no checkpoint of the tag has a manifest:
    the list lags. Otherwise it cannot be read: a replica of the store lags.

    A load and a save call it on rank 0, in votes, and clean-ups before they delete. A pointer that cannot be read now
    must never be "no checkpoint".
    """
    found: list[ObjectInfo] = []
    for _ in range(_ATTEMPTS):
        found = list_pointers(run, tag)
        pointer = _read_pointer(found[-1]) if found else None
        if pointer is not None:
            return _make_entry(tag, found, pointer)
        if not found:
            return None
        time.sleep(_ATTEMPT_SECONDS)  # it was removed, or the list of the store lags
    folders = (run / name for name in run.store.list_names(run) if tag_of_folder(name) == tag)
    if not any(store_of(folder).is_file(folder / NAME) for folder in folders):
        return None
    unread = StorageError(errno.EIO, f"{found[-1].path} is listed, but the server does not find it: try again")
    return _make_entry(tag, found, unread)


def clock_difference(entries: Sequence[TagEntry]) -> float:
    """Return by how many seconds the clock of this host is ahead of the store's; 0 if no pointer tells it."""
    for entry in entries:
        info = entry.objects[-1]
        with suppress(StorageError):
            _, age = info.path.store.read_with_age(info.path, _MAX_POINTER_BYTES)
            if age is not None:
                return time.time() - (info.time + age)
    return 0.0


def find_tagged_folder(run: ObjectPath, tag: str) -> ObjectPath | None:
    """Return the folder that the pointer of a tag names; ``None`` if there is no pointer.

    Raises ``StorageError`` or ``CorruptCheckpointError`` if the pointer cannot be read.
    """
    entry = find_tag(run, tag)
    if entry is None:
        return None
    return entry.folder_in(run)


def find_highest_number(run: ObjectPath, tag: str) -> int:
    """Return the highest number of a tag's pointers; 0 if there is none."""
    found = list_pointers(run, tag)
    return _number_of(found[-1].path) if found else 0


def list_pointers(run: ObjectPath, tag: str) -> list[ObjectInfo]:
    """Return the pointers of a tag, by ascending numbers."""
    found = (info for info in run.store.list_objects(run / TAGS / tag) if _number_of(info.path))
    return sorted(found, key=_number_of_object)


def _list_pointers_to(run: ObjectPath, tag: str) -> list[ObjectInfo]:
    """Return all pointers that may name a folder of a tag."""
    found = (info for info in run.store.list_objects(run / TAGS) if _number_of(info.path))
    prefix = abandoned_prefix(tag)
    return [info for info in found if info.path.parent.name == tag or info.path.parent.name.startswith(prefix)]


def _make_entry(tag: str, ascending: Sequence[ObjectInfo], pointer: Pointer | RanklessError) -> TagEntry:
    return TagEntry(tag, _number_of(ascending[-1].path), pointer, tuple(ascending))


def _number_of(path: ObjectPath) -> int:
    """Return the number of a pointer, which is 1 or more; 0 for another object.

    For example, 2 for ``.tags/step_10/2``.
    """
    return int(path.name) if _POINTER_NAME.fullmatch(path.name) else 0


def _number_of_object(info: ObjectInfo) -> int:
    return _number_of(info.path)


def pointer_path(run: ObjectPath, tag: str, number: int) -> ObjectPath:
    """Return the path of a pointer."""
    return run / TAGS / tag / str(number)


#: The pointers that were read, by their path and version. They never change.
_pointers: dict[tuple[Path, str], Pointer] = {}


def _read_pointer(info: ObjectInfo) -> Pointer | RanklessError | None:
    """Return a pointer, or why it cannot be read; ``None`` if it was removed meanwhile."""
    key = info.path, info.etag
    if info.etag and key in _pointers:
        return _pointers[key]
    try:
        pointer = _decode_pointer(info) or _decode_pointer(info)
    except StorageError as error:
        return None if error.errno == errno.ENOENT else error
    if pointer is None:
        return CorruptCheckpointError(f"{info.path} is corrupt: it is no pointer to a checkpoint")
    if info.etag:
        if len(_pointers) >= _MAX_REMEMBERED:
            _pointers.clear()
        _pointers[key] = pointer
    return pointer


def _decode_pointer(info: ObjectInfo) -> Pointer | None:
    """Read a pointer. Return ``None`` if it is corrupt, or if its bytes have changed on their way.

    Raises ``StorageError`` if there is no answer, or one of another size, such as a page of a proxy.
    """
    data = info.path.store.read_small(info.path, _MAX_POINTER_BYTES)
    with suppress(*_DECODING_ERRORS):
        pointer = msgspec.json.decode(data, type=Pointer)
        return pointer if not pointer.saved_as or is_tag(pointer.saved_as) else None
    if len(data) != info.size:
        raise StorageError(
            errno.EIO,
            f"{info.path} has {info.size} bytes, but the answer to its request has {len(data)}: try again, and check "
            "whether a proxy answers for the server",
        )
    return None


def find_bytes(path: ObjectPath) -> bytes:
    """Return the bytes of a pointer; none if it is not there, such as after its removal."""
    try:
        return path.store.read_small(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return b""


def is_pointer(data: bytes) -> bool:
    """Return whether these bytes are a pointer."""
    try:
        msgspec.json.decode(data, type=Pointer)
    except _DECODING_ERRORS:
        return False
    return True


def is_published(run: ObjectPath, tag: str, folder_id: str) -> bool:
    """Return whether a pointer names the folder of a tag with an id, also an older one, or one of another tag.

    An abandoned checkpoint gets another tag: see :mod:`rankless.run.abandoned_tags`.

    Raises ``StorageError`` or ``CorruptCheckpointError`` if a pointer cannot be read: it may name this one.
    """
    for _ in range(_ATTEMPTS):
        pointers = map_requests(_read_pointer, _list_pointers_to(run, tag))
        if folder_id in {pointer.id for pointer in pointers if isinstance(pointer, Pointer)}:
            return True
        if errors := [pointer for pointer in pointers if isinstance(pointer, RanklessError)]:
            raise errors[0]
        if None not in pointers:
            return False
        time.sleep(_ATTEMPT_SECONDS)  # one was removed meanwhile, or an answer was wrong
    raise StorageError(errno.EIO, f"a pointer of the tag {tag!r} in {run} is listed, but cannot be read")
