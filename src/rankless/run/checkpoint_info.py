"""The description of one checkpoint of a run, and how it is read from a manifest, wherever the run is.

The layouts of runs (:mod:`rankless.run.run_store`) list checkpoints with it. A process remembers the manifests: a save
must not read thousands of them.

For each of them it asks for the version of the file only, one ``stat``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import msgspec

from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    OutsideLinkError,
    RanklessError,
    StorageError,
)
from rankless.formats.native import claims_to_be_native, read_manifest
from rankless.ondisk.manifest import NAME, Manifest
from rankless.run.added_metrics import list_metric_files, read_added_metrics, select_metrics
from rankless.run.folder_names import is_abandoned_tag, is_called
from rankless.run.history import Entry
from rankless.storage import posix
from rankless.storage.file_memo import FileMemo, sign_file
from rankless.storage.filesystem_kind import is_local
from rankless.storage.store import store_of

_Status = Literal["complete", "damaged", "unreadable"]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint of a run. If it cannot be read, only ``tag``, ``path``, ``status`` and ``problem`` are set.

    Attributes:
        tag: The name of the checkpoint.
        path: The directory of the checkpoint.
        status: ``"complete"``, ``"damaged"`` if the manifest is corrupt, or ``"unreadable"`` if the format is newer or
            the file system refuses access.
        step: The training step, if one was saved.
        metrics: The metrics by name, with those that were added after the save; ``None`` for values that are not
            finite.
        sequence: The position in the order of all saves into the run directory.
        time: The time of the save in seconds since 1970.
        nbytes: The total size in bytes of the files that the manifest lists.
        problem: The reason why the checkpoint cannot be read.
        run: The id of the training run that saved the checkpoint.
        id: The id of the checkpoint.
        saved_as: The tag that it was saved with. It differs from ``tag`` if the checkpoint was renamed or copied.
        world_size: The number of ranks that saved it; 0 if that is unknown, as after a conversion.
        incarnation: The number of the job that saved it, among all jobs of the run directory; 0 if that is unknown.
        is_current: Whether the run goes on from it or from a later one. It is abandoned if the run went back to an
            older checkpoint since, or if another job had continued the run when it was saved.
    """

    tag: str
    path: Path
    status: _Status = "complete"
    step: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    sequence: int = 0
    time: float = 0.0
    nbytes: int = 0
    problem: str = ""
    run: str = ""
    id: str = ""
    saved_as: str = ""
    world_size: int = 0
    incarnation: int = 0
    is_current: bool = True

    @classmethod
    def of(cls, path: Path, manifest: Manifest, tag: str | None = None) -> CheckpointInfo:
        """Create the information from a manifest. The tag is by default the directory's name, also after a rename."""
        return cls(
            tag=path.name if tag is None else tag,
            path=path,
            step=manifest.step,
            metrics=dict(manifest.metrics),
            sequence=manifest.sequence,
            time=manifest.time,
            nbytes=manifest.nbytes,
            run=manifest.run,
            id=manifest.id,
            saved_as=manifest.tag,
            world_size=manifest.provenance.world_size,
            incarnation=manifest.incarnation,
        )

    def encode(self) -> bytes:
        """Encode all but the path, for a message to ranks that know it. A save calls it on rank 0 when it commits."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "path"}
        return msgspec.msgpack.encode(values)

    @classmethod
    def decode(cls, path: Path, raw: bytes) -> CheckpointInfo:
        """Decode bytes that :meth:`encode` has returned on another rank."""
        return cls(path=path, **msgspec.msgpack.decode(raw))

    @property
    def is_copy(self) -> bool:
        """True if somebody has copied or renamed it: no policy removes it. rankless renames abandoned ones."""
        return self.tag != self.saved_as and not is_abandoned_tag(self.tag, self.saved_as, self.incarnation)

    def is_called(self, name: str) -> bool:
        """Return whether the checkpoint has this name, or had it until it was abandoned."""
        return is_called(name, self.tag, self.saved_as, self.incarnation)

    @property
    def age(self) -> tuple[int, float, str]:
        """The key that sorts checkpoints from the oldest to the latest. It has no file times, so copies stay sorted."""
        return self.sequence, self.time, self.id


#: Cached checkpoints of all directories. Without it, each save would read all manifests, possibly thousands.
_MEMO: FileMemo[CheckpointInfo] = FileMemo(2**15)


#: The maximum number of metrics of a checkpoint that is cached.
_MAX_CACHED_METRICS = 64


class RunScan(msgspec.Struct, frozen=True):
    """The checkpoints of a run directory, oldest first, and its history.

    ``highest_entry`` is the highest number in the history, also of a corrupt entry. ``unnamed`` are the checkpoints in
    an object store that no pointer names.
    """

    checkpoints: list[CheckpointInfo]
    history: Entry
    highest_entry: int = 0
    unnamed: list[CheckpointInfo] = []


def sort_infos(infos: list[CheckpointInfo], history: Entry) -> list[CheckpointInfo]:
    """Return the checkpoints from the oldest to the latest, abandoned ones before all current ones."""
    complete = [info for info in infos if info.status == "complete"]
    abandoned = {info.id for info in complete if not history.is_current(info)}
    known = [replace(info, is_current=False) if info.id in abandoned else info for info in infos]
    by_age = sorted(known, key=lambda info: (info.status == "complete", info.is_current, *info.age, info.tag))
    latest = history.find_latest([info for info in by_age if info.status == "complete"])
    return by_age if latest is None else [*(info for info in by_age if info is not latest), latest]


def with_added_metrics(path: Path, names: Collection[str], infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the checkpoints with the metrics that were added to them. ``names`` are all names in the run."""
    if not (files := list_metric_files(names)):
        return infos
    added = read_added_metrics(path, files)
    metrics_of = {info.path: select_metrics(added.get(info.id, {}), info.is_called) for info in infos}
    return [
        replace(info, metrics=info.metrics | metrics_of[info.path]) if metrics_of[info.path] else info for info in infos
    ]


