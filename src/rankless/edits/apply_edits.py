"""Opening a checkpoint with an edit: from stored tensors to the reader of the result.

:mod:`rankless.conversion.pipeline` calls it on each rank that opens the source, and a load on each rank, inside of the
vote "reading the metadata". Nothing of a tensor is read here. All ranks get equal formulas.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rankless.edits.average import Average
from rankless.edits.bound_states import apply_to_named, find_bound_states
from rankless.edits.catalog import Catalog
from rankless.edits.companions import check_tokenizer, read_config
from rankless.edits.config_parts import encode_config
from rankless.edits.formulas import StoredFormula
from rankless.edits.group_totals import describe_groups
from rankless.edits.recipe import Verb, encode_recipe
from rankless.edits.value_changes import ValueChange
from rankless.errors import InvalidArgumentError, NoCheckpointError
from rankless.formats.edited_reader import EditedContent, EditedReader, EditedTensor, StoredKey
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader
from rankless.observe.units import format_count
from rankless.ondisk.data_files import CONFIG
from rankless.ondisk.manifest import EditRecord
from rankless.run.catalog import list_checkpoints
from rankless.run.lookup import open_latest
from rankless.storage.location import parse_location

_log = logging.getLogger("rankless")


class EditReport(msgspec.Struct, frozen=True):
    """A report of an edit: each change, the totals of each group, and the names that no stored tensor has.

    ``lines`` and ``totals`` begin with the name of a group.
    """

    lines: Sequence[str]
    totals: Sequence[str]
    reconstructed: Sequence[str]


def edit_reader(reader: Reader, verbs: Sequence[Verb]) -> tuple[EditedReader, EditReport]:
    """Return the reader of a checkpoint after an edit, and a report.

    Raises ``InvalidArgumentError`` or ``MismatchError`` if a verb does not fit the checkpoint; ``NoCheckpointError`` if
    one to average with is not there.
    """
    readers: list[Reader] = [reader]
    raw_config = read_config(reader)
    config = _as_table(raw_config) if raw_config is not None else None
    catalog = Catalog(str(reader.path), _list_tensors(0, reader), reader.tied, config=config or {})
    bound = find_bound_states(reader, catalog)
    # Parameter groups follow, also if no parameter has states: of SGD, or before the first step.
    without_tensors = sorted(bound.optimizers - catalog.tensors.keys())
    catalog = replace(catalog, tensors={**catalog.tensors, **{group: {} for group in without_tensors}})
    before = catalog
    for verb in verbs:
        if isinstance(verb, Average):
            others = _open_others(verb, reader)
            readers += others
            catalog = verb.apply(
                catalog, [(str(other.path), _list_tensors(n, other)) for n, other in enumerate(others, start=1)]
            )
        else:
            catalog = apply_to_named(verb, catalog, bound)
    if catalog.rows is not None:
        check_tokenizer(reader, catalog.rows)
    _check_names(catalog)
    if raw_config is not None and catalog.config_changes:
        _check_config(config, catalog, len(raw_config))
    record = EditRecord([_identify(opened) for opened in readers], encode_recipe(verbs))
    changers = _join_changes(catalog), _config_changer(catalog)
    content = EditedContent(catalog.tensors, catalog.tied, *changers, record, catalog.reconstructed, catalog.unread)
    lines = [f"{change.group}: {change.text}" for change in catalog.changes]
    report = EditReport(lines, list(describe_groups(before, catalog)), catalog.reconstructed)
    return EditedReader(readers, content), report


class ReaderEdit(msgspec.Struct, frozen=True):
    """An edit as a load applies it: the ``edit`` of its request.

    A checkpoint that came about by this edit, or by a save after a load with it, is read as it is, unless the edit
    ``is_repeated``: so a job that is started again with the same arguments goes on.
    """

    verbs: tuple[Verb, ...]
    is_repeated: bool = False

    def __call__(self, reader: Reader) -> Reader:
        """Return the reader of the checkpoint after the edit."""
        recipe = encode_recipe(self.verbs)
        before = reader.manifest.edits if isinstance(reader, NativeReader) else ()
        if not self.is_repeated and any(record.recipe == recipe for record in before or ()):
            _log.info("%s came about by the edit that was passed: it is loaded as it is", reader.path)
            return reader
        return edit_reader(reader, self.verbs)[0]

    def __str__(self) -> str:
        """Return the recipe: ranks compare it."""
        return encode_recipe(self.verbs)


def _list_tensors(number: int, reader: Reader) -> Mapping[str, Mapping[str, EditedTensor]]:
    """Return the stored tensors of the checkpoint of this number. Entries that cannot be read are none of them."""
    return {
        group: {name: StoredFormula(StoredKey(number, group, name), info) for name, info in sorted(names.items())}
        for group, names in reader.groups.items()
    }


def _open_others(verb: Average, reader: Reader) -> list[Reader]:
    """Open the checkpoints that one is averaged with, from the oldest to the newest."""
    if verb.paths:
        return [open_latest(parse_location(path)) for path in verb.paths]
    infos = list_checkpoints(reader.path.parent) if isinstance(reader, NativeReader) else []
    run = next((info.run for info in infos if info.path == reader.path), None)
    # Checkpoints of other runs, and of branches that the training has abandoned, are of another training.
    names = [
        info.path
        for info in infos
        if info.path == reader.path or (info.run == run and info.is_current and info.status == "complete")
    ]
    if reader.path not in names:
        raise InvalidArgumentError(f"average: {reader.path} is no checkpoint of a run: pass paths instead of last")
    before = names[: names.index(reader.path)][-(verb.last - 1) :] if verb.last > 1 else []
    if len(before) < verb.last - 1:
        raise NoCheckpointError(
            f"average: {reader.path.parent} has {format_count(len(before) + 1, 'checkpoint')} up to "
            f"{reader.path.name}, and not {verb.last}: pass a later tag, or average fewer"
        )
    return [open_latest(path) for path in before]


def _identify(reader: Reader) -> str:
    """Return the id of a checkpoint of rankless, or the fingerprint of another one."""
    return reader.manifest.id if isinstance(reader, NativeReader) else reader.fingerprint


def _check_names(catalog: Catalog) -> None:
    for group in catalog.groups_of("model"):
        if not catalog.tensors[group]:
            raise InvalidArgumentError(f"the edit leaves no tensor of {group} of {catalog.label}")


def _check_config(config: Mapping[str, Any] | None, catalog: Catalog, nbytes: int) -> None:
    """Raise ``InvalidArgumentError`` if the configuration, of ``nbytes``, cannot follow an edit that changes it."""
    problem = "no JSON object" if config is None else ""
    try:
        encode_config(catalog.config, nbytes)
    except RecursionError:
        problem = "nested too deeply"
    if problem:
        raise InvalidArgumentError(
            f"{CONFIG} next to {catalog.label} must follow the edit, and is {problem}: correct it, or remove it"
        )


def _as_table(raw: bytes) -> dict[str, Any] | None:
    """Return the contents of a ``config.json``, or ``None`` if it is no JSON object."""
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def _join_changes(catalog: Catalog) -> ValueChange:
    def change_values(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        for change in catalog.value_changes:
            shared = change(shared)
        return shared

    return change_values


def _config_changer(catalog: Catalog) -> Callable[[bytes], bytes]:
    def change_config(raw: bytes) -> bytes:
        table = _as_table(raw)
        if not table or not catalog.config_changes:
            return raw
        for change in catalog.config_changes:
            table = change(table)
        return encode_config(table, len(raw))

    return change_config
