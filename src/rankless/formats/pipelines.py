"""A reader of pipelines of diffusers: a folder with a ``model_index.json``, and a folder for each of several models.

:mod:`rankless.formats.detect_foreign` opens it on each rank or process that loads or converts such a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.errors import FormatError
from rankless.formats.composite_reader import CompositeReader
from rankless.formats.contained_paths import check_contained
from rankless.formats.huggingface import MODEL, HuggingFaceReader, kinds_in
from rankless.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from rankless.formats.sharded.sharded_reader import ShardedReader, is_sharded_checkpoint
from rankless.ondisk import strict_json
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.values import ArrayCodec
from rankless.storage.store import store_of

#: The file that names the parts of a pipeline, each with its library and class. Not all parts are models.
INDEX = "model_index.json"


def is_pipeline(path: Path) -> bool:
    """Return whether a folder is a pipeline."""
    return store_of(path).file_exists(path / INDEX)


def open_pipeline(folder: Path, keys: Mapping[str, str]) -> Reader:
    """Return a reader of the models of a pipeline: of all, such as ``model/unet``, or of the one that ``keys`` names.

    Raises ``FormatError`` if there is none.
    """
    models = [name for name in _list_parts(folder) if _has_weights(folder / name)]
    wanted = keys.get(MODEL)
    if not models or (wanted is not None and wanted not in models):
        has = f"the models {', '.join(models)}" if models else "no weights of a model"
        raise FormatError(f"{folder} is a pipeline of diffusers with {has}")
    if wanted is not None:
        return _open_model(folder, wanted)
    return CompositeReader(folder, [_PartReader(_open_model(folder, name), f"{MODEL}/{name}") for name in models])


def _list_parts(folder: Path) -> list[str]:
    """Return the names of the parts in the index that are names of folders."""
    check_contained(folder / INDEX, folder)
    content = strict_json.parse_json(store_of(folder).read_small(folder / INDEX), str(folder / INDEX))
    parts = content.items() if isinstance(content, dict) else ()
    return sorted(name for name, part in parts if isinstance(part, list) and _is_folder_name(folder, name))


def _is_folder_name(folder: Path, name: str) -> bool:
    is_plain = bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")
    return is_plain and store_of(folder).is_directory(folder / name)


def _has_weights(folder: Path) -> bool:
    return MODEL in kinds_in(folder) or is_sharded_checkpoint(folder)


def _open_model(pipeline: Path, name: str) -> Reader:
    """Return a reader of one model. Raises ``UnsafeNameError`` if its files are not inside the pipeline."""
    folder = pipeline / name
    reader: Reader = HuggingFaceReader(folder) if MODEL in kinds_in(folder) else ShardedReader(folder, {}, [MODEL])
    for file in reader.files:
        check_contained(file, pipeline)
    return reader


class _PartReader:
    """A reader of one model, under another name of its group. See :class:`rankless.formats.reader.Reader`."""

    def __init__(self, reader: Reader, group: str) -> None:
        self._reader, self._group = reader, group
        self.path, self.format, self.fingerprint = reader.path, reader.format, reader.fingerprint
        self.files: Sequence[Path] = reader.files
        self.unread: Sequence[UnreadTensorNote] = [note._replace(group=group) for note in reader.unread]
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {group: reader.groups[MODEL]}
        self.tied: Mapping[str, Mapping[str, str]] = {group: reader.tied.get(MODEL, {})}

    def find_extents(self, _: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._reader.find_extents(MODEL, name, start, stop)

    def block_crcs(self, _: str, name: str) -> Sequence[int] | None:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._reader.block_crcs(MODEL, name)

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the values of the model."""
        values = self._reader.read_values(rank, shared_codec, rank_codec)
        shared: dict[str, Any] = {self._group: values.shared[MODEL]} if MODEL in values.shared else {}
        return CheckpointValues(shared)

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`."""
        self._reader.check_files()

    def is_current(self) -> bool:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._reader.is_current()
