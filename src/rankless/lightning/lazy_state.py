"""Lazy state dicts of a Lightning checkpoint, which cost nothing until a hook reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import cached_property
from typing import Any

from rankless.formats.reader import Reader
from rankless.view import Checkpoint


class LazyStateDict(MutableMapping[str, Any]):
    """A dict that is created when it is first accessed."""

    def __init__(self, create: Callable[[], dict[str, Any]]) -> None:
        self._create = create

    @cached_property
    def _entries(self) -> dict[str, Any]:
        entries = self._create()
        self._as_created = _copy_containers(entries)
        return entries

    @property
    def is_created(self) -> bool:
        """True if the dict was accessed and therefore created."""
        return "_entries" in self.__dict__

    @property
    def is_changed(self) -> bool:
        """True if any value in the dict is another object than when it was created."""
        return self.is_created and not _is_same(self._entries, self._as_created)

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copy and pickle as a plain dict."""
        return dict, (dict(self),)


class StoredModelState(MutableMapping[str, Any]):
    """The model of a checkpoint. This rank alone reads each tensor, whole, when it is first accessed."""

    def __init__(self, reader: Reader, values: dict[str, Any]) -> None:
        """Take the entries that are not tensors from ``values``."""
        self._checkpoint = Checkpoint(reader)
        self._unread = {name: name for name in reader.groups.get("model", {})} | dict(reader.tied.get("model", {}))
        self._read: dict[str, Any] = {}
        self._entries: dict[str, Any] = {**dict.fromkeys(self._unread), **values}
        self.is_touched = False

    @property
    def unread_tensors(self) -> dict[str, str]:
        """The entries that were not read or replaced, with the names of their tensors in the checkpoint."""
        return {name: stored for name, stored in self._unread.items() if stored not in self._read}

    def __getitem__(self, name: str) -> Any:
        self.is_touched |= name in self._entries
        if name in self._unread:
            stored = self._unread.pop(name)
            if stored not in self._read:
                self._read[stored] = self._checkpoint[f"model/{stored}"]
            self._entries[name] = self._read[stored]
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.is_touched = True
        self._unread.pop(name, None)
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._unread.pop(name, None)
        self.is_touched = True

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def copy(self) -> dict[str, Any]:
        """Read all tensors, and return a plain dict."""
        return dict(self)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copy and pickle as a plain dict."""
        return dict, (dict(self),)


def _copy_containers(value: Any) -> Any:
    """Copy the dicts and lists of a tree, but not the leaves."""
    if isinstance(value, dict):
        return {key: _copy_containers(item) for key, item in value.items()}
    return [_copy_containers(item) for item in value] if isinstance(value, list) else value


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return value is other
