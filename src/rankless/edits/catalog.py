"""The contents of a checkpoint as verbs change them: a formula for each tensor, and how all other contents follow.

:mod:`rankless.edits.apply_edits` begins with the stored tensors, and passes the result of each verb to the next one, on
each rank that opens the checkpoint. Nothing of a tensor is read. Ranks must get equal catalogs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rankless.edits.value_changes import RenameNames, ValueChange, rename_parameters
from rankless.errors import InvalidArgumentError
from rankless.formats.edited_reader import EditedTensor
from rankless.formats.reader import UnreadTensorNote
from rankless.ondisk.data_files import ADAPTER
from rankless.ondisk.validation import split_state_key, state_key

MODEL, OPTIMIZER = "model", "optimizer"

#: Names of states that are the parameter itself in a higher precision.
MASTERS = frozenset({"master", "master_param", "fp32_param", "master_weights"})

#: The state that counts the steps of a parameter.
STEP = "step"

#: Tensors by name.
Tensors = Mapping[str, EditedTensor]

#: Changes the contents of ``config.json``.
ConfigChange = Callable[[dict[str, Any]], dict[str, Any]]


class Change(msgspec.Struct, frozen=True):
    """A line of the report of an edit: the group, and the change of something in it."""

    group: str
    text: str


class Parameter(msgspec.Struct, frozen=True):
    """A parameter or buffer of a model in its group, with its optimizer states: each by its group and its name."""

    group: str
    name: str
    tensor: EditedTensor
    states: Mapping[tuple[str, str], EditedTensor]

    @property
    def master(self) -> EditedTensor | None:
        """The parameter in a higher precision, if an optimizer has it."""
        masters = [state for (_, name), state in self.states.items() if name in MASTERS]
        return masters[0] if masters and masters[0].info.shape == self.tensor.info.shape else None


class Catalog(msgspec.Struct, frozen=True):
    """A checkpoint: tensors and ties by group, changes of shared values and of ``config.json`` so far, and a report.

    ``config`` has the contents of ``config.json`` after these changes, empty if there is none. ``label`` names the
    checkpoint in messages. ``reconstructed`` are names of parameters and states that no stored tensor has. ``unread``
    are states that a verb has no rule for: a read of one raises an error. ``rows`` is the number of rows for tokens, if
    a verb has changed it.
    """

    label: str
    tensors: Mapping[str, Tensors]
    tied: Mapping[str, Mapping[str, str]]
    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    value_changes: tuple[ValueChange, ...] = ()
    config_changes: tuple[ConfigChange, ...] = ()
    changes: tuple[Change, ...] = ()
    reconstructed: tuple[str, ...] = ()
    unread: tuple[UnreadTensorNote, ...] = ()
    rows: int | None = None

    def groups_of(self, kind: str) -> list[str]:
        """Return the groups of a kind: ``"model"``, ``"model/ema"``."""
        return [group for group in self.tensors if group.partition("/")[0] == kind]

    def parameters(self) -> Iterator[Parameter]:
        """Yield all parameters and buffers of models, with the states that optimizers have of this name."""
        states: dict[tuple[str, str], dict[tuple[str, str], EditedTensor]] = {}
        for group in self.groups_of(OPTIMIZER):
            for key, tensor in self.tensors[group].items():
                name, state = split_state_key(key)
                states.setdefault(self.owner_of(group, name), {})[group, state] = tensor
        for group in self.groups_of(MODEL):
            for name, tensor in self.tensors[group].items():
                yield Parameter(group, name, tensor, states.get((group, name), {}))

    def owner_of(self, optimizer: str, name: str) -> tuple[str, str]:
        """Return the group of the model that has a parameter of an optimizer, and its name there.

        One optimizer of several models has names such as ``net/layers.0.weight``.
        """
        model, _, bare = name.partition("/")
        named = MODEL + optimizer.removeprefix(OPTIMIZER)
        return (f"{MODEL}/{model}", bare) if named not in self.tensors and bare else (named, name)

    def name_in(self, optimizer: str, model: str, name: str) -> str:
        """Return the name that an optimizer has for a parameter of a model: the reverse of :meth:`owner_of`.

        For example, ``net/0.weight`` for ``0.weight`` of the model ``model/net``, if one optimizer has several models.
        """
        is_single = MODEL + optimizer.removeprefix(OPTIMIZER) in self.tensors
        return name if is_single else f"{model.partition('/')[2]}/{name}"

    def qualify(self, rename: RenameNames) -> RenameNames:
        """Return the same change of names for names that begin with a model's name, as optimizers have them.

        For example, a change of ``0.weight`` to ``1.weight`` changes ``net/0.weight`` to ``net/1.weight``, if ``net``
        is a model.
        """
        models = {group.partition("/")[2] for group in self.groups_of(MODEL)} - {""}

        def rename_qualified(name: str) -> Sequence[str]:
            model, slash, bare = name.partition("/")
            return [f"{model}/{new}" for new in rename(bare)] if slash and model in models else rename(name)

        return rename_qualified

    def resolve(self, name: str) -> str:
        """Return the stored name of a tied parameter."""
        return next((tied[name] for group, tied in self.tied.items() if group in self.tensors and name in tied), name)

    def names(self) -> list[str]:
        """Return the names of all parameters and buffers, names of ties too, each once."""
        names = [name for group in self.groups_of(MODEL) for name in (*self.tensors[group], *self.tied.get(group, {}))]
        return list(dict.fromkeys(names))

    def check_no_adapters(self, verb: str) -> None:
        """Raise ``InvalidArgumentError`` if there are PEFT adapters: their configuration names their modules."""
        if self.groups_of(ADAPTER):
            raise InvalidArgumentError(
                f"{verb}: {self.label} has PEFT adapters, which do not follow: merge them first, with rankless convert "
                "--to hf --merge"
            )

    def with_config(self, change: ConfigChange) -> Catalog:
        """Return the catalog with a further change of ``config.json``, which does nothing if there is none."""
        config = change(dict(self.config)) if self.config else self.config
        return msgspec.structs.replace(self, config=config, config_changes=(*self.config_changes, change))

    def with_changes(self, changes: Sequence[Change], reconstructed: Sequence[str] = ()) -> Catalog:
        """Return the catalog with further lines of the report, and names of new tensors."""
        return msgspec.structs.replace(
            self, changes=(*self.changes, *changes), reconstructed=(*self.reconstructed, *reconstructed)
        )


#: Returns the parameters that one becomes: its new names, each with the parameter as it is then. ``None``: it stays.
ChangeParameter = Callable[[Parameter], Sequence[Parameter] | None]


def map_parameters(catalog: Catalog, change: ChangeParameter, rename: RenameNames) -> Catalog:
    """Return a catalog with other parameters.

    ``change`` returns the parameters that one becomes, with their states. ``rename`` does the same for names alone: of
    ties, groups of optimizers and schedulers, and of states that are no tensors; it returns no name for a dropped
    parameter. For example, ``layers order=0,0`` makes ``layers.0.weight`` and ``layers.1.weight`` of
    ``layers.0.weight``. Raises ``InvalidArgumentError`` if two parameters would get one name.
    """
    tensors: dict[str, dict[str, EditedTensor]] = {
        group: {} if group.partition("/")[0] in {MODEL, OPTIMIZER} else dict(names)
        for group, names in catalog.tensors.items()
    }
    mapped: set[tuple[str, str]] = set()
    qualified = catalog.qualify(rename)
    for parameter in catalog.parameters():
        changed = change(parameter)
        for new in [parameter] if changed is None else changed:
            _add(tensors[new.group], new.name, new.tensor, parameter.name)
            for (group, state), tensor in new.states.items():
                name = catalog.name_in(group, new.group, new.name)
                _add(tensors[group], state_key(name, state), tensor, parameter.name)
        mapped |= {
            (group, state_key(catalog.name_in(group, parameter.group, parameter.name), state))
            for group, state in parameter.states
        }
    for group in catalog.groups_of(OPTIMIZER):  # states of parameters that no model of the checkpoint has
        for key, tensor in catalog.tensors[group].items():
            if (group, key) not in mapped:
                name, state = split_state_key(key)
                for new_name in qualified(name):
                    _add(tensors[group], state_key(new_name, state), tensor, name)
    tied = {
        group: _rename_ties(names, tensors.get(group, {}), rename) if group.partition("/")[0] == MODEL else names
        for group, names in catalog.tied.items()
    }
    return msgspec.structs.replace(
        catalog,
        tensors={group: dict(sorted(names.items())) for group, names in tensors.items()},
        tied=tied,
        value_changes=(*catalog.value_changes, rename_parameters(qualified)),
    )


def _add(tensors: dict[str, EditedTensor], name: str, tensor: EditedTensor, old: str) -> None:
    if name in tensors:
        raise InvalidArgumentError(f"{old!r} and another tensor would both be named {name!r}")
    tensors[name] = tensor


def _rename_ties(names: Mapping[str, str], tensors: Collection[str], rename: RenameNames) -> dict[str, str]:
    """Return the further names of tied tensors.

    Raises ``InvalidArgumentError`` if one of two names of a tensor would be dropped or repeated, and not the other.
    """
    renamed: dict[str, str] = {}
    for alias, name in names.items():
        aliases, stored = rename(alias), rename(name)
        if len(aliases) != len(stored):
            raise InvalidArgumentError(
                f"{alias!r} and {name!r} are one tied parameter: an edit must keep, drop or repeat both alike"
            )
        for new_alias, new_name in zip(aliases, stored, strict=True):
            if new_alias in renamed or new_alias in tensors:
                raise InvalidArgumentError(f"{alias!r} and another tensor would both be named {new_alias!r}")
            if new_name in tensors:
                renamed[new_alias] = new_name
    return renamed


def is_one_value(state: str, tensor: EditedTensor, parameter: EditedTensor) -> bool:
    """Return whether a state is one value for its parameter, such as the count of steps."""
    shape = tensor.info.shape
    return state == STEP or shape == () or (all(size == 1 for size in shape) and shape != parameter.info.shape)


def keep_name(name: str) -> tuple[str]:
    """Return the name alone, for changes that rename nothing."""
    return (name,)
