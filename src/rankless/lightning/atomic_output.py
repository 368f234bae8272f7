"""Publishes a file or directory written by other code atomically.

All ranks write to a hidden path, then rank 0 renames it. No process sees a partial output or a mixture of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankless.engine.comm.session import RankGroup
from rankless.run.cleanup import clean_up
from rankless.run.staging_dir import StagingDirectory
from rankless.storage import posix


@contextmanager
def atomic_output(path: Path, timeout: float = 600.0) -> Iterator[Path]:
    """Yield a path in a staging directory to write to, on all ranks; then make it durable and rename it to ``path``.

    Rank 0 holds the directory's lock meanwhile. If a rank fails, all ranks raise its error, the staging directory is
    removed, and a previous ``path`` is unchanged.
    """
    session, staging = RankGroup().open_session(timeout), StagingDirectory(path)

    def create_staging(_: list[bytes]) -> bytes:
        clean_up(path.parent, tag=path.name)
        staging.create()
        return staging.path.name.encode()

    def publish_output(_: list[bytes]) -> bytes:
        posix.sync_tree(staging.path)
        staging.replace(path.name)
        staging.remove_displaced()
        return b""

    try:
        _, name = session.vote("preparing the save", lambda: None, lambda _: b"", create_staging)
        failure: BaseException | None = None
        try:
            yield path.parent / name.decode() / path.name
        except BaseException as error:  # noqa: BLE001 - raised below, by all ranks
            failure = error

        def raise_failure() -> None:
            if failure is not None:
                raise failure

        session.vote("saving", raise_failure, lambda _: b"", publish_output)
    finally:
        if staging.is_locked:
            staging.discard()
