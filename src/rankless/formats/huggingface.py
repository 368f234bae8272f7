"""A reader of weights as Hugging Face libraries write them: one safetensors file, or several and an index.

Source: ``save_pretrained`` of transformers and of diffusers. A single safetensors file elsewhere is read as well.

Loads, views and conversions open it by :mod:`rankless.formats.detect_foreign`, on each rank; exports prove with
:func:`find_exported_files` which files they may replace (:mod:`rankless.run.ownership`), on rank 0. A folder counts as
ours only if each file has our checksums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.contained_paths import check_contained
from rankless.formats.native import check_native_form
from rankless.formats.reader import CheckpointValues, FileExtent, UnreadTensorNote
from rankless.formats.safetensors import SafetensorsFile, SafetensorsFiles, has_our_checksums, is_safetensors
from rankless.formats.sharded.index import read_index, two_saves_error
from rankless.ondisk import block_crcs, torchao_form, values
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.header import parse_json_object
from rankless.ondisk.value_files import TORCHAO
from rankless.ondisk.values import ArrayCodec
from rankless.ondisk.weight_names import DIFFUSERS, TRANSFORMERS, index_and_single
from rankless.storage.store import map_requests, store_of

INDEX, SINGLE = index_and_single(TRANSFORMERS[0])

#: The index and the single file of a model of diffusers, and of an optimizer, as ``save_optimizer`` writes them.
_DIFFUSERS, _OPTIMIZER = index_and_single(DIFFUSERS[0]), index_and_single("optimizer")

#: Key of the header metadata of a first file with the values that are not tensors, as JSON by component.
VALUES_KEY = "rankless.values"

MODEL, OPTIMIZER = "model", "optimizer"


def is_huggingface(path: Path) -> bool:
    """Return whether a folder holds weights in this layout, or a file is a safetensors file."""
    if store_of(path).is_file(path):
        return path.suffix == ".safetensors" or is_safetensors(path)
    return bool(kinds_in(path))


def kinds_in(folder: Path) -> list[str]:
    """Return which of a model and an optimizer a folder holds in this layout; optimizers as rankless writes them."""
    index, single = _OPTIMIZER
    has_optimizer = store_of(folder).file_exists(folder / single) or (
        store_of(folder).file_exists(folder / index) and not read_index(folder / index, folder).groups_file
    )
    has_model = any(store_of(folder).file_exists(folder / name) for name in (INDEX, SINGLE, *_DIFFUSERS))
    return [kind for kind, is_there in ((MODEL, has_model), (OPTIMIZER, has_optimizer)) if is_there]


def find_exported_files(folder: Path) -> frozenset[str] | None:
    """Return the names of a model's weights in a folder that rankless has written; ``None`` if there are none.

    See :mod:`rankless.run.ownership`. Other libraries write no checksums into the files.
    """
    store, (index, single) = store_of(folder), _model_names(folder)
    if store.file_exists(folder / index):
        names = {index, *read_index(folder / index, folder).weight_map.values()}
    else:
        names = {single}
    files = [folder / name for name in names - {index} if store.is_file(folder / name)]
    is_ours = files and all(map(has_our_checksums, files))
    return frozenset(names) if is_ours else None


def _model_names(folder: Path) -> tuple[str, str]:
    """Return the names of the index and of the single file that the model in a folder may have."""
    is_diffusers = not any(store_of(folder).file_exists(folder / name) for name in (INDEX, SINGLE))
    return _DIFFUSERS if is_diffusers else (INDEX, SINGLE)


def _read_descriptions(files: SafetensorsFiles) -> dict[str, str]:
    """Return torchao's description of each quantized tensor. ``save_pretrained`` puts all of them into each file."""
    descriptions = (torchao_form.read_descriptions(file.header.metadata) for file in files.files)
    return {name: text for of_file in descriptions for name, text in of_file.items()}


def _map_names(files: SafetensorsFiles, described: Mapping[str, str]) -> dict[str, str]:
    """Return the name in the files of each tensor. Raises ``CorruptCheckpointError`` if two would get one name."""
    renamed = torchao_form.native_names(files.tensors, described)
    stored_names = {renamed.get(name, name): name for name in files.tensors}
    if len(stored_names) != len(files.tensors):
        raise CorruptCheckpointError(f"two tensors of {files.files[0].path} are one in the description of torchao")
    return stored_names


