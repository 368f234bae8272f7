"""Names that may become paths: what a tag and a file inside a checkpoint may be called."""

from __future__ import annotations

from pathlib import PurePosixPath

from holdfast.errors import InvalidArgumentError, UnsafeNameError

_LONGEST = 200


def check_tag(tag: object) -> str:
    """A tag that can be a folder's name: one path component, visible, of at most 200 bytes."""
    if not isinstance(tag, str) or not tag:
        raise InvalidArgumentError(f"a tag is a text such as 'step_1000', not {tag!r}")
    if "/" in tag or "\\" in tag or not tag.isprintable() or tag.startswith("."):
        raise InvalidArgumentError(
            f"tag {tag!r} cannot be a folder's name: leave out slashes, a leading dot and control characters"
        )
    if len(tag.encode()) > _LONGEST:
        raise InvalidArgumentError(f"tag {tag[:40]!r}… has more than {_LONGEST} bytes")
    return tag


def check_inside(name: str, source: str) -> str:
    """A relative file name that stays inside its folder. Raises ``UnsafeNameError`` naming ``source``."""
    path = PurePosixPath(name)
    unsafe = (
        not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name
    )
    if unsafe:
        raise UnsafeNameError(f"{source} names the file {name!r}, which is not a plain path inside its folder: refused")
    return name
