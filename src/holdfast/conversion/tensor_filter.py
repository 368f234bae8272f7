"""What is taken from a checkpoint: which tensors, under which names, in which dtype. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holdfast.errors import InvalidArgumentError
from holdfast.formats.reader import Reader, check_read
from holdfast.ondisk.dtypes import FLOATING
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.validation import split_state_key, state_key

#: The group of tensors inside of values.
STATE = "state"

#: A tensor by its group and name.
Key = tuple[str, str]

#: New names of parameters and buffers: a function, or regular expressions with what takes their place, in order.
Rename = Callable[[str], str] | Mapping[str, str] | None


@dataclass(frozen=True)
class SelectedTensors:
    """Tensors by the group and name that they get, with those that they have; ``tied`` names by group, as they get."""

    sources: Mapping[Key, Key]
    infos: Mapping[Key, TensorInfo]
    tied: Mapping[str, Mapping[str, str]]

    def group(self, group: str) -> dict[str, TensorInfo]:
        """The tensors of one group."""
        return {name: info for (one, name), info in self.infos.items() if one == group}

    def groups(self) -> list[str]:
        """All groups."""
        return sorted({group for group, _ in self.infos})


@dataclass(frozen=True)
class TensorFilter:
    """What the user asked for. ``include`` and ``exclude`` are patterns of names, as the shell has them."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename = None
    dtype: str | None = None
    model_only: bool = False

    def takes(self, name: str) -> bool:
        """Whether a parameter or buffer is taken."""
        wanted = not self.include or any(fnmatchcase(name, pattern) for pattern in self.include)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def renamed(self, name: str) -> str:
        """The name that a parameter or buffer gets. Raises ``InvalidArgumentError`` for a bad regular expression."""
        if callable(self.rename):
            return self.rename(name)
        for pattern, replacement in (self.rename or {}).items():
            try:
                name = re.sub(pattern, replacement, name)
            except (re.error, IndexError) as error:
                raise InvalidArgumentError(
                    f"rename takes regular expressions with what takes their place, not {pattern!r} with "
                    f"{replacement!r}: {error}"
                ) from error
        return name

    def of(self, reader: Reader) -> SelectedTensors:
        """What is taken from a checkpoint.

        Raises ``InvalidArgumentError`` where names meet or nothing is left, ``FormatError`` for what is not read.
        """
        check_read(reader, lambda one: self._wants((STATE if one.is_value else one.group, one.name)))
        sources: dict[Key, Key] = {}
        infos: dict[Key, TensorInfo] = {}
        for key, info in ((key, info) for key, info in _all(reader) if self._wants(key)):
            renamed = self._key(key)
            if renamed in sources:
                raise InvalidArgumentError(
                    f"{sources[renamed][1]!r} and {key[1]!r} would both be called {renamed[1]!r}"
                )
            sources[renamed] = key
            infos[renamed] = TensorInfo(self._dtype(key[0], info.dtype), info.shape)
        if not infos and list(_all(reader)):
            raise InvalidArgumentError(f"nothing of {reader.path} is left to be converted; look at include and exclude")
        return SelectedTensors(
            sources, infos, {group: self._tied(group, names) for group, names in reader.tied.items()}
        )

    def _wants(self, key: Key) -> bool:
        kind = key[0].partition("/")[0]
        if kind in {STATE, "ranks"}:
            return not self.model_only
        return (kind == "model" or not self.model_only) and self.takes(_parameter(key))

    def _key(self, key: Key) -> Key:
        group, name = key
        if group.startswith("optimizer"):
            fqn, state = split_state_key(name)
            return group, state_key(self.renamed(fqn), state)
        return group, self.renamed(name) if group.startswith("model") else name

    def _tied(self, group: str, names: Mapping[str, str]) -> dict[str, str]:
        if not group.startswith("model"):
            return {}
        both = ((alias, name) for alias, name in names.items() if self.takes(alias) and self.takes(name))
        return {self.renamed(alias): self.renamed(name) for alias, name in both}

    def _dtype(self, group: str, dtype: str) -> str:
        return self.dtype if self.dtype and group.startswith("model") and dtype in FLOATING else dtype


def _parameter(key: Key) -> str:
    group, name = key
    return split_state_key(name)[0] if group.startswith("optimizer") else name


def _all(reader: Reader) -> list[tuple[Key, TensorInfo]]:
    return [((group, name), info) for group, names in sorted(reader.groups.items()) for name, info in names.items()]
