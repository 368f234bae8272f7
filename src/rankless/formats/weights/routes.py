"""The cheapest way to a version: from a version that a reader has, or from an anchor, over deltas.

Pure but for the manifests.

Followers and the reader of a version call it, each process for itself. A way never leads back to an older version.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from pathlib import Path

import msgspec

from rankless.errors import CorruptCheckpointError, NoCheckpointError, StorageError
from rankless.ondisk.weight_versions import Delta, VersionKey, VersionManifest

#: Reads the manifest of a version by its number. Raises ``NoCheckpointError`` if it was removed.
ReadManifest = Callable[[int], VersionManifest]

#: The most versions that a way is looked for in.
_MOST_VERSIONS = 10_000


class Step(msgspec.Struct, frozen=True):
    """A step of a way: a delta, and the folder of the version that has its parts."""

    folder: str
    delta: Delta


class Route(msgspec.Struct, frozen=True):
    """A way to a version, from ``start``. The files of ``start`` are in the folder ``anchor``.

    ``anchor`` is empty if the reader has ``start``. ``nbytes`` is the size of all that must be read. For example, a
    follower at version 7 reaches version 9 by two steps, the deltas from 7 to 8 and from 8 to 9, or by a delta from 7
    to 9 if there is one.
    """

    start: VersionKey
    anchor: str
    steps: tuple[Step, ...]
    nbytes: int


def find_route(
    directory: Path,
    target: VersionManifest,
    read_manifest: ReadManifest,
    have: Collection[VersionKey] = (),
    avoided: Collection[str] = (),
) -> Route:
    """Return the way to ``target`` with the fewest bytes to read. Errors name the ``directory``.

    Beyond a number of versions the search ends, and the best way is returned that was found so far.

    ``have`` are versions that the reader has at no cost. ``avoided`` are folders with missing or corrupt files. Raises
    ``NoCheckpointError`` if there is no way, because versions were removed; ``CorruptCheckpointError`` or
    ``StorageError`` if the manifest of one is corrupt or cannot be read.
    """
    unread: list[Exception] = []
    known: dict[VersionKey, VersionManifest] = {target.key: target}
    seen: set[VersionKey] = set()
    order = count()
    ways: list[tuple[int, int, Route]] = [(0, next(order), Route(target.key, "", (), 0))]
    oldest = min((key.number for key in have), default=None)
    while ways and len(seen) < _MOST_VERSIONS:
        *_, way = heapq.heappop(ways)
        if way.anchor or way.start in have:
            return way
        if way.start in seen:
            continue
        seen.add(way.start)
        manifest = known.get(way.start) or _find_manifest(way.start, read_manifest, unread)
        if manifest is not None:
            for longer in _extend(way, manifest, avoided, oldest):
                heapq.heappush(ways, (longer.nbytes, next(order), longer))
    found = [way for *_, way in sorted(ways) if way.anchor or way.start in have]
    if found:
        return found[0]
    if unread:
        raise unread[0]
    raise NoCheckpointError(
        f"no way leads to version {target.number} of {directory}: versions that it is based on were removed"
    )


def _extend(way: Route, manifest: VersionManifest, avoided: Collection[str], oldest: int | None) -> Iterator[Route]:
    """Yield the ways that begin where version ``manifest`` comes from, and go on as ``way`` does.

    Deltas lead from an anchor to anchors of the same size only, because they need the same files. So no way through an
    anchor to another one is cheaper, and if the reader has no version, or the ``oldest`` is newer, none is yielded.
    """
    has_anchor = manifest.is_anchor and manifest.anchor.folder not in avoided
    if has_anchor:
        yield Route(manifest.key, manifest.anchor.folder, way.steps, way.nbytes + manifest.anchor_bytes)
        if oldest is None or manifest.number <= oldest:
            return
    for delta in manifest.deltas if manifest.folder not in avoided else ():
        steps = (Step(manifest.folder, delta), *way.steps)
        yield Route(delta.base, "", steps, way.nbytes + delta.nbytes)


def _find_manifest(key: VersionKey, read_manifest: ReadManifest, unread: list[Exception]) -> VersionManifest | None:
    """Return the manifest of a version; ``None`` if it was removed, or belongs to another publisher.

    Return ``None``, too, if it is corrupt, or cannot be read: ``unread`` gets the error.
    """
    try:
        manifest = read_manifest(key.number)
    except NoCheckpointError:
        return None
    except (CorruptCheckpointError, StorageError) as error:
        unread.append(error)
        return None
    return manifest if manifest.key == key else None


def remember_manifests(read_manifest: ReadManifest, known: Mapping[int, VersionManifest]) -> ReadManifest:
    """Return a function that reads each manifest once, and those in ``known`` not at all."""
    manifests = dict(known)

    def read(number: int) -> VersionManifest:
        if number not in manifests:
            manifests[number] = read_manifest(number)
        return manifests[number]

    return read
