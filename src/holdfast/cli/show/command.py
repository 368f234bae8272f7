"""``holdfast show``: what is in a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import target
from holdfast.cli.completion import complete_checkpoints
from holdfast.cli.format_values import as_plain_value
from holdfast.cli.name_patterns import match_names
from holdfast.cli.output import print_error, print_json
from holdfast.cli.show import sections
from holdfast.cli.show.modules import INSIDE, summarize_modules
from holdfast.cli.target import InspectedCheckpoint
from holdfast.observe.terminal import escape_control_characters, terminal_console
from holdfast.ondisk.files import TensorInfo
from holdfast.storage.posix import local_path


def show(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN", help="A checkpoint, or a run's folder: its latest.", autocompletion=complete_checkpoints
        ),
    ],
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Only tensors of these names: a glob, or part of a name.")
    ] = None,
    tag: target.Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Show what is in a checkpoint: its tensors, how much each module takes, and its values.

    No tensor is read. With a PATTERN only tensors are shown, and the exit code is 1 where none matches.
    """
    found = target.inspect_path(target.named_path(checkpoint, tag))
    tensors = {name: info for name, info in _tensors(found).items() if match_names(name, pattern)}
    tied = {alias: name for alias, name in _tied(found).items() if match_names(alias, pattern)}
    if pattern is not None and not tensors and not tied:
        print_error(f"no tensor of {found.path} matches {pattern!r}", _pattern_hint(checkpoint, pattern))
        raise typer.Exit(1)
    if as_json:
        print_json(_record(found, tensors, tied))
    else:
        _print(found, tensors, tied, whole=pattern is None)


def _pattern_hint(checkpoint: str, pattern: str) -> str:
    """What to do about a pattern that matches nothing. A tag is easily given in its place."""
    if any(info.tag == pattern for info in target.list_targets(local_path(checkpoint))):
        return f"There is a checkpoint of this tag: use --tag {pattern}."
    return "Without a pattern all are shown."


def _print(found: InspectedCheckpoint, tensors: dict[str, TensorInfo], tied: dict[str, str], *, whole: bool) -> None:
    out = terminal_console()
    parts = [sections.header_section(found)]
    if tensors or tied:
        parts += [sections.tensor_section(tensors, tied)]
    if whole:
        parts += [
            sections.summary_section(summarize_modules(found.reader.groups)),
            *sections.value_section(found.values()),
        ]
    for i, part in enumerate(part for part in parts if part.rows):
        out.print(*[""] * bool(i), part)
    for note in found.notes:
        out.print(escape_control_characters(note), style="yellow")


def _tensors(found: InspectedCheckpoint) -> dict[str, TensorInfo]:
    return {f"{group}/{name}": info for group, name, info in found.entries() if group not in INSIDE}


def _tied(found: InspectedCheckpoint) -> dict[str, str]:
    tied = found.reader.tied.items()
    return {f"{group}/{alias}": f"{group}/{name}" for group, names in tied for alias, name in names.items()}


def _record(found: InspectedCheckpoint, tensors: dict[str, TensorInfo], tied: dict[str, str]) -> dict[str, object]:
    manifest, files = found.manifest, found.files()
    return {
        "path": str(found.path),
        "format": found.reader.format,
        "tag": found.path.name if manifest else None,
        "step": manifest.step if manifest else None,
        "sequence": manifest.sequence if manifest else None,
        "time": manifest.time if manifest else None,
        "world_size": manifest.provenance.world_size if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
        "bytes": sum(files.values()),
        "files": [{"path": str(file), "bytes": size} for file, size in files.items()],
        "tensors": [
            {"name": name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
            for name, info in tensors.items()
        ],
        "tied": tied,
        "notes": list(found.notes),
        "modules": [
            {"group": part.group, "module": part.name or None, "tensors": part.tensors, "bytes": part.nbytes}
            for part in summarize_modules(found.reader.groups)
        ],
        "values": as_plain_value(found.values().shared),
    }
