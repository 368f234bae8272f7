"""Staging directories: hidden directories next to the final path, which are renamed to it when they are complete."""

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
from holdfast.run.scan import displaced_checkpoints, read_info
from holdfast.storage import directories, posix


def staging_path(final: Path) -> Path:
    """Return a new random path of a staging directory for ``final``."""
    return final.parent / HiddenName(final.name, secrets.token_hex(8), secrets.token_hex(8), "partial").name


def check_destination(final: Path) -> None:
    """Check that something new can be written to a path.

    Raises ``TagExistsError`` if the path exists, and ``InvalidArgumentError`` if it is inside a holdfast checkpoint,
    whose manifest lists all files in it.
    """
    if posix.path_exists(final):
        raise TagExistsError(f"{final} exists already; choose another path, or remove it first")
    for folder in final.resolve().parents:
        info = read_info(folder, folder.name) if is_native(folder) else None
        if info is not None and info.status == "complete" and not is_run_directory(folder):
            raise InvalidArgumentError(f"{final} is inside the checkpoint {folder}: choose a path outside of it")


def new_staging_path(final: Path) -> Path:
    """Return a path like :func:`staging_path`, and remove the staging directories of dead writers to ``final``."""
    clean_up(final.parent, tag=final.name)
    return staging_path(final)


@contextmanager
def staging_directory(final: Path) -> Iterator[Path]:
    """Create a staging directory, and rename it to ``final`` at the end of the ``with`` block.

    On failure the directory is removed. Its lock shows other processes that its writer is alive. Raises
    ``TagExistsError`` if ``final`` was created meanwhile.
    """
    posix.make_durable_directory(final.parent)
    staging = new_staging_path(final)
    with closing(directories.create_locked(staging)):
        try:
            yield staging
            directories.rename_noreplace(staging, final)
        except BaseException:
            with suppress(StorageError):
                directories.remove_tree(staging)
            raise


def remove_staging(staging: Path) -> None:
    """Remove the staging directory of a failed save, whose lock must be released. Storage errors are ignored.

    The directory stays if it marks a displaced checkpoint that could not get its name back.
    """
    with suppress(StorageError):
        finish_interrupted_replace(staging.parent)
        displaced = displaced_checkpoints(posix.list_names(staging.parent))
        if staging.name not in {hidden.with_state("partial").name for hidden in displaced}:
            directories.remove_tree(staging)
