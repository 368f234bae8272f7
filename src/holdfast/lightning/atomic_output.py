"""What other code writes on all ranks gets its name when it is complete: nobody sees half of it, nor a mixture."""

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
    """A path in a hidden folder to write to, on all ranks; then what is there is made durable and takes its name.

    Rank 0 holds the folder's lock meanwhile. Where a rank fails, all raise its error, nothing is left, and what had the
    name is as it was.
    """
    session = RankGroup().session(timeout)
    with ExitStack() as held:
        _, name = session.vote("preparing the save", lambda: None, lambda _: b"", lambda _: _open(path, held))
        folder = path.parent / name.decode()
        failure: BaseException | None = None
        try:
            yield folder / path.name
        except BaseException as error:  # noqa: BLE001 - raised below, by all ranks
            failure = error

        def outcome() -> None:
            if failure is not None:
                raise failure

        session.vote("saving", outcome, lambda _: b"", lambda _: _publish(folder, path))


def _open(path: Path, held: ExitStack) -> bytes:
    """Rank 0: remove what dead saves of the path have left, and make the folder, which ``held`` lets go of."""
    posix.make_durable_directory(path.parent)
    clean_up(path.parent, tag=path.name)
    folder = staging_path(path)
    lock = directories.create_locked(folder)
    held.callback(remove_staging, folder)
    held.callback(lock.close)
    return folder.name.encode()


def _publish(folder: Path, path: Path) -> bytes:
    draft = folder / path.name
    posix.sync_tree(folder)
    if posix.is_file(draft) and posix.is_file(path):
        directories.replace_file(draft, path)
    elif posix.path_exists(path):
        aside = folder.with_suffix(".replaced")
        directories.exchange_directories(draft, path, aside)
        directories.remove_tree(aside)
    else:
        directories.rename_noreplace(draft, path)
    return b""
