"""A reader of a checkpoint as edits change it: some of its tensors are computed from those that are stored.

:mod:`rankless.edits` makes one, on each rank of a conversion or a load, over the readers of one checkpoint or several.
Stored tensors keep their files and CRCs. Computed ones are read from sources that compute each range of bytes
(:class:`rankless.engine.io.tensor_sources.ComputedSource`). The bytes that they read are hashed on the way, and every
reading rank calls :meth:`EditedReader.verify_inputs`: no byte of a computed tensor may come from a block that does not
match its CRC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.streamed_tensor import ReadFragments
from rankless.engine.io.tensor_sources import ComputedSource
from rankless.formats.native import NativeReader
from rankless.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote, check_current
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.manifest import EditRecord
from rankless.ondisk.values import ArrayCodec
from rankless.storage.aligned_memory import Bytes
from rankless.storage.reader_pool import ReaderPool


class StoredKey(NamedTuple):
    """A stored tensor: the number of its checkpoint, its group and its name."""

    source: int
    group: str
    name: str


#: Fills a buffer with the bytes of a stored tensor from an offset on.
ReadStored = Callable[[StoredKey, int, Bytes], None]


class EditedTensor(Protocol):
    """A tensor of the edited checkpoint."""

    @property
    def info(self) -> TensorInfo:
        """Its dtype and shape."""

    @property
    def whole(self) -> StoredKey | None:
        """The stored tensor that it is, with the same dtype and shape; ``None`` if it is computed."""

    def inputs(self) -> Iterable[StoredKey]:
        """Return the stored tensors that it is computed from; some may be named twice."""

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """Compute its bytes from ``start`` on. Offset and length are whole elements. Any thread calls it."""


class EditedContent(NamedTuple):
    """The contents of an edited checkpoint: tensors and ties by group, changes of values and of small files.

    ``change_config`` returns the bytes of ``config.json``. ``record`` becomes a member of the manifest.
    ``reconstructed`` has the names of values that no stored tensor has. ``unread`` has notes on tensors and values that
    cannot be read after the edit.
    """

    tensors: Mapping[str, Mapping[str, EditedTensor]]
    tied: Mapping[str, Mapping[str, str]]
    change_values: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    change_config: Callable[[bytes], bytes]
    record: EditRecord
    reconstructed: Sequence[str] = ()
    unread: Sequence[UnreadTensorNote] = ()


class EditedReader:
    """A reader of an edited checkpoint. ``readers`` read the stored checkpoints; the first one provides the values.

    See :class:`rankless.formats.reader.Reader` and :class:`rankless.formats.reader.EditedCheckpoint`.
    """

    def __init__(self, readers: Sequence[Reader], content: EditedContent) -> None:
        self.readers, self.content = readers, content
        self.original = readers[0]
        self.tied = content.tied
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: {name: tensor.info for name, tensor in tensors.items()} for group, tensors in content.tensors.items()
        }
        self._inputs = [_InputTensors(reader) for reader in readers]
        self._sources: dict[tuple[str, str], ComputedSource] = {}

    @property
    def path(self) -> Path:
        """The folder or file of the first checkpoint."""
        return self.original.path

    @property
    def format(self) -> str:
        """The format of the first checkpoint."""
        return self.original.format

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprints of all checkpoints, and the recipe."""
        digest = f"{crc64(self.content.record.recipe.encode()):016x}"
        return "-".join([*(reader.fingerprint for reader in self.readers), digest])

    @property
    def unread(self) -> Sequence[UnreadTensorNote]:
        """The tensors and values that rankless cannot read, and states that an edit has no rule for."""
        return [*self.original.unread, *self.content.unread]

    @property
    def files(self) -> Sequence[Path]:
        """The files of all checkpoints."""
        return [file for reader in self.readers for file in reader.files]

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        key = self.content.tensors[group][name].whole
        if key is not None:
            return self.readers[key.source].find_extents(key.group, key.name, start, stop)
        return [FileExtent(self._source_of(group, name), start, start, stop)]

    def _source_of(self, group: str, name: str) -> ComputedSource:
        source = self._sources.get((group, name))
        if source is None:
            compute = partial(self._compute, self.content.tensors[group][name])
            made = ComputedSource(compute, f"{group} tensor {name!r} of {self.path}")
            source = self._sources.setdefault((group, name), made)
        return source

    def _compute(self, tensor: EditedTensor, offset: int, into: memoryview, readers: ReaderPool) -> None:
        """Fill ``into`` with any bytes of a computed tensor, which may begin and end inside of elements."""

        def read(key: StoredKey, start: int, data: Bytes) -> None:
            self._inputs[key.source].read((key.group, key.name), start, data, readers)

        width = dtype_width(tensor.info.dtype)
        first, stop = offset // width * width, -(-(offset + len(into)) // width) * width
        out = np.frombuffer(into, np.uint8)
        elements = out if stop - first == len(out) else np.empty(stop - first, np.uint8)
        tensor.fill(first, elements, read)
        if elements is not out:
            out[:] = elements[offset - first :][: len(out)]

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Return the CRCs of a tensor that is a stored one, else ``None``."""
        key = self.content.tensors[group][name].whole
        return None if key is None else self.readers[key.source].block_crcs(key.group, key.name)

    @property
    def edits(self) -> tuple[EditRecord, ...]:
        """See :class:`rankless.formats.reader.EditedCheckpoint`."""
        before = self.original.manifest.edits if isinstance(self.original, NativeReader) else ()
        return (*(before or ()), self.content.record)

    @property
    def reconstructed(self) -> Sequence[str]:
        """See :class:`rankless.formats.reader.EditedCheckpoint`."""
        return self.content.reconstructed

    def find_edited_groups(self) -> set[str]:
        """See :class:`rankless.formats.reader.EditedCheckpoint`."""
        tensors = self.content.tensors
        return {
            group
            for group in tensors.keys() | self.original.groups.keys()
            if tensors.get(group, {}).keys() != self.original.groups.get(group, {}).keys()
            or any(tensor.whole != (0, group, name) for name, tensor in tensors.get(group, {}).items())
        }

    def has_crcs(self, group: str, name: str) -> bool:
        """See :class:`rankless.formats.reader.EditedCheckpoint`."""
        return all(reader.block_crcs(*key) is not None for reader, key in self.input_keys(group, name))

    def verify_inputs(self) -> None:
        """See :class:`rankless.formats.reader.EditedCheckpoint`."""
        for inputs in self._inputs:
            inputs.verify()

    def input_keys(self, group: str, name: str) -> Sequence[tuple[Reader, tuple[str, str]]]:
        """Return the stored tensors that a tensor is computed from, each with its reader."""
        keys = dict.fromkeys(self.content.tensors[group][name].inputs())
        return [(self.readers[key.source], (key.group, key.name)) for key in keys]

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the values of the first checkpoint, and change the shared ones."""
        values = self.original.read_values(rank, shared_codec, rank_codec)
        shared = self.content.change_values(values.shared)
        return CheckpointValues(shared, values.rank_values, values.world_size, values.ranks)

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`."""
        for reader in self.readers:
            reader.check_files()

    def is_current(self) -> bool:
        """Return whether all checkpoints are current."""
        return all(reader.is_current() for reader in self.readers)


class _InputTensors:
    """The stored tensors of one checkpoint, as computed tensors read them. All threads that read share it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._keys = [(group, name) for group, names in sorted(reader.groups.items()) for name in sorted(names)]
        self._fragments = ReadFragments()

    @cached_property
    def _numbers(self) -> dict[tuple[str, str], int]:
        return {key: number for number, key in enumerate(self._keys)}

    def read(self, key: tuple[str, str], start: int, into: Bytes, readers: ReaderPool) -> None:
        """Fill ``into`` with bytes of a stored tensor, and hash them."""
        for extent in self._reader.find_extents(*key, start, start + len(into)):
            target = into[extent.start - start : extent.stop - start]
            SourceReader([extent.file], readers).read(0, extent.offset, target.data)
        if self._reader.block_crcs(*key) is not None:
            self._fragments.add_bytes(self._numbers[key], start, into)

    def verify(self) -> None:
        """Compare the bytes that were read with the CRCs. Blocks that were read in part are read again."""
        fragments, self._fragments = self._fragments, ReadFragments()
        verifier = ChecksumVerifier(self._reader, self._keys)
        verifier.verify_across_ranks(verifier.verify_local(fragments.merge_all()))
        if any(self._reader.block_crcs(*key) is None for key in self._keys):
            check_current(self._reader)
