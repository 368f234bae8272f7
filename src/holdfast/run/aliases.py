"""Aliases: further names of checkpoints that users give, such as ``production``.

An alias is a hidden file ``.NAME.alias`` in the run directory with the tag and the id of a checkpoint. It is no part of
the format: a run directory without it is complete. Retention does not remove a checkpoint that has an alias.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Collection
from pathlib import Path

import msgspec

from holdfast.errors import CorruptCheckpointError, InvalidArgumentError, NoCheckpointError, StorageError
from holdfast.ondisk.validation import check_tag
from holdfast.run.scan import CheckpointInfo
from holdfast.storage.directories import replace_file
from holdfast.storage.posix import list_names, read_small, remove_file, write_small

_NAME = re.compile(r"\.(?P<alias>[^.].*)\.alias")

#: The most bytes of the file of an alias.
_MAX_BYTES = 10_000


class Alias(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that an alias means."""

    tag: str
    id: str


def write_alias(path: Path, name: str, info: CheckpointInfo) -> None:
    """Make ``name`` an alias of a checkpoint in a run directory, also if it was one of another."""
    file = _alias_path(path, name)
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    write_small(draft, msgspec.json.encode(Alias(info.tag, info.id)))
    replace_file(draft, file)


def delete_alias(path: Path, name: str) -> None:
    """Remove an alias. Raises ``NoCheckpointError`` if there is none of this name."""
    if read_alias(path, name) is None:
        raise NoCheckpointError(f"there is no alias {name!r} in {path}")
    remove_file(_alias_path(path, name))


def read_alias(path: Path, name: str) -> Alias | None:
    """Return what an alias means, or ``None`` if there is none of this name. Raises ``CorruptCheckpointError``."""
    file = _alias_path(path, name)
    try:
        return msgspec.json.decode(read_small(file, _MAX_BYTES), type=Alias)
    except msgspec.DecodeError as error:
        raise CorruptCheckpointError(f"{file} is corrupt: set the alias {name!r} again, or remove the file") from error
    except StorageError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            raise
        return None


def list_aliases(path: Path) -> dict[str, Alias]:
    """Return the aliases in a run directory that can be read, by name."""
    return _read_aliases(path, list_names(path))


def has_alias(info: CheckpointInfo, names: Collection[str]) -> bool:
    """Return whether a checkpoint has an alias. ``names`` are those in its run directory."""
    return Alias(info.tag, info.id) in _read_aliases(info.path.parent, names).values()


def _read_aliases(path: Path, names: Collection[str]) -> dict[str, Alias]:
    aliases = {}
    for match in filter(None, map(_NAME.fullmatch, sorted(names))):
        try:
            alias = read_alias(path, match["alias"])
        except (CorruptCheckpointError, InvalidArgumentError):  # a load by this name says what is wrong
            continue
        if alias is not None:
            aliases[match["alias"]] = alias
    return aliases


def _alias_path(path: Path, name: str) -> Path:
    return path / f".{check_tag(name)}.alias"
