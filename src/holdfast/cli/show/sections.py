"""The parts of what ``holdfast show`` prints, each a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from textwrap import wrap
from typing import Any

from holdfast.cli.format_values import format_brief, format_lines
from holdfast.cli.output import format_count, human_metrics, human_time
from holdfast.cli.show.modules import INSIDE, ModuleSummary
from holdfast.cli.table import Column, Table
from holdfast.cli.target import InspectedCheckpoint
from holdfast.formats.reader import CheckpointValues
from holdfast.observe.terminal import escape_control_characters
from holdfast.observe.units import format_size
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.manifest import Provenance

#: The most lines of one part of the values.
_SHOWN = 30

#: The width of an optimizer's settings, of metrics and of versions, in characters.
_ROOM = 66


def header_section(found: InspectedCheckpoint) -> Table:
    """What the checkpoint is, and where it comes from."""
    files = found.files()
    rows = [("path", str(found.path)), ("format", found.reader.format)]
    if found.manifest:
        manifest, by = found.manifest, found.manifest.provenance
        rows += [
            ("tag", found.path.name),
            ("step", "" if manifest.step is None else str(manifest.step)),
            ("sequence", str(manifest.sequence)),
            (
                "saved",
                human_time(manifest.time) + (f" by {format_count(by.world_size, 'rank')}" if by.world_size else ""),
            ),
            *_wrapped("with", _versions(by)),
            *_wrapped("metrics", human_metrics(manifest.metrics)),
        ]
    rows.append(("size", f"{format_size(sum(files.values()))} in {format_count(len(files), 'file')}"))
    return Table(
        [Column("", style="bold"), Column("")], [(name, escape_control_characters(text)) for name, text in rows if text]
    )


def _wrapped(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Rows for a text that may be too long for one."""
    return zip(chain([name], repeat("")), wrap(text, _ROOM), strict=False)


def _versions(by: Provenance) -> str:
    named = {"holdfast": by.holdfast, "torch": by.torch, "Python": by.python}
    return ", ".join(f"{name} {version}" for name, version in named.items() if version)


def tensor_section(found: Mapping[str, TensorInfo], tied: Mapping[str, str]) -> Table:
    """Names, dtypes, shapes, bytes; then the further names of tied ones; then the total."""
    columns = [Column("tensor", elastic="middle"), Column("dtype"), Column("shape"), Column("bytes", right=True)]
    rows = [
        (escape_control_characters(name), info.dtype, str(list(info.shape)), format_size(info.nbytes))
        for name, info in found.items()
    ]
    rows += [(escape_control_characters(f"{alias} = {name}"), "", "", "tied") for alias, name in tied.items()]
    total = (format_count(len(found), "tensor"), "", "", format_size(sum(info.nbytes for info in found.values())))
    return Table(columns, [*rows, [(text, "bold") for text in total]])


def summary_section(parts: Sequence[ModuleSummary]) -> Table:
    """Bytes of each group, and of its modules below it."""
    whole = sum(part.nbytes for part in parts if not part.name) or 1
    columns = [
        Column("module", elastic="middle"),
        *(Column(title, right=True) for title in ("tensors", "bytes", "share")),
    ]
    rows = []
    for part in parts:
        style = "" if part.name else "bold"
        texts = (f"{part.tensors:,}", format_size(part.nbytes), f"{100 * part.nbytes / whole:.1f} %")
        rows.append([(text, style) for text in (_label(part), *texts)])
    return Table(columns, rows)


def _label(part: ModuleSummary) -> str:
    inside = " (in values)" if part.group in INSIDE else ""
    return escape_control_characters(f"  {part.name}" if part.name else f"{part.group}{inside}")


def value_section(found: CheckpointValues) -> Iterator[Table]:
    """One table for each part of the values, under its name."""
    for name, value in found.shared.items():
        if value is None or value == {}:
            continue
        rows = list(islice(_rows(name, value), _SHOWN + 1))
        if len(rows) > _SHOWN:
            rows[_SHOWN:] = [("…", "--json has the rest")]
        cells = [(f"  {escape_control_characters(path)}", escape_control_characters(text)) for path, text in rows]
        yield Table([Column(escape_control_characters(name), elastic="middle"), Column("", elastic="end")], cells)
    if found.own is not None:
        kept = ", ".join(found.own) or "nothing"
        yield Table([Column("ranks")], [(f"  {format_count(found.world_size, 'rank')}, each with its own {kept}",)])


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    kind = name.partition("/")[0]
    if kind == "optimizer" and isinstance(value, dict) and "groups" in value:
        return _optimizer(value["groups"])
    if kind == "scheduler" and isinstance(value, dict) and isinstance(value.get("state"), dict):
        known = {} if value.get("class") is None else {"class": value["class"]}
        return format_lines({**known, **value["state"]})
    return format_lines(value)


def _optimizer(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Its class, and of each group the number of parameters and what is set; what is off goes without saying."""
    classes = dict.fromkeys(str(group["class"]) for group in groups if group["class"] is not None)
    if classes:  # other systems' checkpoints do not say
        yield "class", ", ".join(classes)
    for i, group in enumerate(groups):
        given = {name: item for name, item in group["settings"].items() if item is not None and item is not False}
        settings = [f"{name}={format_brief(item)}" for name, item in given.items()]
        text = ", ".join([format_count(len(group["params"]), "parameter"), *settings])
        for n, line in enumerate(wrap(text, _ROOM, break_long_words=False)):
            yield "" if n else f"group {i}", line
    if plain := sum(len(group["state"]) for group in groups):
        yield "state", f"plain values of {format_count(plain, 'parameter')}"
