"""DeepSpeed's folders of checkpoints, with a file that names the newest tag, and the folders of the tags.

``formats/registry.py`` names :func:`is_deepspeed`: the detection of formats asks it on each rank.
"""

from __future__ import annotations

from pathlib import Path

from rankless.deepspeed.reader.deepspeed_file_names import LATEST, has_rank_files, is_rank_file
from rankless.errors import CorruptCheckpointError, NoCheckpointError, UnsafeNameError
from rankless.formats.contained_paths import check_contained
from rankless.ondisk.validation import is_tag
from rankless.storage.store import store_of

#: The most bytes of a file that names a tag, and how many tags are listed in a message.
_LIMIT, _SHOWN = 4096, 8


def is_deepspeed(path: Path) -> bool:
    """Return whether a path is a tag's folder, a folder of tags, or a file of one rank."""
    if is_rank_file(path):
        return store_of(path).is_file(path)
    names = store_of(path).list_names(path)
    # Other systems have files with the name ``latest``, too.
    return has_rank_files(names) or (not names.isdisjoint(LATEST) and bool(list_tags(path)))


def _is_tag_folder(folder: Path) -> bool:
    return has_rank_files(store_of(folder).list_names(folder))


def list_tags(folder: Path) -> list[str]:
    """Return the names of the tags' folders in a folder."""
    return [tag.name for tag in store_of(folder).list_subdirectories(folder) if _is_tag_folder(tag)]


def find_tag(path: Path) -> Path:
    """Return the folder of the newest tag, or ``path`` if it is a tag's folder itself.

    Raises ``NoCheckpointError`` if the newest tag is missing.
    """
    if _is_tag_folder(path):
        return path
    names = store_of(path).list_names(path)
    latest = next(path / name for name in LATEST if name in names)
    check_contained(latest, path)
    tag = _read_tag(latest)
    if not _is_tag_folder(path / tag):
        tags = list_tags(path)
        listed = ", ".join(tags[:_SHOWN]) + (" …" if len(tags) > _SHOWN else "")
        raise NoCheckpointError(
            f"{latest} names the tag {tag!r}, which has no files in {path}: its save did not finish, or it was "
            f"removed. Open the folder of another tag ({listed})"
        )
    return path / tag


def _read_tag(latest: Path) -> str:
    raw = store_of(latest).read_small(latest, _LIMIT)
    try:
        tag = raw.decode().strip()
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{latest} must hold the name of a tag; it is not UTF-8") from error
    if not is_tag(tag):
        raise UnsafeNameError(f"{latest} must hold the name of a folder next to it; it holds {tag[:80]!r}")
    return tag
