"""Publishes a file or directory written by other code atomically.

All ranks write to a hidden path, then rank 0 renames it. No process sees a partial output or a mixture of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.engine.comm.session import RankGroup
from holdfast.run.cleanup import clean_up
from holdfast.run.staging_dir import remove_staging, staging_path
from holdfast.storage import directories, posix


@contextmanager
def atomic_output(path: Path, timeout: float = 600.0) -> Iterator[Path]:
    """Yield a path in a staging directory to write to, on all ranks; then make it durable and rename it to ``path``.

    Rank 0 holds the directory's lock meanwhile. If a rank fails, all ranks raise its error, the staging directory is
    removed, and a previous ``path`` is unchanged.
    """
    session = RankGroup().open_session(timeout)
    with ExitStack() as resources:
        _, name = session.vote(
            "preparing the save", lambda: None, lambda _: b"", lambda _: _create_staging(path, resources)
        )
        folder = path.parent / name.decode()
        failure: BaseException | None = None
        try:
            yield folder / path.name
        except BaseException as error:  # noqa: BLE001 - raised below, by all ranks
            failure = error

        def raise_failure() -> None:
            if failure is not None:
                raise failure

        session.vote("saving", raise_failure, lambda _: b"", lambda _: _publish_output(folder, path))


def _create_staging(path: Path, resources: ExitStack) -> bytes:
    """Remove what interrupted saves of the path have left, and create the staging directory (rank 0 only).

    ``resources`` gets the callbacks that release the lock and remove the directory. Returns the directory's name.
    """
    posix.make_durable_directory(path.parent)
    clean_up(path.parent, tag=path.name)
    folder = staging_path(path)
    lock = directories.create_locked(folder)
    resources.callback(remove_staging, folder)
    resources.callback(lock.close)
    return folder.name.encode()


def _publish_output(folder: Path, path: Path) -> bytes:
    """Make the output durable and rename it to ``path``, in place of what has this name (rank 0 only)."""
    output = folder / path.name
    posix.sync_tree(folder)
    if posix.is_file(output) and posix.is_file(path):
        directories.replace_file(output, path)
    elif posix.path_exists(path):
        displaced = folder.with_suffix(".replaced")
        directories.exchange_directories(output, path, displaced)
        directories.remove_tree(displaced)
    else:
        directories.rename_noreplace(output, path)
    return b""
