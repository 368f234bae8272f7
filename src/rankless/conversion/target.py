"""The interface of a format that conversions write: its files, the layout of tensors in them, and all other content.

:class:`~rankless.conversion.pipeline.Conversion` makes a target on every rank in the vote "planning the output". All
ranks must get the same layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rankless.conversion.carried_values import CarriedValues
from rankless.conversion.tensor_filter import Key, SelectedTensors
from rankless.engine.io.requests import KnownFragments
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader, original_reader
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.weight_names import TRANSFORMERS


@dataclass(frozen=True)
class ConversionSource:
    """The tensors and values of a source to be written.

    ``limit``: the maximum bytes of tensors in one file. ``small_files``: further files for the output, by their names.
    ``options`` are the format's options, and ``dtype`` is the one that the user asked for, if any. ``notes`` are
    entries of the metadata of each safetensors file of the model; the names of these files begin with ``stem``, for
    example ``model`` in ``model-00001-of-00002.safetensors``. ``given_step`` is the training step that the user has
    passed.
    """

    reader: Reader
    selected: SelectedTensors
    carried: CarriedValues
    limit: int
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    stem: str = TRANSFORMERS[0]
    given_step: int | float | None = None

    @property
    def step(self) -> int | float | None:
        """The training step that was passed, or that the source names; ``None`` if it names none."""
        if self.given_step is not None:
            return self.given_step
        original = original_reader(self.reader)
        return original.manifest.step if isinstance(original, NativeReader) else self.carried.step

    @property
    def tensor_infos(self) -> dict[Key, TensorInfo]:
        """All tensors, including the in-memory arrays of values."""
        return {**self.selected.infos, **self.carried.array_infos()}

    @property
    def nbytes(self) -> int:
        """The size in bytes of all tensors."""
        return sum(info.nbytes for info in self.tensor_infos.values())


class FileSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor, which are stored in the file of this number from byte ``offset`` on.

    For example, a tensor of a ``torch.save`` file that is stored as a whole is one span from 0 to its size.
    """

    file: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class FileLayout:
    """The files by number, and the spans of each tensor in them. Tensors are in the order of the files.

    ``header_bytes`` are, by file, the bytes at its start that are written when all tensors are; 0 in formats without
    checksums.
    """

    files: Sequence[Path]
    tensors: Mapping[Key, Sequence[FileSpan]]
    header_bytes: Sequence[int]

    def split(self, complete: Collection[int]) -> tuple[FileLayout, FileLayout]:
        """Return the layout with the spans in all but some files, and with those in these files, which are complete."""
        parts = [
            {key: [span for span in spans if (span.file in complete) is inside] for key, spans in self.tensors.items()}
            for inside in (False, True)
        ]
        return replace(self, tensors=parts[0]), replace(self, tensors=parts[1])


class ConversionTarget(Protocol):
    """A format that all ranks write into a pending directory, which rank 0 creates, publishes and removes."""

    def create_files(self) -> Collection[int]:
        """Create the files at their final sizes, with all but their tensors and headers. Only rank 0 calls it.

        It does so in the vote "preparing". Return the numbers of files that are complete already: links of other files.
        """

    def locate_tensors(self) -> FileLayout:
        """Return the layout of the tensors, after the files are created. A rank that does not see them does not.

        In a folder, each rank calls it; in an object store, rank 0.
        """

    def write_metadata(self, fragments: KnownFragments) -> None:
        """Write the headers, and files without tensors. Only rank 0 calls it, when all tensors are written.

        ``fragments`` number the tensors in the order of :meth:`locate_tensors`.

        It does so in the decision of the vote on the writing.
        """

    def open_reader(self) -> Reader:
        """Open the finished output. Raises ``CorruptCheckpointError`` if it is not valid.

        In a folder, each rank calls it in the vote "opening the output"; in an object store, rank 0.
        """

    @property
    def output_name(self) -> str:
        """The entry of the pending directory that gets the final path; ``""`` for the directory itself."""
