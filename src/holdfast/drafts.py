"""The hidden folder that something is written into, beside the path whose name it gets when it is complete."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from holdfast.catalog import is_run
from holdfast.errors import InvalidArgumentError, StorageError, TagExistsError
from holdfast.formats.native import is_native
from holdfast.layout.hidden import Hidden
from holdfast.storage import folders, local
from holdfast.survey import look, put_aside
from holdfast.upkeep import clean_up, recover


def draft_of(final: Path) -> Path:
    """A name for the draft of what will be ``final``; another one each time."""
    return final.parent / Hidden(final.name, secrets.token_hex(8), secrets.token_hex(8), "partial").name


def check_final(final: Path) -> None:
    """Check that something new can be written at a path.

    Raises ``TagExistsError`` if the name is taken, and ``InvalidArgumentError`` inside of a checkpoint of ours: its
    manifest names all that is in it.
    """
    if local.exists(final):
        raise TagExistsError(f"there is {final} already; choose another path, or remove it first")
    for folder in final.resolve().parents:
        info = look(folder, folder.name) if is_native(folder) else None
        if info is not None and info.status == "complete" and not is_run(folder):
            raise InvalidArgumentError(f"{final} lies in the checkpoint {folder}: choose a path outside of it")


def new_draft(final: Path) -> Path:
    """Return a name for a draft, as :func:`draft_of`, and remove those of writers to the same path that died."""
    clean_up(final.parent, tag=final.name)
    return draft_of(final)


@contextmanager
def drafted(final: Path) -> Iterator[Path]:
    """A draft to write into, which is ``final`` at the end; on failure nothing is left. Its lock tells that it lives.

    Raises ``TagExistsError`` where the name was taken meanwhile.
    """
    local.make_durable_folder(final.parent)
    draft = new_draft(final)
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
