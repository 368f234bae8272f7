"""PEFT's folders of adapters: ``adapter_config.json`` next to ``adapter_model.safetensors`` or ``adapter_model.bin``.

Source: ``PeftModel.save_pretrained``. The adapter ``default`` is in the folder itself, others in folders with their
names. Each is a group of tensors, as in a checkpoint of rankless.

:mod:`rankless.formats.detect_foreign` opens it through the registry, on each rank that loads or converts such a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankless.errors import FormatError
from rankless.formats.composite_reader import CompositeReader
from rankless.formats.contained_paths import check_contained
from rankless.formats.huggingface import MODEL, HuggingFaceReader
from rankless.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from rankless.formats.torch_file import TorchFileReader
from rankless.ondisk.data_files import ADAPTER, ADAPTER_CONFIG, ADAPTER_STEM, TensorInfo, adapter_group
from rankless.ondisk.values import ArrayCodec
from rankless.storage.store import store_of

#: PEFT's names of the file with the tensors of an adapter. It prefers the first.
_SAFETENSORS, ADAPTER_BIN = f"{ADAPTER_STEM}.safetensors", f"{ADAPTER_STEM}.bin"

#: A file of transformers' ``Trainer``. A folder with it is a checkpoint, which is not one of several adapters.
_TRAINER_STATE = "trainer_state.json"

#: PEFT's name of the adapter in the folder itself.
_DEFAULT = "default"


def is_peft(path: Path) -> bool:
    """Return whether a folder holds adapters as PEFT stores them."""
    return store_of(path).is_directory(path) and next(_find_files(path), None) is not None


def _find_files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each adapter in a folder."""
    folders = {_DEFAULT: path}
    for folder in store_of(path).list_subdirectories(path):
        if not store_of(folder).path_exists(folder / _TRAINER_STATE):
            folders.setdefault(folder.name, folder)
    for name, folder in folders.items():
        files = [folder / file for file in (_SAFETENSORS, ADAPTER_BIN) if store_of(folder).file_exists(folder / file)]
        if files and store_of(folder).file_exists(folder / ADAPTER_CONFIG):
            yield name, files[0]


class PeftReader:
    """A reader of the adapters in a folder. See :class:`rankless.formats.reader.Reader`."""

    format = "peft"

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        del keys
        self.path = path
        self._readers = {adapter_group(name): _open_file(file) for name, file in _find_files(path)}
        self.fingerprint = "-".join(reader.fingerprint for reader in self._readers.values())
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: reader.groups[MODEL] for group, reader in self._readers.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = {
            group: reader.tied.get(MODEL, {}) for group, reader in self._readers.items()
        }
        self.files: Sequence[Path] = [file for reader in self._readers.values() for file in reader.files]
        self.unread: Sequence[UnreadTensorNote] = [
            note._replace(group=group) for group, reader in self._readers.items() for note in reader.unread
        ]

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._readers[group].find_extents(MODEL, name, start, stop)

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._readers[group].block_crcs(MODEL, name)

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return no values: an adapter is tensors and a configuration."""
        del rank, shared_codec, rank_codec
        return CheckpointValues({})

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`."""
        for reader in self._readers.values():
            reader.check_files()

    def is_current(self) -> bool:
        """See :class:`rankless.formats.reader.Reader`."""
        return all(reader.is_current() for reader in self._readers.values())


def read_foreign_adapter_configs(reader: Reader) -> dict[str, bytes]:
    """Return the same as ``read_adapter_configs``, for a checkpoint of another system."""
    if isinstance(reader, CompositeReader):
        return {name: data for part in reader.readers for name, data in read_foreign_adapter_configs(part).items()}
    if isinstance(reader, PeftReader):
        folders = {group: reader.path / group.removeprefix(ADAPTER).removeprefix("/") for group in reader.groups}
        for folder in folders.values():
            check_contained(folder / ADAPTER_CONFIG, reader.path)
        return {
            f"{group}/{ADAPTER_CONFIG}": store_of(folder).read_small(folder / ADAPTER_CONFIG)
            for group, folder in folders.items()
        }
    return {}


def _open_file(file: Path) -> Reader:
    reader: Reader = HuggingFaceReader(file) if file.name == _SAFETENSORS else TorchFileReader(file, {})
    if list(reader.groups) != [MODEL]:
        raise FormatError(f"{file} contains {', '.join(reader.groups) or 'nothing'}, not the tensors of an adapter")
    return reader
