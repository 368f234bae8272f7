"""A reader of rankless's own format, version 1: see ``docs/format.md``.

Every rank of a load opens the checkpoint with :class:`NativeReader` in the vote "reading the metadata"; rank 0,
clean-ups and commands read manifests alone. The manifest is read first, and each file is compared with it. If a file
cannot be read for a moment, the error must be a ``StorageError``, and never "corrupt" or "missing".
"""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
    StorageError,
)
from rankless.formats.reader import (
    CheckpointValues,
    FileExtent,
    UnreadTensorNote,
    detect_replacement,
    missing_as_corrupt,
)
from rankless.formats.safetensors import SafetensorsFile, SafetensorsFiles
from rankless.ondisk import block_crcs, manifest, values
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.ondisk.strict_json import parse_json
from rankless.ondisk.value_files import restore_order
from rankless.ondisk.values import ArrayCodec
from rankless.process.prepared_types import prepared
from rankless.storage.filesystem_kind import forget_names
from rankless.storage.second_read import read_twice_if_wrong
from rankless.storage.store import store_of

#: The names of the model and the optimizer; a name may follow after a slash: ``model/ema``.
MODEL, OPTIMIZER = "model", "optimizer"

#: The file of the values that all ranks share, and the file of the values of each rank.
STATE, RANKS = values.SHARED_FILE, values.RANKS_FILE


#: Seconds after which a manifest that is missing in an object store is looked for again.
_ABSENCE_SECONDS = 0.1

#: The most bytes of a file of values that are kept between its check and its use.
_MAX_KEPT_BYTES = 2**20


class _Group(msgspec.Struct):
    name: str | None = msgspec.field(name="class")
    number: int
    params: list[str]
    settings: dict[str, Any]
    state: dict[str, dict[str, Any]]


@prepared
class _Optimizer(msgspec.Struct):
    groups: list[_Group]


@prepared
class _Scheduler(msgspec.Struct):
    name: str | None = msgspec.field(name="class")
    state: Any


#: The expected types of the values in ``state.json``, by component; a name may follow after a slash: ``model/ema``.
_TYPES: dict[str, Any] = {
    "model": dict[str, Any],
    "optimizer": _Optimizer,
    "scheduler": _Scheduler | list[_Scheduler],
    "stateful": dict[str, Any],
}


