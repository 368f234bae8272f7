"""The reader of one published version: a model that needs no files of its own.

The headers are in the manifest, with the CRCs of all blocks. The bytes come from an older version, the base, and from
the differences of all deltas on the way. So every load, conversion and verification reads any version in any layout,
and proves it as it proves files.

It is opened as a checkpoint of its own format (:mod:`rankless.formats.registry`), on each rank; a follower opens it
over the folder that it has (:mod:`rankless.weights.followed_folder`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from rankless.engine.io.tensor_sources import LayeredSource
from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError, NoCheckpointError
from rankless.formats.huggingface import MODEL, HuggingFaceReader
from rankless.formats.reader import CheckpointValues, FileExtent, UnreadTensorNote, missing_as_corrupt
from rankless.formats.safetensors import SafetensorsFile, SafetensorsFiles
from rankless.formats.weights.difference_parts import (
    DifferenceLayer,
    DifferencePart,
    PartCaches,
    TensorWords,
    open_part,
)
from rankless.formats.weights.routes import Route, find_route
from rankless.formats.weights.version_files import find_newest, manifest_path, read_manifest
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.values import ArrayCodec
from rankless.ondisk.weight_versions import VersionFile, VersionManifest, decode_model_header, number_of_name
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of


class WeightsReader:
    """A reader of one version. See :class:`rankless.formats.reader.Reader`.

    ``route`` leads to it from ``base``, a folder with the model files of the route's first version.
    """

    format = "weights"
    unread: Sequence[UnreadTensorNote] = ()

    def __init__(self, directory: Path, manifest: VersionManifest, base: Path, route: Route) -> None:
        self.path, self.manifest = manifest_path(directory, manifest.number), manifest
        self._directory, self._base = directory, base
        files = [self._open_file(file) for file in manifest.files]
        self._file_set = SafetensorsFiles(files)
        self._inner = HuggingFaceReader(self.path, {MODEL: self._file_set})
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = self._inner.groups
        self.tied: Mapping[str, Mapping[str, str]] = self._inner.tied
        self.tensors = tuple(_list_tensors(files))
        steps = [
            [open_part(directory / step.folder, part, self.tensors) for part in step.delta.parts]
            for step in route.steps
        ]
        self._sources = dict(self._make_sources(files, steps)) if steps else {}
        parts = [part.path for step in steps for part in step]
        self.files: Sequence[Path] = [self.path, *(file.path for file in files), *parts]

    def _open_file(self, file: VersionFile) -> SafetensorsFile:
        """Return a model file of the base with the header of this version."""
        path = self._base / file.name
        header = decode_model_header(file, str(self.path))
        with missing_as_corrupt(path):
            base = SafetensorsFile.open(path)
        if base.header.entries != header.entries:
            raise CorruptCheckpointError(f"{path} has other tensors than {self.path} says: they are of two models")
        opened = SafetensorsFile(path, replace(header, size=base.header.size), base.version)
        if lacking := sorted(header.entries.keys() - opened.crcs.keys()):
            raise CorruptCheckpointError(f"{self.path} has no CRCs of {lacking[0]!r}: it is corrupt")
        return opened

    def _make_sources(
        self, files: Sequence[SafetensorsFile], steps: Sequence[Sequence[DifferencePart]]
    ) -> Iterator[tuple[str, LayeredSource]]:
        caches, owners = PartCaches(), {name: file for file in files for name in file.tensors}
        for number, tensor in enumerate(self.tensors):
            extent = owners[tensor.name].tensor_extent(tensor.name, 0, 0)
            layers = (DifferenceLayer.of(tensor, number, parts, caches) for parts in steps)
            present = tuple(layer for layer in layers if layer is not None)
            yield tensor.name, LayeredSource(owners[tensor.name].path, extent.offset, present)

    @property
    def written_bytes(self) -> int:
        """The size of all that was written for this version. Verification reports it."""
        return self.manifest.written_bytes

    @property
    def fingerprint(self) -> str:
        """The identity of the version, whichever way leads to it."""
        return f"{self.manifest.number}-{self.manifest.id}"

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        extents = self._inner.find_extents(group, name, start, stop)
        if not self._sources:
            return extents
        stored = self._inner.stored_name(group, name)
        return [FileExtent(self._sources[stored], extent.start, extent.start, extent.stop) for extent in extents]

    def changed_files(self) -> set[str]:
        """Return the names of the model files that differ from the base's files in bytes of tensors."""
        changed = {source.file.name for source in self._sources.values() if source.layers}
        return changed & {file.name for file in self.manifest.files}

    def stored_crcs(self, name: str) -> Sequence[int]:
        """Return the CRCs of the blocks of a tensor, by its name in the files."""
        return self._file_set.crcs[name]

    def read_stored(self, name: str, start: int, into: memoryview, readers: ReaderPool) -> None:
        """Fill ``into`` with bytes of a tensor, by its name in the files, from ``start`` on."""
        source = self._sources.get(name)
        if source is not None:
            source.read(start, into, readers)
            return
        extent = self._file_set.file_of(name).tensor_extent(name, start, start + len(into))
        readers.read(self._file_set.file_of(name).path, extent.offset, into)

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """See :class:`rankless.formats.reader.Reader`. Each version has them."""
        return self._inner.block_crcs(group, name)

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.read_values(rank, shared_codec, rank_codec)

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`. The manifest and the tables of parts were verified."""

    def is_current(self) -> bool:
        """Return whether the version is still there. Manifests are removed before the files that they need."""
        return store_of(self.path).file_exists(self.path)


def _list_tensors(files: Sequence[SafetensorsFile]) -> Iterator[TensorWords]:
    """Yield the tensors in the order of their numbers in parts."""
    for file in files:
        for name, entry in sorted(file.header.entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
            yield TensorWords(name, entry.nbytes, dtype_width(entry.dtype))


def open_version(path: Path, keys: Mapping[str, str]) -> WeightsReader:
    """Return the reader of a version by the path of its manifest, or of the newest version of a weights directory.

    Raises ``NoCheckpointError`` if the version, or a version that it is based on, was removed;
    ``CorruptCheckpointError`` if files that its manifest names are missing or corrupt.
    """
    if keys:
        raise InvalidArgumentError(f"{path} has published weights of one model: leave out keys")
    newest = path if number_of_name(path.name) is not None else find_newest(path)
    number = None if newest is None else number_of_name(newest.name)
    if newest is None or number is None:
        raise FormatError(f"{path} has no published version")
    directory = newest.parent.parent
    manifest = read_manifest(directory, number)
    route = find_route(directory, manifest, lambda number: read_manifest(directory, number))
    try:
        return WeightsReader(directory, manifest, directory / route.anchor, route)
    except CorruptCheckpointError as error:
        if store_of(newest).file_exists(newest):
            raise
        raise NoCheckpointError(f"{newest} was removed while it was opened") from error
