"""The selection of tensors from a checkpoint, with their new names and dtypes. Pure functions.

:mod:`rankless.conversion.pipeline` selects with it on each rank that opens the source: the result must be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rankless.errors import InvalidArgumentError
from rankless.formats.reader import Reader, check_read
from rankless.ondisk.data_files import ADAPTER, NO_ADAPTERS, ONLY_ADAPTERS, TensorInfo
from rankless.ondisk.dtypes import FLOATING
from rankless.ondisk.validation import split_state_key, state_key

#: The group of tensors that are inside values.
STATE = "state"

#: A tensor by its group and name.
Key = tuple[str, str]

#: New names of parameters and buffers: a function, or regular expressions with their replacements, in order.
Rename = Callable[[str], str] | Mapping[str, str] | None


@dataclass(frozen=True)
class SelectedTensors:
    """Tensors by their new group and name. ``sources`` are their old ones; ``tied`` has new names by group."""

    sources: Mapping[Key, Key]
    infos: Mapping[Key, TensorInfo]
    tied: Mapping[str, Mapping[str, str]]

    def infos_of_group(self, group: str) -> dict[str, TensorInfo]:
        """Return the tensors of one group."""
        return {name: info for (key_group, name), info in self.infos.items() if key_group == group}

    def group_names(self) -> list[str]:
        """Return all groups, sorted."""
        return sorted({group for group, _ in self.infos})


@dataclass(frozen=True)
class TensorFilter:
    """The selection that the user asked for. ``include`` and ``exclude`` are shell patterns of names.

    ``adapters`` is one of the constants of :mod:`rankless.state.training`: adapters are left out by default, because a
    model contains them.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename = None
    dtype: str | None = None
    model_only: bool = False
    adapters: str = NO_ADAPTERS

    def is_selected(self, name: str) -> bool:
        """Return whether a parameter or buffer is selected. For example, ``layers.*`` selects ``layers.0.weight``."""
        wanted = not self.include or any(fnmatchcase(name, pattern) for pattern in self.include)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def rename_parameter(self, name: str) -> str:
        """Return the new name of a parameter. Raises ``InvalidArgumentError`` if a regular expression is not valid.

        For example, ``{"^net": "model"}`` renames ``net.0.weight`` to ``model.0.weight``.
        """
        if callable(self.rename):
            return self.rename(name)
        for pattern, replacement in (self.rename or {}).items():
            try:
                name = re.sub(pattern, replacement, name)
            except (re.error, IndexError) as error:
                raise InvalidArgumentError(
                    f"rename must map regular expressions to replacements; got {pattern!r} with "
                    f"{replacement!r}: {error}"
                ) from error
        return name

    def select_tensors(self, reader: Reader) -> SelectedTensors:
        """Return the selected tensors of a checkpoint.

        Raises ``InvalidArgumentError`` if two tensors would get one name or nothing is selected, and ``FormatError`` if
        a selected tensor cannot be read.
        """
        kinds = {group.partition("/")[0] for group in reader.groups}
        if self.adapters == NO_ADAPTERS and ADAPTER in kinds and "model" not in kinds:
            raise InvalidArgumentError(
                f"{reader.path} contains PEFT adapters without a base model: convert it to 'peft'"
            )
        check_read(reader, lambda unread: self._is_wanted((STATE if unread.is_value else unread.group, unread.name)))
        sources: dict[Key, Key] = {}
        infos: dict[Key, TensorInfo] = {}
        for key, info in ((key, info) for key, info in _list_tensors(reader) if self._is_wanted(key)):
            renamed = self._rename_key(key)
            if renamed in sources:
                raise InvalidArgumentError(
                    f"{sources[renamed][1]!r} and {key[1]!r} would both be named {renamed[1]!r}: change rename"
                )
            sources[renamed] = key
            infos[renamed] = TensorInfo(self._target_dtype(key[0], info.dtype), info.shape)
        if not infos and self.adapters != ONLY_ADAPTERS and list(_list_tensors(reader)):
            raise InvalidArgumentError(f"no tensor of {reader.path} is selected: check include and exclude")
        return SelectedTensors(
            sources, infos, {group: self._rename_ties(group, names) for group, names in reader.tied.items()}
        )

    def _is_wanted(self, key: Key) -> bool:
        kind = key[0].partition("/")[0]
        if kind == ADAPTER or self.adapters == ONLY_ADAPTERS:
            return kind == ADAPTER and self.adapters != NO_ADAPTERS
        if kind in {STATE, "ranks"}:
            return not self.model_only
        return (kind == "model" or not self.model_only) and self.is_selected(_parameter_name(key))

    def _rename_key(self, key: Key) -> Key:
        group, name = key
        if group.startswith("optimizer"):
            fqn, state = split_state_key(name)
            return group, state_key(self.rename_parameter(fqn), state)
        return group, self.rename_parameter(name) if group.startswith("model") else name

    def _rename_ties(self, group: str, names: Mapping[str, str]) -> dict[str, str]:
        if not group.startswith("model"):
            return {}
        both = ((alias, name) for alias, name in names.items() if self.is_selected(alias) and self.is_selected(name))
        return {self.rename_parameter(alias): self.rename_parameter(name) for alias, name in both}

    def _target_dtype(self, group: str, dtype: str) -> str:
        return self.dtype if self.dtype and group.startswith("model") and dtype in FLOATING else dtype


def _parameter_name(key: Key) -> str:
    group, name = key
    return split_state_key(name)[0] if group.startswith("optimizer") else name


def _list_tensors(reader: Reader) -> list[tuple[Key, TensorInfo]]:
    return [((group, name), info) for group, names in sorted(reader.groups.items()) for name, info in names.items()]
