"""The output of one publication: a new version of a weights directory, which all ranks write and rank 0 commits.

:class:`~rankless.components.component_content.ComponentContent` has one on every rank. The save of a model decides
which rank has which bytes of which file. For an anchor, these files are written as any save of a model writes them. For
a delta, each rank writes how its bytes differ from the version before. In the end rank 0 creates the manifest, which no
other publisher can have created: that is the commit.

The order must stay: the files of the anchor, the parts of all ranks, the manifest, the copies of the published bytes.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rankless.components.component_files import FileSet
from rankless.components.component_output import ComponentOutput, SavedComponent, open_component_output
from rankless.components.destination import Destination
from rankless.engine.comm.session import WritingRanks
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.crc_gather import HashedResult, vote_with_fragments
from rankless.engine.io.requests import Fragments, KnownFragments, ProviderOf
from rankless.engine.io.upload_target import FileFrame
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.writer_cells import CellGrain
from rankless.errors import CorruptCheckpointError, RanklessError, StateError, WeightsConflictError
from rankless.formats.weights.version_files import list_numbers, manifest_path
from rankless.observe.warning import warn_caller
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.data_files import WEIGHT_VERSIONS
from rankless.ondisk.manifest import LARGEST
from rankless.ondisk.weight_versions import (
    FORMAT,
    VERSION,
    Anchor,
    Delta,
    PublishedFile,
    VersionKey,
    VersionManifest,
    anchor_name,
    delta_name,
)
from rankless.process.prepared_types import prepared
from rankless.storage.store import store_of
from rankless.weights.level_encoder import encode_level
from rankless.weights.model_files import describe_model_file, digest_layout, locate_tensors
from rankless.weights.part_writer import PartWriter
from rankless.weights.publication import Publication, WeightVersion
from rankless.weights.publisher_state import OwnDelta, PublisherState
from rankless.weights.version_parts import TensorPlaces, cut_into_pieces, encode_against, hash_and_encode
from rankless.weights.weights_folders import (
    commit_version,
    find_outdated,
    is_committed,
    remove_abandoned,
    remove_unpublished,
    remove_version,
)

_log = logging.getLogger("rankless")

_encode = msgspec.msgpack.Encoder().encode

#: A level is a delta over this many versions.
LEVEL = 8


@prepared
class _BegunVersion(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0: the new version, its base, a level's base, and the uploads that were begun for an anchor.

    ``tensors`` are the places of all tensors in the model files, and ``layout`` is their digest.
    """

    key: VersionKey
    base: VersionKey | None = None
    level_base: VersionKey | None = None
    anchor: bytes | None = None
    tensors: TensorPlaces = TensorPlaces()
    layout: int = 0


