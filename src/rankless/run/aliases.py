"""Aliases: further names of checkpoints that users give, such as ``production``.

An alias is a hidden file ``.NAME.alias`` in the run directory with the tag and the id of a checkpoint. It is no part of
the format: a run directory without it is complete. Retention does not remove a checkpoint that has an alias.

``rankless.set_alias`` and ``rankless alias`` write them, in any process. Retention asks :func:`has_alias` on rank 0
before it removes anything, so an alias that cannot be read must stay an error there. Names and contents are on disks.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.errors import CorruptCheckpointError, NoCheckpointError, RanklessError, StorageError
from rankless.ondisk.validation import check_tag, is_tag
from rankless.process.prepared_types import prepared
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.storage.store import store_of

_NAME = re.compile(r"\.(?P<alias>[^.].*)\.alias")

#: The most bytes of the file of an alias.
_MAX_BYTES = 10_000


@prepared
class Alias(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that an alias means."""

    tag: str
    id: str


def write_alias(path: Path, name: str, info: CheckpointInfo) -> None:
    """Make ``name`` an alias of a checkpoint in a run directory, also if it was one of another."""
    store_of(path).replace_small(_alias_path(path, name), msgspec.json.encode(Alias(info.tag, info.id)))


def delete_alias(path: Path, name: str) -> None:
    """Remove an alias. Raises ``NoCheckpointError`` if there is none of this name."""
    if read_alias(path, name) is None:
        raise NoCheckpointError(f"there is no alias {name!r} in {path}")
    store_of(path).remove_file(_alias_path(path, name))


def read_alias(path: Path, name: str) -> Alias | None:
    """Return an alias with its meaning, or ``None`` if no alias has this name. Raises ``CorruptCheckpointError``."""
    file = _alias_path(path, name)
    try:
        store_of(file).check_regular(file, within=(path,))
        return msgspec.json.decode(store_of(file).read_small(file, _MAX_BYTES), type=Alias)
    except msgspec.DecodeError as error:
        raise CorruptCheckpointError(f"{file} is corrupt: set the alias {name!r} again, or remove the file") from error
    except StorageError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            raise
        return None


def list_aliases(path: Path) -> dict[str, Alias]:
    """Return the aliases in a run directory that can be read, by name."""
    aliases = {}
    for name in _alias_names(store_of(path).list_names(path)):
        with suppress(RanklessError):  # a load by this name explains the problem
            if (alias := read_alias(path, name)) is not None:
                aliases[name] = alias
    return aliases


def means(alias: Alias, info: CheckpointInfo) -> bool:
    """Return whether an alias means a checkpoint, also if that is abandoned and has got another tag since."""
    return alias.id == info.id and info.is_called(alias.tag)


def find_meant(alias: Alias, infos: Iterable[CheckpointInfo]) -> str | None:
    """Return the present tag of the checkpoint that an alias means; ``None`` if it was removed or replaced."""
    tags = [info.tag for info in infos if means(alias, info)]
    return alias.tag if alias.tag in tags else next(iter(tags), None)


def list_meant(path: Path, infos: Iterable[CheckpointInfo]) -> dict[str, str]:
    """Return the tags that the aliases in a run directory mean; of a checkpoint that was removed, its old tag."""
    known = list(infos)
    return {name: find_meant(alias, known) or alias.tag for name, alias in list_aliases(path).items()}


def has_alias(info: CheckpointInfo, names: Collection[str]) -> bool:
    """Return whether a checkpoint has an alias. ``names`` are those in its run directory.

    Raises ``CorruptCheckpointError`` or ``StorageError`` if an alias cannot be read, as it may be of this checkpoint.
    """
    aliases = [read_alias(info.path.parent, name) for name in _alias_names(names)]
    return any(means(alias, info) for alias in aliases if alias is not None)


def _alias_names(names: Collection[str]) -> list[str]:
    matches = (_NAME.fullmatch(name) for name in sorted(names))
    return [match["alias"] for match in matches if match and is_tag(match["alias"])]


def _alias_path(path: Path, name: str) -> Path:
    return path / f".{check_tag(name)}.alias"
