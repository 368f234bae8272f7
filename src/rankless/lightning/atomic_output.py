"""Publishes a file or directory written by other code atomically.

All ranks write to a hidden path, then rank 0 renames it. No process sees a partial output or a mixture of two.

The strategies write Lightning's own files with it, on every rank, in the thread of the caller: votes "preparing the
save" and "saving". All is synced before the rename.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankless.engine.comm.process_group_argument import check_ranks_are_joined
from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.run.cleanup import clean_up
from rankless.run.ownership import Replaceable
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import confirm_lock
from rankless.storage import posix


@contextmanager
def atomic_output(path: Path, replaceable: Replaceable, timeout: float = 600.0) -> Iterator[Path]:
    """Yield a path in a pending directory to write to, on all ranks; then make it durable and rename it to ``path``.

    Rank 0 holds the directory's lock meanwhile. If a rank fails, all ranks raise its error, the pending directory is
    removed, and a previous ``path`` is unchanged. Raises ``InvalidArgumentError`` for ranks without a process group,
    and ``TagExistsError`` if the path has something that is not ``replaceable``.
    """
    check_ranks_are_joined(None, "unset WORLD_SIZE")
    session, pending = RankGroup().open_session(timeout), PendingDirectory(path)

    def create_pending(_: list[bytes]) -> bytes:
        replaceable.check(path)
        clean_up(path.parent, tag=path.name)
        pending.create()
        return pending.path.name.encode()

    def publish_output(_: list[bytes]) -> bytes:
        posix.sync_tree(pending.path)
        pending.replace(replaceable.check, path.name)
        pending.remove_displaced()
        return b""

    try:
        _, name = session.vote("preparing the save", lambda: None, lambda _: b"", create_pending)

        def look() -> None:
            if session.rank != COORDINATOR_RANK:
                confirm_lock(path.parent / name.decode())

        session.run_on_all("looking at the pending folder", look)
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
        if pending.is_locked:
            pending.discard()
