"""The hidden folder that something is written into, beside the path whose name it gets when it is complete."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.layout.hidden import Hidden
from holdfast.storage import folders, local
from holdfast.survey import put_aside
from holdfast.upkeep import recover


def draft_of(final: Path) -> Path:
    """A name for the draft of what will be ``final``; another one each time."""
    return final.parent / Hidden(final.name, secrets.token_hex(8), secrets.token_hex(8), "partial").name


@contextmanager
def drafted(final: Path) -> Iterator[Path]:
    """A draft to write into, which is ``final`` at the end; on failure nothing is left. Its lock tells that it lives.

    Raises ``TagExistsError`` where the name was taken meanwhile.
    """
    local.make_durable_folder(final.parent)
    draft = draft_of(final)
    with closing(folders.claim(draft)):
        try:
            yield draft
            folders.publish(draft, final)
        except BaseException:
            with suppress(StorageError):
                folders.remove_tree(draft)
            raise


def discard(draft: Path) -> None:
    """Remove the draft of a save that failed; what cannot be removed stays hidden. Its lock is let go of before.

    It stays, too, where it tells that what the save was to replace has lost its name.
    """
    with suppress(StorageError):
        recover(draft.parent)
        if draft.name not in {one.now("partial").name for one in put_aside(local.names(draft.parent))}:
            folders.remove_tree(draft)