@prepared
class _PerRank(msgspec.Struct):
    """The expected type of one rank's entry in ``ranks.json``."""

    rng: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def is_native(path: Path) -> bool:
    """Return whether a folder has a manifest."""
    return store_of(path).is_file(path / manifest.NAME)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises ``CheckpointReplacedError`` if there is none, or not any more.

    Rank 0 calls it while it selects a checkpoint and before it replaces one.
    """
    file = path / manifest.NAME

    def read() -> Manifest:
        store_of(file).check_regular(file, within=(path,))
        return manifest.decode_manifest(_read_again_if_missing(file), str(file))

    try:
        return read_twice_if_wrong(file, read)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise CheckpointReplacedError(f"{path} was removed while it was being opened") from error


def _read_again_if_missing(file: Path) -> bytes:
    """Return the bytes of a file. One replica of an object store may lag: one answer that it is missing is no proof."""
    try:
        return store_of(file).read_small(file)
    except StorageError as error:
        if error.errno != errno.ENOENT or not store_of(file).is_remote:
            raise
    time.sleep(_ABSENCE_SECONDS)
    return store_of(file).read_small(file)


def claims_to_be_native(path: Path) -> bool:
    """Return whether a folder with an unreadable manifest looks like a rankless checkpoint.

    It does if the manifest names the format, or if both ``state.json`` and ``ranks.json`` are there.
    """
    with suppress(RanklessError):
        table = parse_json(store_of(path).read_small(path / manifest.NAME), manifest.NAME)
        if isinstance(table, dict) and table.get("format") == "rankless":
            return True
    return store_of(path).is_file(path / STATE) and store_of(path).is_file(path / RANKS)


def holds_checkpoint(path: Path, identity: str) -> bool:
    """Return whether a folder holds the checkpoint with the id ``identity``; also if its manifest cannot be read.

    Rank 0 and clean-ups ask before and after they rename or remove a folder. In doubt the answer is true.
    """
    forget_names(path.parent)
    try:
        return read_manifest(path).id == identity
    except NoCheckpointError:
        return False
    except RanklessError:
        return True


class NativeReader:
    """A reader of a rankless checkpoint's folder."""

    format = "rankless"
    unread: Sequence[UnreadTensorNote] = ()

    def __init__(
        self,
        path: Path,
        unopened: list[CorruptCheckpointError] | None = None,
        *,
        keys: Mapping[str, str] | None = None,
        is_lazy: bool = False,
    ) -> None:
        """Open a checkpoint.

        With ``unopened``, the error of each tensor file that cannot be opened is appended to this list instead of
        raised, and its tensors are left out. If there are several models, ``{"model": "gen"}`` selects one, which then
        is the model of the checkpoint. Other ``keys`` are for other formats. ``is_lazy``: only the manifest is read
        now, and the headers of the files when a tensor is asked for.
        """
        self.path, self._unopened, self._keys = path, unopened, keys or {}
        #: The values that :meth:`check_files` has read, for :meth:`read_values`, which comes next in a load.
        self._checked_values: dict[str, bytes] = {}
        self.manifest = self._read_manifest()
        if not is_lazy:
            _ = self._groups

    @cached_property
    def _opened(self) -> tuple[str, Mapping[str, SafetensorsFiles]]:
        """The group of the selected model, and the files of each group of tensors, also of other models."""
        with detect_replacement(self):
            opened = {group: SafetensorsFiles(files) for group, files in self._open_data().items()}
        return _find_model(self.path, opened, self._keys.get(MODEL)), opened

    @cached_property
    def _groups(self) -> Mapping[str, SafetensorsFiles]:
        _, opened = self._opened
        return {name: files for group, files in opened.items() if (name := self._name_group(group))}

    @cached_property
    def groups(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """See :class:`rankless.formats.reader.Reader`."""
        return {group: files.tensors for group, files in self._groups.items()}

    @cached_property
    def tied(self) -> Mapping[str, Mapping[str, str]]:
        """See :class:`rankless.formats.reader.Reader`."""
        return {group: files.tied for group, files in self._groups.items()}

    def _name_group(self, group: str) -> str:
        """Return the name of a group; nothing for a model that was not selected."""
        model, _ = self._opened
        if model == MODEL or group.partition("/")[0] != MODEL:
            return group
        return MODEL if group == model else ""

    @property
    def model_folder(self) -> Path:
        """The folder of the model, with its configuration."""
        return self.path / self._opened[0]

    @property
    def fingerprint(self) -> str:
        """The checkpoint's id and the CRC of its manifest."""
        return f"{self.manifest.id}-{block_crcs.crc64(manifest.encode_manifest(self.manifest)):016x}"

    def _open_data(self) -> dict[str, list[SafetensorsFile]]:
        names = [name for name in self.manifest.files if name.endswith(".safetensors")]
        files_by_group: dict[str, list[SafetensorsFile]] = {}
        for name, opened in zip(names, store_of(self.path).map_files(self._try_to_open, names), strict=True):
            folder, _, file = name.rpartition("/")
            if isinstance(opened, SafetensorsFile):
                files_by_group.setdefault(folder or file.split(".")[0].split("-")[0], []).append(opened)
            elif self._unopened is None:
                raise opened
            else:
                self._unopened.append(opened)
        return files_by_group

    def _try_to_open(self, name: str) -> SafetensorsFile | CorruptCheckpointError:
        try:
            return self._open_file(name, self.manifest.files[name])
        except CorruptCheckpointError as error:
            return error

    def _read_manifest(self) -> Manifest:
        return read_manifest(self.path)

    def _open_file(self, name: str, record: FileRecord) -> SafetensorsFile:
        """Read the header of a data file. Raises ``CorruptCheckpointError``."""

        def read() -> SafetensorsFile:
            with missing_as_corrupt(self.path / name):
                return SafetensorsFile.open(self._existing_file(name), record)

        return read_twice_if_wrong(self.path / name, read)

    def _read_file(self, name: str) -> bytes:
        """Read a file without tensor data. Raises ``CorruptCheckpointError`` if it is missing."""
        with missing_as_corrupt(self.path / name):
            return store_of(self.path).read_small(self._existing_file(name), values.VALUES_LIMIT)

    def _existing_file(self, name: str) -> Path:
        path = self.path / name
        with missing_as_corrupt(path):
            store_of(path).check_regular(path, within=(self.path,))
        return path

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`rankless.formats.reader.Reader`."""
        return [self.path / name for name in self.manifest.files]

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        return [self._groups[group].file_of(name).tensor_extent(name, start, stop)]

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._groups[group].crcs[name]

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """See :class:`rankless.formats.reader.Reader`."""
        shared = self._checked_values.pop(STATE, b"") or self.read_small_file(STATE)
        ranks = self._checked_values.pop(RANKS, b"") or self.read_small_file(RANKS)
        decoded = decode_values(shared, ranks, self.path, shared_codec)
        rank_values = None
        if rank < decoded.world_size:
            rank_values = values.decode_value(decoded.ranks[rank], rank_codec, str(self.path / RANKS))
        _check_type({} if rank_values is None else rank_values, _PerRank, self.path / RANKS)
        tree = {named: value for name, value in decoded.shared.items() if (named := self._name_group(name))}
        return CheckpointValues(tree, rank_values, decoded.world_size, decoded.ranks)

    def read_small_file(self, name: str) -> bytes:
        """Return the bytes of a file without tensor data, after its size and CRC are verified."""
        record = self.manifest.files.get(name)
        if record is None:
            raise CorruptCheckpointError(
                f"the manifest of {self.path} does not name {name}, which every checkpoint has"
            )

        def read() -> bytes:
            data = self._read_file(name)
            if not _matches_record(data, record):
                raise CorruptCheckpointError(f"{self.path / name} does not match the manifest: the file is corrupt")
            return data

        return read_twice_if_wrong(self.path / name, read)

    def is_current(self) -> bool:
        """See :class:`rankless.formats.reader.Reader`."""
        return holds_checkpoint(self.path, self.manifest.id)

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`."""
        for error in self.find_corrupt_files():
            raise error

    def find_corrupt_files(self) -> Iterator[CorruptCheckpointError]:
        """Read every file that holds no tensor data, and yield an error for each that is missing or corrupt."""
        for name in self.manifest.files:
            if not name.endswith(".safetensors"):
                try:
                    data = self.read_small_file(name)
                    if name in {STATE, RANKS} and len(data) <= _MAX_KEPT_BYTES:
                        self._checked_values[name] = data
                except CorruptCheckpointError as error:
                    yield error


def decode_values(shared: bytes, ranks: bytes, folder: Path, shared_codec: ArrayCodec) -> CheckpointValues:
    """Decode the shared values of a checkpoint, and parse the per-rank values, from its files in ``folder``.

    Readers call it on each rank, and the receivers of a live copy.
    """
    tree = values.load_values(shared, shared_codec, str(folder / STATE))
    table = parse_json(ranks, str(folder / RANKS))
    per_rank = table.get("ranks") if isinstance(table, dict) else None
    if not isinstance(tree, dict) or not isinstance(per_rank, list):
        raise CorruptCheckpointError(f"{folder}: {STATE} must be a JSON object, and {RANKS} must have a list 'ranks'")
    for name, value in tree.items():
        check_native_form(name, value, folder / STATE)
        if name.partition("/")[0] == OPTIMIZER:
            value["groups"] = _in_saved_order(value["groups"], name, table, folder)
    return CheckpointValues(tree, None, len(per_rank), per_rank)


def _in_saved_order(
    groups: list[dict[str, Any]], slot: str, table: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    orders = table.get("order", {})
    try:
        return restore_order(groups, orders.get(slot) if isinstance(orders, dict) else None)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder / RANKS}: {error}") from error


def _find_model(path: Path, groups: Collection[str], key: str | None) -> str:
    """Return the group of the selected model. Raises ``InvalidArgumentError`` if there are several, but not this."""
    several = sorted(group for group in groups if group.startswith(f"{MODEL}/"))
    if key is None or not several:
        return MODEL
    names = [group.partition("/")[2] for group in several]
    name = key.removeprefix(f"{MODEL}/")
    if name not in names:
        raise InvalidArgumentError(f"{path} has no model {key!r}: it has {', '.join(names)}")
    return f"{MODEL}/{name}"


def check_native_form(slot: str, value: Any, file: Path) -> Any:
    """Return the values of a slot after their types are checked. Raises ``CorruptCheckpointError`` naming the file."""
    _check_type(value, _TYPES.get(slot.partition("/")[0], Any), file)
    return value


def _check_type(tree: Any, expected: Any, file: Path) -> None:
    try:
        msgspec.convert(tree, expected)
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"{file} is corrupt: {error}") from error


def _matches_record(data: bytes, record: FileRecord) -> bool:
    return len(data) == record.size and f"{block_crcs.crc64(data):016x}" == record.crc64nvme