class HuggingFaceReader:
    """A reader of one safetensors file, or of a folder with a model, an optimizer as rankless writes it, or both.

    ``file_sets`` are the files by group, if the caller has opened them.
    """

    format = "huggingface"
    unread: Sequence[UnreadTensorNote] = ()

    def __init__(self, path: Path, file_sets: Mapping[str, SafetensorsFiles] | None = None) -> None:
        self.path = path
        self._file_sets = dict(self._open_file_sets() if file_sets is None else file_sets)
        self.files: Sequence[Path] = [file.path for files in self._file_sets.values() for file in files.files]
        self._described = {group: _read_descriptions(files) for group, files in self._file_sets.items()}
        #: The names in the files by group and name: torchao's form has others for inner tensors.
        self._stored_names = {
            group: _map_names(files, self._described[group]) for group, files in self._file_sets.items()
        }
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: {name: self._file_sets[group].tensors[stored] for name, stored in names.items()}
            for group, names in self._stored_names.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = {
            group: torchao_form.rename_ties(files.tied, self._described[group])
            for group, files in self._file_sets.items()
        }

    def _open_file_sets(self) -> Iterator[tuple[str, SafetensorsFiles]]:
        if store_of(self.path).is_file(self.path):
            file = SafetensorsFile.open(self.path)
            yield (OPTIMIZER if OPTIMIZER in self._header_values([file]) else MODEL), SafetensorsFiles([file])
            return
        for group, (index, single) in self._name_pairs():
            paths = self._list_files(index, single)
            if paths:
                yield group, SafetensorsFiles([SafetensorsFile.open(path) for path in paths])

    def _name_pairs(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield the groups with the names of the index and of the single file that they may have."""
        yield MODEL, _model_names(self.path)
        yield OPTIMIZER, _OPTIMIZER

    def _list_files(self, index: str, single: str) -> list[Path]:
        store = store_of(self.path)
        if store.file_exists(self.path / index) and not read_index(self.path / index, self.path).groups_file:
            names = sorted(set(self._weight_map(index).values()))
            if single not in names and store.file_exists(self.path / single):
                raise two_saves_error(self.path / index, self.path / single)
            return [self._checked_path(self.path / name, index) for name in names]
        return [self._checked_path(self.path / single, index)] if store.file_exists(self.path / single) else []

    def _weight_map(self, name: str) -> dict[str, str]:
        return read_index(self.path / name, self.path).weight_map

    def _checked_path(self, file: Path, index: str) -> Path:
        if not store_of(file).path_exists(file):
            raise CorruptCheckpointError(f"{file} is missing; {index} names it")
        check_contained(file, self.path)
        return file

    @property
    def fingerprint(self) -> str:
        """A digest of the tensors' names, dtypes, shapes and offsets, and of the values in the headers."""
        tensors = repr(
            [
                sorted(
                    (name, info, files.file_of(name).tensor_extent(name, 0, 0).offset)
                    for name, info in files.tensors.items()
                )
                for files in self._file_sets.values()
            ]
        )
        header_texts = repr([self._header_texts(files.files) for files in self._file_sets.values()])
        return f"{block_crcs.crc64((tensors + header_texts).encode()):016x}"

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        if group not in self._file_sets:
            raise FormatError(f"{self.path} holds {' and '.join(self._file_sets)}, and no {group}")
        stored = self._stored_names[group][name]
        return [self._file_sets[group].file_of(stored).tensor_extent(stored, start, stop)]

    def stored_name(self, group: str, name: str) -> str:
        """Return the name that a tensor has in its file: torchao's form has others for inner tensors."""
        return self._stored_names[group][name]

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Return the CRCs that rankless wrote into the header, or ``None`` if another library wrote the file."""
        stored = self._stored_names[group][name]
        return self._file_sets[group].file_of(stored).crcs.get(stored)

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the values that rankless wrote into the headers; other libraries only describe quantized tensors."""
        del rank, rank_codec
        shared = {}
        for group, files in self._file_sets.items():
            encoded = self._header_values(files.files)
            if group == OPTIMIZER and group not in encoded:
                raise CorruptCheckpointError(
                    f"{self.path}: the optimizer's parameter groups are missing: no file's header has {VALUES_KEY!r}"
                )
            if group in encoded:
                value = values.decode_value(encoded[group], shared_codec, str(self.path))
                shared[group] = check_native_form(group, value, self.path)
            elif self._described[group]:
                shared[group] = {name: {TORCHAO: text} for name, text in self._described[group].items()}
        return CheckpointValues(shared)

    def _header_values(self, files: Sequence[SafetensorsFile]) -> dict[str, Any]:
        """Return the values in the headers by component, still encoded."""
        encoded: dict[str, Any] = {}
        for text in self._header_texts(files):
            encoded |= parse_json_object(text, f"{VALUES_KEY} of {self.path}")
        return encoded

    def _header_texts(self, files: Sequence[SafetensorsFile]) -> list[str]:
        texts = [file.header.metadata.get(VALUES_KEY) for file in files]
        return [text for text in texts if text is not None]

    def is_current(self) -> bool:
        """Return whether all files are the same ones as when their headers were read, with the same bytes."""
        files = [file for files in self._file_sets.values() for file in files.files]
        return all(map_requests(SafetensorsFile.is_current, files))

    def check_files(self) -> None:
        """Check that an index names just the tensors that are in the files. There are no checksums of the files."""
        for group, (index, _) in self._name_pairs():
            if group in self._file_sets and store_of(self.path).file_exists(self.path / index):
                self._check_index(index, self._file_sets[group])

    def _check_index(self, index: str, files: SafetensorsFiles) -> None:
        for name, file in self._weight_map(index).items():
            if name not in files.tensors or files.file_of(name).path.name != file:
                raise CorruptCheckpointError(
                    f"{self.path / index} says that {file} holds tensor {name!r}, but it does not"
                )
