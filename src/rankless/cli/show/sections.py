"""The sections of the output of ``rankless show``. Each is a table.

:mod:`rankless.cli.show.show_command` prints them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from textwrap import wrap
from typing import Any

from rankless.cli.format_incarnation import describe_base, describe_incarnation
from rankless.cli.format_values import format_lines
from rankless.cli.show.module_sizes import ModuleSummary
from rankless.cli.table import Column, Table
from rankless.formats.reader import CheckpointValues, FamilyReader
from rankless.inspection.brief_text import format_brief
from rankless.inspection.folding import FoldedTensors, fold_tensors
from rankless.inspection.inspected_checkpoint import VALUE_GROUPS, InspectedCheckpoint
from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_count, format_metrics, format_size, format_time
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.manifest import EditRecord, Provenance
from rankless.run.history_tree import Incarnation
from rankless.run.lineage import Lineage
from rankless.run.run_store import tag_of

#: The maximum number of lines per value.
_MAX_LINES = 30

#: The groups of models and adapters.
_MODEL_GROUPS = frozenset({"model", "adapter"})

#: From this many millions on, no fraction of a million is shown.
_LARGE = 1_000

#: The width of optimizer settings, metrics and versions, in characters.
_TEXT_WIDTH = 66


def header_section(inspected: InspectedCheckpoint, lineage: Lineage | None) -> Table:
    """Return a table of the checkpoint's path, format, size, provenance, and place in the history of its run."""
    files = inspected.file_sizes()
    rows = [("path", str(inspected.path)), ("format", inspected.reader.format)]
    if parameters := _format_parameters(inspected.reader.groups):
        rows += [("model", parameters)]
    if isinstance(inspected.reader, FamilyReader):
        rows += _wrap_rows("family", inspected.reader.describe_family())
    if inspected.manifest:
        manifest, provenance = inspected.manifest, inspected.manifest.provenance
        rows += [
            ("tag", tag_of(inspected.path)),
            ("step", "" if manifest.step is None else str(manifest.step)),
            ("sequence", str(manifest.sequence)),
            (
                "saved",
                format_time(manifest.time)
                + (f" by {format_count(provenance.world_size, 'rank')}" if provenance.world_size else ""),
            ),
            *_lineage_rows(manifest.incarnation, lineage),
            *_edit_rows(manifest.edits or ()),
            *_wrap_rows("with", _format_versions(provenance)),
            *_wrap_rows("metrics", escape_control_characters(format_metrics(inspected.metrics))),
        ]
    rows.append(("size", f"{format_size(sum(files.values()))} in {format_count(len(files), 'file')}"))
    return Table(
        [Column("", style="bold"), Column("")], [(name, escape_control_characters(text)) for name, text in rows if text]
    )


def _lineage_rows(incarnation: int, lineage: Lineage | None) -> Iterator[tuple[str, str]]:
    if lineage is None:
        yield "incarnation", str(incarnation or "")
        return
    yield from _wrap_rows("saved by", _describe_with_base(lineage.saved_by))
    if lineage.is_current:
        yield "state", "current"
    else:
        by = f" by {_describe_with_base(lineage.abandoned_by)}" if lineage.abandoned_by else ""
        yield from _wrap_rows("state", f"abandoned{by}")


def _edit_rows(edits: Sequence[EditRecord]) -> Iterator[tuple[str, str]]:
    if not edits:
        return
    from rankless.edits.recipe import describe_recipe  # noqa: PLC0415 - few checkpoints were edited

    for edit in edits:
        yield from _wrap_rows("edited", f"{describe_recipe(edit.recipe)} (from {', '.join(edit.parents)})")


def _describe_with_base(one: Incarnation) -> str:
    return ", which ".join(filter(None, (describe_incarnation(one), describe_base(one))))


