"""A read-only view of one checkpoint of any format: its tensors, ranges of them, and its values.

One process opens it, in any thread and outside of votes; it needs torch only for tensors. It must not write anything,
and run no code of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.io.byte_sinks import ByteSink, MemorySink
from rankless.engine.io.read import read_file_ranges
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.element_ranges import TensorRange
from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    MismatchError,
)
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader, check_read, describe_doubts, detect_replacement, find_file_ranges
from rankless.inspection.bits_to_floats import as_array
from rankless.inspection.placeholders import PlaceholderCodec
from rankless.load.checkpoint_verification import CheckpointVerification, VerificationResult
from rankless.observe.units import format_size
from rankless.observe.warning import warn_caller
from rankless.ondisk.block_crcs import BLOCK_BYTES
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.manifest import Manifest
from rankless.ondisk.validation import check_keys
from rankless.run.added_metrics import read_metrics_of
from rankless.run.catalog import CheckpointIdentity
from rankless.run.folder_names import is_called
from rankless.run.lookup import describe_ignored_files, open_latest
from rankless.run.run_store import tag_of
from rankless.run.tag_arguments import TagArgument, check_tag_argument
from rankless.state.array_decoder import ArrayDecoder, allocate_tensor, tensor_sink
from rankless.storage.aligned_memory import aligned_buffer
from rankless.storage.location import parse_location

if TYPE_CHECKING:
    import torch

#: The groups of tensors that belong to values, and are read through these.
_VALUE_GROUPS = frozenset({"state", "ranks"})


#: How similar a name must be to a mistyped one to be suggested, of 1.
_SIMILARITY = 0.8


class Checkpoint:
    """A checkpoint that is open for reading. Names of tensors begin with their group: ``"model/layers.0.weight"``.

    A ``Checkpoint`` is iterable, and has a length: as :meth:`keys` does. All bytes that are read are verified against
    their CRCs, in whole blocks of 16 MiB. Files are opened when they are read. If another process has replaced or
    removed the checkpoint by then, ``CheckpointReplacedError`` is raised.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @cached_property
    def _stored(self) -> Sequence[tuple[str, str]]:
        """The group and the name of each tensor, by its number."""
        return sorted((group, name) for group, names in self._reader.groups.items() for name in names)

    @cached_property
    def _number(self) -> Mapping[str, int]:
        """The number of each tensor by its name, also by the names of tied ones."""
        numbers = {f"{group}/{name}": number for number, (group, name) in enumerate(self._stored)}
        for group, names in self._reader.tied.items():
            for alias, name in names.items():
                numbers.setdefault(f"{group}/{alias}", numbers[f"{group}/{name}"])
        return numbers

    @cached_property
    def _verifier(self) -> ChecksumVerifier:
        return ChecksumVerifier(self._reader, self._stored)

    @property
    def path(self) -> Path:
        """The path of the checkpoint's directory or file."""
        return self._reader.path

    @property
    def format(self) -> str:
        """The name of the checkpoint's format."""
        return self._reader.format

    @property
    def identity(self) -> CheckpointIdentity | None:
        """The sequence number, the run id and the id of a checkpoint of rankless; ``None`` for other formats."""
        manifest = self._manifest
        return None if manifest is None else CheckpointIdentity(manifest.sequence, manifest.run, manifest.id)

    @property
    def tag(self) -> str:
        """The tag of the checkpoint; of another format, the name of its directory or file."""
        return tag_of(self._reader.path)

    @property
    def step(self) -> float | None:
        """The training step; ``None`` if none was saved, or if the format is not rankless's own."""
        return None if self._manifest is None else self._manifest.step

    @property
    def nbytes(self) -> int:
        """The size in bytes of the tensors of :meth:`keys`."""
        return sum(self.info(name).nbytes for name in self.keys())

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics by name, with those that were added after the save; ``None`` for values that are not finite."""
        if self._manifest is None:
            return {}
        return {**self._manifest.metrics, **read_metrics_of(self.path.parent, self._manifest.id, self._is_called)}

    def _is_called(self, name: str) -> bool:
        manifest = self._manifest
        return manifest is not None and is_called(name, self.tag, manifest.tag, manifest.incarnation)

    @property
    def _manifest(self) -> Manifest | None:
        return self._reader.manifest if isinstance(self._reader, NativeReader) else None

    def keys(self) -> list[str]:
        """Return the names of the tensors of models and optimizers. A tied tensor is listed under one name only.

        Raises ``FormatError`` or ``CorruptCheckpointError`` if there are tensors, and none of them can be read.
        """
        if not self._stored:
            check_read(self._reader, lambda note: not note.is_value)
        return [f"{group}/{name}" for group, name in self._stored if group not in _VALUE_GROUPS]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the tensor of each of :meth:`keys`. One tensor at a time is read into CPU memory."""
        return ((name, self[name]) for name in self.keys())

    def info(self, name: str) -> TensorInfo:
        """Return the dtype (by its safetensors name), shape and size in bytes of a tensor.

        Args:
            name: The name of the tensor, with its group.

        Returns:
            The information of the tensor.

        Raises:
            KeyError: The checkpoint has no such tensor.
            FormatError: rankless cannot read this tensor.
        """
        return self._tensor_info(self._tensor_number(name))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read elements ``[start, stop)`` of a tensor in row-major order.

        Args:
            name: The name of the tensor, with its group.
            start: The index of the first element.
            stop: The index after the last element.

        Returns:
            The elements as a 1-D CPU tensor.

        Raises:
            KeyError: The checkpoint has no such tensor.
            InvalidArgumentError: The tensor has no such elements.
            FormatError: rankless cannot read this tensor.
            CorruptCheckpointError: Stored bytes differ from the saved ones.
            CheckpointReplacedError: Another process has replaced or removed the checkpoint.
            StorageError: The file system reported an error.
        """
        blocks = self._find_blocks(name, start, stop)
        width = dtype_width(self.info(name).dtype)
        tensor = allocate_tensor(TensorInfo(self.info(name).dtype, ((blocks.stop - blocks.start) // width,)))
        self._read_ranges({blocks: tensor_sink(tensor)})
        elements = tensor[start - blocks.start // width : stop - blocks.start // width]
        return elements if elements.numel() == tensor.numel() else elements.clone()

    def read_array(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Read elements ``[start, stop)`` of a tensor as :meth:`read` does, but as a 1-D array. It needs no torch.

        Args:
            name: The name of the tensor, with its group.
            start: The index of the first element.
            stop: The index after the last element.

        Returns:
            The elements. Of bfloat16 and float8, which NumPy does not have, they are float32, with the same values.
            Of F4 and F6 they are the bytes, which have several values.

        Raises:
            KeyError: As in :meth:`read`, like all other errors.
        """
        blocks = self._find_blocks(name, start, stop)
        memory = aligned_buffer(blocks.stop - blocks.start)
        self._read_ranges({blocks: MemorySink(memory)})
        dtype = self.info(name).dtype
        width = dtype_width(dtype)
        return as_array(memory[start * width - blocks.start : stop * width - blocks.start].copy(), dtype)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Read a whole tensor as an array, in its shape. See :meth:`read_array`.

        Args:
            name: The name of the tensor, with its group.

        Returns:
            The array.

        Raises:
            KeyError: As in :meth:`read`, like all other errors.
        """
        info = self.info(name)
        memory = aligned_buffer(info.nbytes)
        self._read_ranges({TensorRange(self._tensor_number(name), 0, info.nbytes): MemorySink(memory)})
        return as_array(memory, info.dtype).reshape(info.shape)

    def _find_blocks(self, name: str, start: int, stop: int) -> TensorRange:
        """Return the whole blocks with elements ``[start, stop)``. Raises ``InvalidArgumentError``."""
        info = self.info(name)
        size = dtype_width(info.dtype)
        if not 0 <= start <= stop <= info.nbytes // size:
            raise InvalidArgumentError(
                f"{name} has {info.nbytes // size} elements; {start} to {stop} is not a range of them"
            )
        first = start * size // BLOCK_BYTES * BLOCK_BYTES
        last = min(info.nbytes, -(-stop * size // BLOCK_BYTES) * BLOCK_BYTES)
        return TensorRange(self._tensor_number(name), first, max(first, last))

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a whole tensor into CPU memory. Without torch, use :meth:`array`.

        Args:
            name: The name of the tensor, with its group.

        Returns:
            The tensor.

        Raises:
            KeyError: As in :meth:`read`, like all other errors.
        """
        info = self.info(name)
        tensor = allocate_tensor(info)
        self._read_ranges({TensorRange(self._tensor_number(name), 0, info.nbytes): tensor_sink(tensor)})
        return tensor

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        count, size = len(self), format_size(self.nbytes)
        return f"<Checkpoint {str(self.path)!r}: {self.format}{step}, {count} tensor{'s' * (count != 1)}, {size}>"

    def _repr_html_(self) -> str:
        from rankless.inspection.checkpoint_html import describe_checkpoint  # noqa: PLC0415 - for notebooks

        return describe_checkpoint(self._reader, self._manifest, self.tag, self.metrics)

    def __contains__(self, name: object) -> bool:
        return name in self._number

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    @property
    def values(self) -> dict[str, Any]:
        """The plain values of the checkpoint, with the tensors in them: ``optimizer``, ``scheduler``, ``user_content``.

        Raises ``FormatError``, which names the value, if rankless cannot read one of them.
        """
        check_read(self._reader, lambda note: note.is_value)
        shared, ranks = (ArrayDecoder(self._reader.groups.get(group, {})) for group in ("state", "ranks"))
        with detect_replacement(self._reader):
            values = dict(self._reader.read_values(0, shared, ranks).shared)
        by_number = {self._number[f"state/{name}"]: tensor for name, tensor in shared.tensors.items()}
        self._read_ranges(
            {TensorRange(number, 0, tensor.nbytes): tensor_sink(tensor) for number, tensor in by_number.items()}
        )
        return values

    def verify(self) -> Iterator[VerificationResult]:
        """Read every byte, check every CRC, and yield a result for each range that was read.

        Corruption is reported in the results, and does not raise. Of other systems' formats, files of ``torch.save``
        and of ``torch.distributed.checkpoint`` have CRCs; the bytes of all others are only read.

        Yields:
            One result for each range. ``problem`` is ``None`` if the range is intact.

        Raises:
            CheckpointReplacedError: Another process replaced or removed the checkpoint meanwhile.
        """
        with detect_replacement(self._reader):
            for result in self._verify_parts():
                if result.problem is not None and not self._reader.is_current():
                    raise CheckpointReplacedError(f"{self.path} was replaced or removed while it was verified")
                yield result

    def _verify_parts(self) -> Iterator[VerificationResult]:
        if isinstance(self._reader, NativeReader):
            yield from (VerificationResult("", 0, str(error)) for error in self._reader.find_corrupt_files())
        try:
            if not isinstance(self._reader, NativeReader):
                self._reader.check_files()
            shared, ranks = (PlaceholderCodec(self._reader.groups.get(group, {})) for group in ("state", "ranks"))
            self._reader.read_values(0, shared, ranks)
        except (CorruptCheckpointError, FormatError, MismatchError) as error:
            yield VerificationResult("", 0, str(error))
        for note in self._reader.unread:
            problem = f"{self.path}: {note.group} {note.name!r} {note.why}"
            yield VerificationResult(f"{note.group}/{note.name}", 0, problem)
        yield from CheckpointVerification(self._reader).verify_parts()

    def _tensor_number(self, name: str) -> int:
        if name not in self._number:
            check_read(self._reader, lambda note: f"{note.group}/{note.name}" == name)
            keys = [key for key in self._number if key.partition("/")[0] not in _VALUE_GROUPS]
            close = [key for key in keys if name in key] or get_close_matches(name, keys, cutoff=_SIMILARITY)
            hint = f"; did you mean {', '.join(close[:3])}?" if close else ""
            raise KeyError(f"{name!r} is not in {self.path}{hint}")
        return self._number[name]

    def _tensor_info(self, number: int) -> TensorInfo:
        group, name = self._stored[number]
        return self._reader.groups[group][name]

    def _read_ranges(self, destinations: Mapping[TensorRange, ByteSink]) -> None:
        """Read and verify ranges of stored tensors, in whole blocks, each into a sink of the range's size."""
        files: dict[Source, int] = {}
        file_ranges = [
            file_range
            for byte_range in destinations
            for file_range in find_file_ranges(self._reader, self._stored[byte_range.tensor], byte_range, files)
        ]
        sinks = {byte_range.tensor: sink for byte_range, sink in destinations.items()}
        with detect_replacement(self._reader):
            self._verifier.verify_local(read_file_ranges(list(files), file_ranges, sinks.__getitem__))


