"""What a run's folder holds, also while other jobs save into it and remove: where there is always one, one is seen.

Names are listed in one step. Where one of them goes before it is looked at, the folder is listed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from holdfast.errors import CheckpointReplacedError, CorruptCheckpointError, FormatError, HoldfastError, StorageError
from holdfast.formats.native import claims_to_be_native, read_manifest
from holdfast.ondisk.hidden_names import HiddenName, parse_hidden_name
from holdfast.ondisk.manifest import NAME, Manifest
from holdfast.storage import posix
from holdfast.storage.file_memo import FileMemo, sign_file


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a run. ``time`` is in seconds since 1970, ``nbytes`` the size of the files its manifest names.

    ``tag`` is what it is called, ``saved_as`` the tag it was saved under: another where it was renamed, or is a copy.
    ``status`` is ``"complete"``, ``"damaged"`` where the manifest is, or ``"unreadable"`` where it is of a newer format
    or may not be read. The other fields are then empty but for ``problem``, which says why.
    """

    tag: str
    path: Path
    status: Literal["complete", "damaged", "unreadable"] = "complete"
    step: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    sequence: int = 0
    time: float = 0.0
    nbytes: int = 0
    problem: str = ""
    run: str = ""
    id: str = ""
    saved_as: str = ""

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> CheckpointInfo:
        """The checkpoint in a folder, from its manifest. The folder's name is the tag, also after a rename."""
        return cls(
            tag=path.name,
            path=path,
            step=manifest.step,
            metrics=dict(manifest.metrics),
            sequence=manifest.sequence,
            time=manifest.time,
            nbytes=manifest.nbytes,
            run=manifest.run,
            id=manifest.id,
            saved_as=manifest.tag,
        )

    @property
    def age(self) -> tuple[int, float, str]:
        """Sorts checkpoints from the oldest to the latest; never by a file's time, so that copies stay in order."""
        return self.sequence, self.time, self.id


#: What a folder holds, by its tag; nothing where that is no checkpoint.
Look = Callable[[Path, str], CheckpointInfo | None]


#: Checkpoints whose manifests were read, for all folders: with thousands of them, each save would read each again.
_MEMO: FileMemo[CheckpointInfo] = FileMemo(2**15)

#: The most metrics of a checkpoint that is remembered.
_METRICS = 64


def scan_run(path: Path, look: Look) -> list[CheckpointInfo]:
    """The checkpoints in a run's folder, oldest first; those that cannot be read come before all others.

    They are shared with the next survey: who hands them on copies what could be changed.
    """
    looked: dict[str, CheckpointInfo | None] = {}
    while True:
        there = _tags(posix.list_names(path))
        for name in sorted(there.keys() - looked.keys()):
            with suppress(CheckpointReplacedError):
                looked[name] = _recall(path, name, there[name]) or look(path / name, there[name])
        if there.keys() <= looked.keys():
            found = [info for name in there if (info := looked[name]) is not None]
            return sorted(found, key=lambda info: (info.status == "complete", *info.age, info.tag))


def _recall(path: Path, name: str, tag: str) -> CheckpointInfo | None:
    info = _MEMO.recall(f"{path}/{name}/{NAME}")
    return info if info is None or info.tag == tag else replace(info, tag=tag)


def _tags(names: Collection[str]) -> dict[str, str]:
    """The folders that may be checkpoints, and their tags."""
    named = {name: name for name in names if not name.startswith(".")}
    return named | {hidden.name: hidden.tag for hidden in displaced_checkpoint(names)}


def displaced_checkpoint(names: Collection[str]) -> Iterator[HiddenName]:
    """Of the names in a folder, checkpoints put aside for another which did not get their name: it is there still.

    They are what is there under that name. Only where the file system cannot exchange two names is there such a moment,
    and one that lasts only where the save died in it.
    """
    for name in names:
        hidden = parse_hidden_name(name)
        if hidden is None or hidden.state != "replaced" or hidden.tag in names:
            continue
        if hidden.now("partial").name in names:
            yield hidden


def read_info_strictly(folder: Path, tag: str) -> CheckpointInfo | None:
    """What a folder holds. Raises ``CheckpointReplacedError``, and ``StorageError`` where the file system does not tell."""
    if posix.is_directory_without(folder, NAME):
        return None
    file = str(folder / NAME)
    signature = sign_file(file)
    try:
        info = replace(CheckpointInfo.of(folder, read_manifest(folder)), tag=tag)
    except CorruptCheckpointError as error:
        return CheckpointInfo(tag, folder, "damaged", problem=_text(error))
    except FormatError as error:
        return CheckpointInfo(tag, folder, "unreadable", problem=_text(error))
    if len(info.metrics) <= _METRICS:
        _MEMO.remember(file, signature, info)
    return info


def is_own_checkpoint(info: CheckpointInfo) -> bool:
    """Whether it is a checkpoint of holdfast, as far as one can tell; others may have a ``manifest.json``, too."""
    return info.status == "complete" or claims_to_be_native(info.path)


def read_info(folder: Path, tag: str) -> CheckpointInfo | None:
    """The same, where what the file system refuses is only unreadable."""
    try:
        return read_info_strictly(folder, tag)
    except StorageError as error:
        return CheckpointInfo(tag, folder, "unreadable", problem=_text(error))


def _text(error: HoldfastError) -> str:
    return str(error.args[-1])
