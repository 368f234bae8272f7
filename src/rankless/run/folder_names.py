"""The names of the folders of checkpoints in an object store, and the tags that abandoned checkpoints get.

A folder is called ``TAG.ID``, or ``TAG`` if it was copied there. A checkpoint ``TAG`` of the incarnation 3 that is
abandoned gets the tag ``TAG@3`` if its tag is needed, or ``TAG@3.2`` and so on if that is taken.

Saves, lists and clean-ups of object stores use these names, on rank 0 and in commands. They are keys in stores: a name
that is not recognized any more is a checkpoint that is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

#: The path of a run, in a store.
RunPath = TypeVar("RunPath", bound=Path)

#: The name of the folder of a checkpoint.
FOLDER = re.compile(r"(?P<tag>.+)\.(?P<id>[0-9a-f]{16})")

#: The most bytes of a tag that the tag of an abandoned checkpoint begins with, and the most that are tried.
_SHORT_BYTES, _MOST_TAGS = 180, 1000


def checkpoint_folder(run: RunPath, tag: str, folder_id: str) -> RunPath:
    """Return the prefix of the keys of a checkpoint.

    For example, ``run/step_10.0123456789abcdef`` for the tag ``step_10``.
    """
    return run / f"{tag}.{folder_id}"


def is_saved_folder(name: str) -> bool:
    """Return whether a prefix in a run has a name as saves give them. For example, ``step_10.0123456789abcdef``."""
    return not name.startswith(".") and FOLDER.fullmatch(name) is not None


def is_copied_folder(name: str) -> bool:
    """Return whether a prefix in a run may be a checkpoint that was copied there: no save gives such a name."""
    return not name.startswith(".") and FOLDER.fullmatch(name) is None


def tag_of_folder(name: str) -> str:
    """Return the tag of a checkpoint in a run from the name of its prefix.

    For example, ``step_10`` for ``step_10.0123456789abcdef``.
    """
    match = FOLDER.fullmatch(name)
    return match["tag"] if match else name


def abandoned_prefix(tag: str) -> str:
    """Return the beginning of the tags that an abandoned checkpoint ``tag`` may get.

    For example, ``step_10@`` for ``step_10``.
    """
    return tag.encode()[:_SHORT_BYTES].decode(errors="ignore") + "@"


def abandoned_tags(tag: str, incarnation: int) -> Iterator[str]:
    """Yield the tags that an abandoned checkpoint ``tag`` of an incarnation may get, in the order of preference.

    For example, ``step_10@3``, then ``step_10@3.2``.
    """
    first = f"{abandoned_prefix(tag)}{incarnation}"
    yield first
    yield from (f"{first}.{number}" for number in range(2, _MOST_TAGS))


def is_abandoned_tag(name: str, tag: str, incarnation: int) -> bool:
    """Return whether a name is one of :func:`abandoned_tags`, which rankless gives, and not a name of the user's."""
    first = re.escape(f"{abandoned_prefix(tag)}{incarnation}")
    return re.fullmatch(rf"{first}(\.[1-9][0-9]{{0,2}})?", name) is not None


def is_called(name: str, tag: str, saved_as: str, incarnation: int) -> bool:
    """Return whether a checkpoint ``tag`` has, or had, a name: things given to it by that name stay its own.

    It was saved as ``saved_as``, and may have got another tag since it is abandoned. A copy by the user has only its
    own name. For example, a checkpoint with the tag ``step_10@3`` was called ``step_10`` before.
    """
    return name == tag or all(one == saved_as or is_abandoned_tag(one, saved_as, incarnation) for one in (name, tag))