def open(  # noqa: A001 - the public name
    path: str | PathLike[str], tag: TagArgument = None, *, keys: Mapping[str, str] | None = None
) -> Checkpoint:
    """Open a checkpoint of any format for reading.

    Args:
        path: A checkpoint, or a run directory.
        tag: The checkpoint of the run to open: its tag or an alias, :func:`rankless.best`, or :data:`rankless.LATEST`,
            which is the default.
        keys: The keys of the components in a checkpoint of another system, if rankless does not find them by their
            names: ``{"model": "app.net"}``.

    Returns:
        The open checkpoint.

    Raises:
        NoCheckpointError: There is no checkpoint at the path, or none with the tag in the run.
        InvalidArgumentError: A tag was passed although the path is a checkpoint itself, or ``tag`` or ``keys`` have
            the wrong type.
        FormatError: The format is not supported.
        CorruptCheckpointError: Stored bytes differ from the saved ones.
        CheckpointReplacedError: Other processes replace checkpoints faster than one can be opened.
        StorageError: The file system reported an error.
    """
    check_keys(keys)
    root = parse_location(path)
    selected = check_tag_argument(tag)
    reader = open_latest(root, keys, selected, is_lazy=keys is None)
    if selected is None and reader.path != root and (ignored := describe_ignored_files(root)):
        warn_caller(ignored)
    for doubt in describe_doubts(reader):
        warn_caller(doubt)
    return Checkpoint(reader)
