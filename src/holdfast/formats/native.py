"""Checkpoints of ours, format v1: see ``docs/format.md``."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    HoldfastError,
    NoCheckpointError,
    StorageError,
)
from holdfast.formats.reader import CheckpointValues, FileExtent, UnreadTensorNote, detect_replacement
from holdfast.formats.safetensors import SafetensorsFile, SafetensorsFiles
from holdfast.ondisk import blocks, manifest, values
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.ondisk.param_order import restore_order
from holdfast.ondisk.strict_json import parse_json
from holdfast.ondisk.values import ArrayCodec
from holdfast.storage import posix

#: The part of the values that tells of optimizers.
OPTIMIZER = "optimizer"

#: The file of values that all ranks share, and the one of those that belong to single ranks.
STATE, RANKS = values.SHARED_FILE, values.RANKS_FILE


class _Group(msgspec.Struct):
    name: str | None = msgspec.field(name="class")
    number: int
    params: list[str]
    settings: dict[str, Any]
    state: dict[str, dict[str, Any]]


class _Optimizer(msgspec.Struct):
    groups: list[_Group]


class _Scheduler(msgspec.Struct):
    name: str | None = msgspec.field(name="class")
    state: Any


#: What is known of the form of ``state.json``, by the kind of the object; it may have a name after a slash.
_FORMS: dict[str, Any] = {
    "model": dict[str, Any],
    "optimizer": _Optimizer,
    "scheduler": _Scheduler | list[_Scheduler],
    "stateful": dict[str, Any],
}


class _PerRank(msgspec.Struct):
    """What is known of the form of one rank's part of ``ranks.json``."""

    rng: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def is_native(path: Path) -> bool:
    """Whether a folder has a manifest."""
    return posix.is_file(path / manifest.NAME)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises ``CheckpointReplacedError`` where there is none, or none any more."""
    file = path / manifest.NAME
    try:
        posix.check_regular(file, within=(path,))
        return manifest.decode_manifest(posix.read_small(file), str(file))
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise CheckpointReplacedError(f"{path} was removed while it was looked at") from error


def claims_to_be_native(path: Path) -> bool:
    """Whether a folder whose manifest cannot be read is one of ours: the manifest says so, or our other files do."""
    with suppress(HoldfastError):
        table = parse_json(posix.read_small(path / manifest.NAME), manifest.NAME)
        if isinstance(table, dict) and table.get("format") == "holdfast":
            return True
    return posix.is_file(path / STATE) and posix.is_file(path / RANKS)


def holds_checkpoint(path: Path, identity: str) -> bool:
    """Whether a folder holds the checkpoint of this id; so it is taken to where its manifest cannot be read."""
    try:
        return read_manifest(path).id == identity
    except NoCheckpointError:
        return False
    except HoldfastError:
        return True


class NativeReader:
    """A checkpoint's folder of ours."""

    format = "holdfast"
    unread: Sequence[UnreadTensorNote] = ()

    def __init__(self, path: Path, unopened: list[CorruptCheckpointError] | None = None) -> None:
        """With a list for what cannot be opened, such files are left out and told there, and not raised."""
        self.path = path
        self.manifest = read_manifest(path)
        with detect_replacement(self):
            self._groups = {group: SafetensorsFiles(files) for group, files in self._open_data(unopened).items()}
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: found.tensors for group, found in self._groups.items()
        }
        self.tied: Mapping[str, Mapping[str, str]] = {group: found.tied for group, found in self._groups.items()}

    @property
    def fingerprint(self) -> str:
        """The checkpoint's id and the CRC of its manifest."""
        return f"{self.manifest.id}-{blocks.crc64(manifest.encode_manifest(self.manifest)):016x}"

    def _open_data(self, unopened: list[CorruptCheckpointError] | None) -> dict[str, list[SafetensorsFile]]:
        found: dict[str, list[SafetensorsFile]] = {}
        for name, record in self.manifest.files.items():
            if name.endswith(".safetensors"):
                folder, _, file = name.rpartition("/")
                group = folder or file.split(".")[0].split("-")[0]
                try:
                    found.setdefault(group, []).append(SafetensorsFile.open(self._file(name), record))
                except CorruptCheckpointError as error:
                    if unopened is None:
                        raise
                    unopened.append(error)
        return found

    def _file(self, name: str) -> Path:
        path = self.path / name
        if not posix.path_exists(path):
            raise CorruptCheckpointError(f"{path} is missing; the manifest names it")
        posix.check_regular(path, within=(self.path,))
        return path

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`holdfast.formats.reader.Reader`."""
        return [self.path / name for name in self.manifest.files]

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.reader.Reader`."""
        return [self._groups[group].home(name).extent(name, start, stop)]

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """See :class:`holdfast.formats.reader.Reader`."""
        return self._groups[group].crcs[name]

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> CheckpointValues:
        """See :class:`holdfast.formats.reader.Reader`."""
        tree = values.load_values(self.small(STATE), shared, str(self.path / STATE))
        table = parse_json(self.small(RANKS), str(self.path / RANKS))
        ranks = table.get("ranks") if isinstance(table, dict) else None
        if not isinstance(tree, dict) or not isinstance(ranks, list):
            raise CorruptCheckpointError(f"{self.path}: {STATE} is no object, or {RANKS} has no list of ranks")
        mine = values.decode_value(ranks[rank], own, str(self.path / RANKS)) if rank < len(ranks) else None
        for name, value in tree.items():
            check_native_form(name, value, self.path / STATE)
            if name.partition("/")[0] == OPTIMIZER:
                value["groups"] = self._ordered(value["groups"], name, table)
        _check_form({} if mine is None else mine, _PerRank, self.path / RANKS)
        return CheckpointValues(tree, mine, len(ranks), ranks)

    def _ordered(self, groups: list[dict[str, Any]], slot: str, table: dict[str, Any]) -> list[dict[str, Any]]:
        orders = table.get("order", {})
        try:
            return restore_order(groups, orders.get(slot) if isinstance(orders, dict) else None)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self.path / RANKS}: {error}") from error

    def small(self, name: str) -> bytes:
        """The bytes of a file without tensor data, verified."""
        record = self.manifest.files.get(name)
        if record is None:
            raise CorruptCheckpointError(
                f"the manifest of {self.path} does not name {name}, which every checkpoint has"
            )
        data = posix.read_small(self._file(name), values.VALUES_LIMIT)
        if not _matches(data, record):
            raise CorruptCheckpointError(f"{self.path / name} does not match the manifest: it is damaged")
        return data

    def is_current(self) -> bool:
        """See :class:`holdfast.formats.reader.Reader`."""
        return holds_checkpoint(self.path, self.manifest.id)

    def check_files(self) -> None:
        """See :class:`holdfast.formats.reader.Reader`."""
        for error in self.damaged_files():
            raise error

    def damaged_files(self) -> Iterator[CorruptCheckpointError]:
        """Read every file that holds no tensor data, and give what is wrong with each."""
        for name in self.manifest.files:
            if not name.endswith(".safetensors"):
                try:
                    self.small(name)
                except CorruptCheckpointError as error:
                    yield error


def check_native_form(slot: str, value: Any, file: Path) -> Any:
    """The values of a slot, where they are of its form. Raises ``CorruptCheckpointError`` naming the file."""
    _check_form(value, _FORMS.get(slot.partition("/")[0], Any), file)
    return value


def _check_form(tree: Any, form: Any, file: Path) -> None:
    try:
        msgspec.convert(tree, form)
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"{file} is damaged: {error}") from error


def _matches(data: bytes, record: FileRecord) -> bool:
    return len(data) == record.size and f"{blocks.crc64(data):016x}" == record.crc64nvme