def recall_info(path: Path, name: str, tag: str) -> CheckpointInfo | None:
    """Return the checkpoint in a folder of a directory if its manifest is remembered, and has not changed."""
    info = _MEMO.recall(f"{path}/{name}/{NAME}")
    return info if info is None or info.tag == tag else replace(info, tag=tag)


def read_info_strictly(folder: Path, tag: str) -> CheckpointInfo | None:
    """Return the checkpoint in a directory, or ``None`` if there is none.

    Raises ``CheckpointReplacedError`` if it is removed meanwhile, and ``StorageError`` if it cannot be read.
    """
    if _is_other_directory(folder):
        return None
    file = str(folder / NAME)
    signature = sign_file(file)
    try:
        info = replace(CheckpointInfo.of(folder, read_manifest(folder)), tag=tag)
    except CorruptCheckpointError as error:
        status: _Status = "unreadable" if isinstance(error, OutsideLinkError) else "damaged"
        return CheckpointInfo(tag, folder, status, problem=error_text(error))
    except FormatError as error:
        return CheckpointInfo(tag, folder, "unreadable", problem=error_text(error))
    if len(info.metrics) <= _MAX_CACHED_METRICS:
        _MEMO.remember(file, signature, info)
    return info


def _is_other_directory(folder: Path) -> bool:
    """Return whether there is a directory that is no checkpoint.

    A client of a network file system may take the name for a checkpoint that was replaced and is partly deleted. Then
    it asks again.
    """
    store = store_of(folder)
    if store.is_remote:
        return not store.is_file(folder / NAME) and NAME not in store.list_names(folder)  # a replica may lag
    if not posix.is_directory_without(folder, NAME):
        return False
    if is_local(folder.parent):
        return True
    posix.list_names(folder.parent)
    return posix.is_directory_without(folder, NAME)


def is_rankless_checkpoint(info: CheckpointInfo) -> bool:
    """Return whether ``info`` is a rankless checkpoint, and not a ``manifest.json`` of another program."""
    return info.status == "complete" or claims_to_be_native(info.path)


def read_info(folder: Path, tag: str) -> CheckpointInfo | None:
    """Return the checkpoint like :func:`read_info_strictly`, with a ``StorageError`` as status ``"unreadable"``."""
    try:
        return read_info_strictly(folder, tag)
    except StorageError as error:
        return CheckpointInfo(tag, folder, "unreadable", problem=error_text(error))


def error_text(error: RanklessError) -> str:
    """Return the message of an error, without the number of a ``StorageError``."""
    return str(error.args[-1])