@prepared
class _WrittenParts(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a rank: of the delta from the version before, and of a level."""

    parts: list[PublishedFile] = []
    level: list[PublishedFile] = []


class VersionOutput:
    """A :class:`rankless.components.component_output.ComponentOutput`: one version of a weights directory."""

    def __init__(self, publication: Publication, state: PublisherState, ranks: WritingRanks) -> None:
        self._publication, self._state, self._ranks = publication, state, ranks
        self._directory = publication.directory
        self._anchor: ComponentOutput[Path] | None = None
        self._begun: _BegunVersion | None = None
        #: On rank 0, the files of the model, and their sizes.
        self._files: FileSet | None = None
        self._frames: Sequence[FileFrame] = ()
        self._is_committed = False
        #: The source of the copy of the published bytes, and the parts that this rank has written.
        self._published: tuple[Sequence[FileRange], ProviderOf] | None = None
        self._written, self._depends_on_base = _WrittenParts(), True

    @property
    def grain(self) -> CellGrain | None:
        """See :class:`ComponentOutput`: as for an anchor, so that all versions are divided in one way."""
        return self._open_anchor("anchor").grain

    def _open_anchor(self, name: str) -> ComponentOutput[Path]:
        return open_component_output(Destination(self._directory / name, folder=True), self._ranks)

    def begin(self, files: FileSet, frames: Sequence[FileFrame]) -> bytes:
        """See :class:`ComponentOutput`. Decide the kind of version, and create its folders."""
        store_of(self._directory).make_folder(self._directory / WEIGHT_VERSIONS)
        self._state.leave_parent()
        self._files, self._frames = files, frames
        state, layout = self._state, digest_layout(files, frames)
        key = VersionKey(self._next_number(), secrets.token_hex(8))
        base = state.key if layout == state.layout else None
        is_due = state.since_anchor + 1 >= self._publication.anchor_every or self._publication.continues_other(
            state.base
        )
        begun = _BegunVersion(
            key,
            base,
            state.level_base if base is not None and state.since_anchor % LEVEL == LEVEL - 1 else None,
            self._begin_anchor(key, files, frames) if base is None or is_due else None,
            locate_tensors(files),
            layout,
        )
        if base is not None:
            store_of(self._directory).make_folder(self._directory / delta_name(key))
        return _encode(begun)

    def _next_number(self) -> int:
        """Return the number of the new version. Raises ``WeightsConflictError`` if another publisher is active."""
        state, newest = self._state, self._find_newest()
        if newest >= LARGEST:
            raise StateError(f"{self._directory} has the largest number of a version: publish into another directory")
        if state.base is None or (newest == state.base.number and self._is_base_there(state.base)):
            return newest + 1
        last, failed = state.base, state.failed
        state.forget()
        if failed is not None and failed.number == newest and is_committed(self._directory, failed):
            return newest + 1
        found = f"has version {newest}, which this job has not published" if newest else "has no version any more"
        raise WeightsConflictError(
            f"{self._directory} {found}; its own last one is {last.number}: let only one job publish into a "
            "directory, and let it remove versions itself. The next publication of this job is a whole model"
        )

    def _find_newest(self) -> int:
        """Return the number of the newest version, or at least the number of the last one of this job.

        A list of objects may be late. A request for an object by its name is not.
        """
        state, newest = self._state, max(list_numbers(self._directory), default=0)
        if state.failed is not None and state.failed.number > newest and is_committed(self._directory, state.failed):
            return state.failed.number
        if state.base is None:
            newest = max(newest, state.last_number)
            while store_of(self._directory).file_exists(manifest_path(self._directory, newest + 1)):
                newest += 1
        elif newest < state.base.number and self._is_base_there(state.base):
            return state.base.number
        return newest

    def _is_base_there(self, base: VersionManifest) -> bool:
        """Return whether the manifest of the base is that which this publisher has created.

        It is read only if its file has changed, as by a copy of the directory, a hard link or ``chmod``.
        """
        path = manifest_path(self._directory, base.number)
        found = store_of(path).file_version(path)
        is_there = found == self._state.base_version
        if not is_there:
            with suppress(CorruptCheckpointError):
                is_there = is_committed(self._directory, base.key)
        if is_there:
            self._state.base_version = found
        return is_there

    def _begin_anchor(self, key: VersionKey, files: FileSet, frames: Sequence[FileFrame]) -> bytes:
        self._anchor = self._open_anchor(anchor_name(key))
        return self._anchor.begin(files, frames)

    def join(self, begun: bytes) -> None:
        """See :class:`ComponentOutput`."""
        self._begun = msgspec.msgpack.decode(begun, type=_BegunVersion)
        if self._begun.anchor is not None:
            self._anchor = self._anchor or self._open_anchor(anchor_name(self._begun.key))
            self._anchor.join(self._begun.anchor)
        self._state.leave_parent()
        if self._begun.base is None:
            self._state.forget()

    def write(self, component: SavedComponent) -> WeightVersion:
        """See :class:`ComponentOutput`. It ends in the vote "publishing"."""
        begun = self._begun
        if begun is None:
            raise StateError("join() must be called before write()")
        if self._anchor is not None:
            self._anchor.write(component)

        def hash_share() -> HashedResult:
            return HashedResult(self._write_parts(component, begun), _encode(self._written))

        def commit(fragments: KnownFragments, posted: list[bytes]) -> bytes:
            by_rank = [msgspec.msgpack.decode(raw, type=_WrittenParts) for raw in posted]
            manifest = self._make_manifest(component, begun, fragments, by_rank)
            try:
                self._state.base_version = commit_version(self._directory, manifest)
            except WeightsConflictError:
                self._state.forget()
                raise
            self._is_committed = True
            self._note_committed(manifest)
            return _encode(replace(manifest, files=[replace(file, header="") for file in manifest.files]))

        raw = vote_with_fragments(self._ranks.session, "publishing", hash_share, commit, component.plan.rank_order)
        self._keep_copy(begun)
        if self._ranks.session.rank == COORDINATOR_RANK:
            self._remove_outdated()
        return WeightVersion.of(self._directory, msgspec.msgpack.decode(raw, type=VersionManifest))

    def _write_parts(self, component: SavedComponent, begun: _BegunVersion) -> Fragments:
        """Hash this rank's bytes, and write its parts. Return the fragments."""
        fragments: Fragments = {}
        folder, rank = self._directory / delta_name(begun.key), self._ranks.session.rank

        def move(file_ranges: Sequence[FileRange], bytes_of: ProviderOf) -> Fragments:
            self._published = file_ranges, bytes_of
            state = self._state
            self._depends_on_base = state.copy.holds(begun.base, file_ranges)
            encode = encode_against(state.copy, is_valid=self._depends_on_base)
            outputs = [] if begun.base is None else [(encode, PartWriter(folder, f"part-{rank:05d}"))]
            if begun.level_base is not None:
                own = state.own_deltas if self._depends_on_base else None
                level = encode_level(self._directory, own, begun.tensors, encode)
                outputs.append((level, PartWriter(folder, f"level-{rank:05d}")))
            fragments.update(hash_and_encode(cut_into_pieces(file_ranges, begun.tensors), bytes_of, outputs))
            self._written = _WrittenParts(*(writer.finish() for _, writer in outputs))
            return fragments

        component.move_share(move)
        return fragments

    def _make_manifest(
        self,
        component: SavedComponent,
        begun: _BegunVersion,
        fragments: KnownFragments,
        by_rank: Sequence[_WrittenParts],
    ) -> VersionManifest:
        if self._files is None:
            raise StateError("begin() must be called on rank 0 before write()")
        base, key, publication = self._state.base, begun.key, self._publication
        files = [
            describe_model_file(name, frame.size, component.build_header(number, fragments))
            for number, (name, frame) in enumerate(zip(self._files.names, self._frames, strict=True))
        ]
        deltas = []
        if begun.base is not None:
            deltas.append(Delta(begun.base, [part for written in by_rank for part in written.parts]))
        if begun.level_base is not None:
            deltas.append(Delta(begun.level_base, [part for written in by_rank for part in written.level]))
        return VersionManifest(
            format=FORMAT,
            version=VERSION,
            number=key.number,
            id=key.id,
            time=time.time(),
            step=publication.step,
            metrics=publication.metrics,
            training=publication.training,
            folder=delta_name(key) if deltas else "",
            anchor=Anchor(key.number, key.id, anchor_name(key))
            if self._anchor is not None or base is None
            else base.anchor,
            deltas=deltas,
            files=files,
            small_files=[
                PublishedFile(name, len(data), f"{crc64(data):016x}") for name, data in self._files.small_files.items()
            ],
        )

    def _note_committed(self, manifest: VersionManifest) -> None:
        """Note on rank 0 that the version was committed: the next one is based on it."""
        state = self._state
        state.since_anchor = 0 if manifest.is_anchor else state.since_anchor + 1
        state.base, state.failed, state.last_number = manifest, None, manifest.number

    def _keep_copy(self, begun: _BegunVersion) -> None:
        """Keep the published bytes of this rank. If that fails, the next version is stored as it is."""
        state = self._state
        state.key, state.layout = begun.key, begun.layout
        if self._anchor is not None or begun.level_base is not None:
            state.level_base, state.own_deltas = begun.key, []
        elif state.own_deltas is not None:
            is_new = OwnDelta(delta_name(begun.key), self._written.parts)
            state.own_deltas = [*state.own_deltas, is_new] if self._depends_on_base else None
        published, self._published = self._published, None
        try:
            if published is not None:
                state.copy.replace(begun.key, *published)
        except Exception:  # noqa: BLE001 - the version is published: an error now would be one rank's alone
            _log.warning("the next version is stored as a whole by this rank", exc_info=True)
            state.copy.forget()

    def _remove_outdated(self) -> None:
        """Remove the versions that are not kept, on rank 0. The publication does not fail because of it."""
        try:
            if not self._state.has_removed_abandoned:
                self._state.has_removed_abandoned = True
                remove_abandoned(self._directory)
            if self._publication.keep is not None and self._anchor is not None:
                for manifest in find_outdated(self._directory, self._publication.keep):
                    remove_version(self._directory, manifest)
        except (RanklessError, OSError) as error:
            warn_caller(f"old versions in {self._directory} could not be removed: {error}")

    def discard(self) -> None:
        """See :class:`ComponentOutput`. If the manifest may be there, its files stay."""
        self._published = None
        if self._anchor is not None:
            self._anchor.discard()
        if self._ranks.session.rank != COORDINATOR_RANK or self._begun is None or self._is_committed:
            return
        self._state.failed = self._begun.key
        with suppress(RanklessError):
            if not is_committed(self._directory, self._begun.key):
                remove_unpublished(self._directory, self._begun.key)
