"""What other code writes on all ranks gets its name when it is complete: nobody sees half of it, nor a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.drafts import discard, draft_of
from holdfast.engine.ballot import LEADER
from holdfast.engine.ranks import Ranks
from holdfast.storage import folders, local


@contextmanager
def published(path: Path, timeout: float = 600.0) -> Iterator[Path]:
    """A hidden path to write to, on all ranks; then what is there is made durable and takes its name.

    Where a rank fails, all raise its error, nothing is left, and what had the name is as it was.
    """
    session = Ranks().session(timeout)
    _, name = session.vote(
        "preparing the save",
        lambda: None,
        lambda _: b"",
        lambda _: draft_of(path).name.encode(),
    )
    draft = path.parent / name.decode()
    failure: BaseException | None = None
    try:
        yield draft
    except BaseException as error:  # noqa: BLE001 - raised below, by all ranks
        failure = error

    def outcome() -> None:
        if failure is not None:
            raise failure

    def publish(_: object) -> bytes:
        local.sync_tree(draft)
        if local.exists(path):
            aside = draft.with_suffix(".replaced")
            folders.replace(draft, path, aside)
            folders.remove_tree(aside)
        else:
            folders.publish(draft, path)
        return b""

    try:
        session.vote("saving", outcome, lambda _: b"", publish)
    except BaseException:
        if session.rank == LEADER:
            discard(draft)
        raise
