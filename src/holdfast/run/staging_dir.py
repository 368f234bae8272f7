"""The hidden folder that something is written into, beside the path whose name it gets when it is complete."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from holdfast.errors import InvalidArgumentError, StorageError, TagExistsError
from holdfast.formats.native import is_native
from holdfast.ondisk.hidden_names import HiddenName
from holdfast.run.catalog import is_run_directory
from holdfast.run.cleanup import clean_up, finish_interrupted_replace
from holdfast.run.scan import displaced_checkpoint, read_info
from holdfast.storage import directories, posix


def staging_path(final: Path) -> Path:
    """A name for the draft of what will be ``final``; another one each time."""
    return final.parent / HiddenName(final.name, secrets.token_hex(8), secrets.token_hex(8), "partial").name


def check_destination(final: Path) -> None:
    """Check that something new can be written at a path.

    Raises ``TagExistsError`` if the name is taken, and ``InvalidArgumentError`` inside of a checkpoint of ours: its
    manifest names all that is in it.
    """
    if posix.path_exists(final):
        raise TagExistsError(f"there is {final} already; choose another path, or remove it first")
    for folder in final.resolve().parents:
        info = read_info(folder, folder.name) if is_native(folder) else None
        if info is not None and info.status == "complete" and not is_run_directory(folder):
            raise InvalidArgumentError(f"{final} lies in the checkpoint {folder}: choose a path outside of it")


def new_staging_path(final: Path) -> Path:
    """Return a name for a draft, as :func:`staging_path`, and remove those of writers to the same path that died."""
    clean_up(final.parent, tag=final.name)
    return staging_path(final)


@contextmanager
def staging_directory(final: Path) -> Iterator[Path]:
    """A draft to write into, which is ``final`` at the end; on failure nothing is left. Its lock tells that it lives.

    Raises ``TagExistsError`` where the name was taken meanwhile.
    """
    posix.make_durable_directory(final.parent)
    draft = new_staging_path(final)
    with closing(directories.create_locked(draft)):
        try:
            yield draft
            directories.rename_noreplace(draft, final)
        except BaseException:
            with suppress(StorageError):
                directories.remove_tree(draft)
            raise


def remove_staging(draft: Path) -> None:
    """Remove the draft of a save that failed; what cannot be removed stays hidden. Its lock is let go of before.

    It stays, too, where it tells that what the save was to replace has lost its name.
    """
    with suppress(StorageError):
        finish_interrupted_replace(draft.parent)
        if draft.name not in {one.now("partial").name for one in displaced_checkpoint(posix.list_names(draft.parent))}:
            directories.remove_tree(draft)