def _wrap_rows(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Return rows for a text that may be too long for one."""
    return zip(chain([name], repeat("")), wrap(text, _TEXT_WIDTH), strict=False)


def _format_versions(provenance: Provenance) -> str:
    versions = {"rankless": provenance.rankless, "torch": provenance.torch, "Python": provenance.python}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def tensor_section(tensors: Mapping[str, TensorInfo], tied: Mapping[str, str], *, folded: bool) -> Table:
    """Return a table of the tensors, followed by the tied names and the total. Equal layers may be folded."""
    entries = list(fold_tensors(tensors)) if folded else [FoldedTensors(*entry, 1) for entry in tensors.items()]
    columns = [Column("tensor", elastic="middle"), Column("dtype"), Column("shape"), Column("bytes", right=True)]
    rows = [
        [
            escape_control_characters(entry.name),
            entry.info.dtype,
            str(list(entry.info.value_shape)) + (f" x {entry.count:,}" if entry.count > 1 else ""),
            format_size(entry.nbytes),
        ]
        for entry in entries
    ]
    rows += [[escape_control_characters(f"{alias} = {name}"), "", "", "tied"] for alias, name in tied.items()]
    total = (format_count(len(tensors), "tensor"), "", "", format_size(sum(info.nbytes for info in tensors.values())))
    return Table(columns, [*rows, [(text, "bold") for text in total]])


def _format_parameters(groups: Mapping[str, Mapping[str, TensorInfo]]) -> str:
    """Return the number of elements of the models, in all and by dtype: ``1,236 M elements in BF16``."""
    counts: Counter[str] = Counter()
    for group, infos in groups.items():
        if group.partition("/")[0] in _MODEL_GROUPS:
            for info in infos.values():
                counts[info.dtype] += math.prod(info.value_shape)
    if not counts:
        return ""
    dtypes = [f"{_format_number(count)} in {dtype}" for dtype, count in counts.most_common()]
    total = f"{_format_number(counts.total())} elements"
    return f"{total} in {counts.popitem()[0]}" if len(dtypes) == 1 else f"{total}: {', '.join(dtypes)}"


def _format_number(number: int) -> str:
    """Format a number of elements with three digits or more: ``35,232``, ``1,236 M``, ``70.6 B``."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= 10 * size:
            return f"{number / size:,.1f} {unit}" if number < _LARGE * size else f"{number / size:,.0f} {unit}"
    return f"{number:,}"


def summary_section(modules: Sequence[ModuleSummary]) -> Table:
    """Return a table of the sizes of each group and its modules."""
    whole = sum(module.nbytes for module in modules if not module.name) or 1
    columns = [
        Column("module", elastic="middle"),
        *(Column(title, right=True) for title in ("tensors", "bytes", "share")),
    ]
    rows = []
    for module in modules:
        style = "" if module.name else "bold"
        texts = (f"{module.tensors:,}", format_size(module.nbytes), f"{100 * module.nbytes / whole:.1f} %")
        rows.append([(text, style) for text in (_format_label(module), *texts)])
    return Table(columns, rows)


def _format_label(module: ModuleSummary) -> str:
    inside = " (in values)" if module.group in VALUE_GROUPS else ""
    return escape_control_characters(f"  {module.name}" if module.name else f"{module.group}{inside}")


def value_section(values: CheckpointValues) -> Iterator[Table]:
    """Return one table per value, under its name."""
    for name, value in values.shared.items():
        if value is None or value == {}:
            continue
        rows = list(islice(_value_rows(name, value), _MAX_LINES + 1))
        if len(rows) > _MAX_LINES:
            rows[_MAX_LINES:] = [("…", "--json lists all")]
        cells = [(f"  {escape_control_characters(path)}", escape_control_characters(text)) for path, text in rows]
        yield Table([Column(escape_control_characters(name), elastic="middle"), Column("", elastic="end")], cells)
    if values.rank_values is not None:
        names = ", ".join(values.rank_values) or "nothing"
        yield Table([Column("ranks")], [(f"  {format_count(values.world_size, 'rank')}, each with its own {names}",)])


def _value_rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    kind = name.partition("/")[0]
    if kind == "optimizer" and isinstance(value, dict) and "groups" in value:
        return _optimizer_rows(value["groups"])
    if kind == "scheduler" and isinstance(value, dict) and isinstance(value.get("state"), dict):
        class_name = {} if value.get("class") is None else {"class": value["class"]}
        return format_lines({**class_name, **value["state"]})
    return format_lines(value)


def _optimizer_rows(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Return the optimizer's class and, for each group, the number of parameters and all settings that are not off."""
    classes = dict.fromkeys(str(group["class"]) for group in groups if group["class"] is not None)
    if classes:  # checkpoints of other systems do not record it
        yield "class", ", ".join(classes)
    for i, group in enumerate(groups):
        settings = {name: item for name, item in group["settings"].items() if item is not None and item is not False}
        texts = [f"{name}={format_brief(item)}" for name, item in settings.items()]
        text = ", ".join([format_count(len(group["params"]), "parameter"), *texts])
        for n, line in enumerate(wrap(text, _TEXT_WIDTH, break_long_words=False)):
            yield "" if n else f"group {i}", line
    if plain := sum(len(group["state"]) for group in groups):
        yield "state", f"plain values of {format_count(plain, 'parameter')}"
