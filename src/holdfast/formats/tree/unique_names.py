"""Names made of paths: no two things get the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.errors import FormatError
from holdfast.formats.tree.traversal import Path, show_key_path


def find_collision(name: str, first: Path, second: Path) -> FormatError:
    """What is raised where two things would get one name."""
    return FormatError(
        f"{show_key_path(first)} and {show_key_path(second)} would both be called {name[:100]!r}: holdfast joins keys by dots "
        "and takes numbers as text. Load it as it was saved, rename one of them, and save it again"
    )


def index_by_name(entries: Iterable[tuple[Path, Any]], name_of: Callable[[Path], str]) -> dict[str, Any]:
    """Values by the names of their paths. Raises ``FormatError`` naming two paths of one name."""
    named: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, value in entries:
        name = name_of(path)
        if name in named:
            raise find_collision(name, paths[name], path)
        named[name], paths[name] = value, path
    return named


def index_by_text(table: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """The entries of the dict at a path by the texts of their keys. Raises ``FormatError`` naming two of one text."""
    return index_by_name((((*path, key), value) for key, value in table.items()), lambda place: str(place[-1]))
