"""Names made of paths, which must be unique.

:mod:`rankless.formats.tree.tree_contents` and its neighbours name values with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rankless.errors import FormatError
from rankless.formats.tree.tree_traversal import Path, show_key_path


def collision_error(name: str, first: Path, second: Path) -> FormatError:
    """Return the error to raise if two values would get the same name."""
    return FormatError(
        f"{show_key_path(first)} and {show_key_path(second)} would both get the name {name[:100]!r}: rankless joins "
        "keys by dots and converts numbers to text. Load the checkpoint as it was saved, rename one of them, and save "
        "it again"
    )


def index_by_name(entries: Iterable[tuple[Path, Any]], name_of: Callable[[Path], str]) -> dict[str, Any]:
    """Return values by the names of their paths. Raises ``FormatError`` if two paths have the same name."""
    named: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, value in entries:
        name = name_of(path)
        if name in named:
            raise collision_error(name, paths[name], path)
        named[name], paths[name] = value, path
    return named


def index_by_text(table: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """Return the entries of a dict by their keys as text.

    Raises ``FormatError`` if two keys have the same text, for example ``1`` and ``"1"``.
    """
    return index_by_name((((*path, key), value) for key, value in table.items()), lambda key_path: str(key_path[-1]))
