"""``rankless show``: shows the contents of a checkpoint.

It only reads, in one process. Programs read the JSON: keys keep their names.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, NamedTuple

import typer

from rankless.cli import checkpoint_argument
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import complete_checkpoints
from rankless.cli.format_incarnation import incarnation_record
from rankless.cli.format_values import as_plain_value
from rankless.cli.output import print_error, print_json
from rankless.cli.show import sections
from rankless.cli.show.module_sizes import fold_modules, summarize_modules
from rankless.errors import InvalidArgumentError, StorageError
from rankless.formats.reader import FamilyReader, Reader
from rankless.inference.engine_layout import EngineLayout
from rankless.inspection import inspected_checkpoint
from rankless.inspection.inspected_checkpoint import VALUE_GROUPS, InspectedCheckpoint
from rankless.inspection.name_patterns import match_names
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.ondisk.data_files import TensorInfo
from rankless.run.lineage import Lineage, find_lineage
from rankless.run.run_store import tag_of
from rankless.storage.location import parse_location
from rankless.storage.store import store_of


def show(  # noqa: PLR0917 - options of the command
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN",
            help="A checkpoint, or a run's folder for its latest one.",
            autocompletion=complete_checkpoints,
        ),
    ],
    pattern: Annotated[
        str | None, typer.Argument(metavar="PATTERN", help="Show only these tensors: a glob, or part of a name.")
    ] = None,
    tag: checkpoint_argument.Tag = None,
    local: checkpoint_argument.Local = None,
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Show each tensor in a line of its own, also those of equal layers.")
    ] = False,
    depth: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show modules down to this depth of their names.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    engine: Annotated[
        str | None, typer.Option("--for", metavar="ENGINE", help="Show what each rank would read to serve: vllm.")
    ] = None,
    tensor: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="With --for: tensor-parallel ranks.")] = 1,
    pipeline: Annotated[int, typer.Option("--pp", min=1, metavar="N", help="With --for: pipeline stages.")] = 1,
    expert: Annotated[bool, typer.Option("--ep", help="With --for: the experts are divided among the ranks.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --for: the folder of config.json; default: CKPT.")
    ] = None,
) -> None:
    """Show the size of each module of a checkpoint, its tensors, and the values.

    Equal layers share a line: "layers.{0..31}.mlp.weight". No tensor is read. With a PATTERN only tensors are shown,
    each in a line of its own, and the exit code is 1 if none matches. With --local, RUN stands for the newest
    checkpoint in the local tier of this host.

    With --for, show how many bytes of the model each rank of an inference engine would read. The engine must be
    installed; its model is made without memory for weights.
    """
    _check_options(
        {"--tp": tensor > 1, "--pp": pipeline > 1, "--ep": expert, "--config": config is not None},
        {"PATTERN": pattern is not None, "--all": show_all, "--depth": depth is not None},
        is_for_engine=engine is not None,
    )
    if local is None:
        inspected = inspected_checkpoint.inspect_path(checkpoint_argument.resolve_path(checkpoint, tag))
    else:
        inspected = _inspect_tier(checkpoint, local, tag)
    if engine is not None:
        layout = EngineLayout(tensor, pipeline, expert)
        _print_engine_reads(inspected.reader, engine, layout, config, as_json=as_json)
        return
    tensors = {name: info for name, info in _tensors_by_name(inspected).items() if match_names(name, pattern)}
    tied = {alias: name for alias, name in _ties_by_name(inspected).items() if match_names(alias, pattern)}
    if pattern is not None and not tensors and not tied:
        print_error(f"no tensor of {inspected.path} matches {pattern!r}", _pattern_hint(checkpoint, pattern))
        raise typer.Exit(1)
    if as_json:
        print_json(_json_record(inspected, tensors, tied, depth))
    else:
        _print_sections(inspected, tensors, tied, _Layout(pattern is None, pattern is None and not show_all, depth))


def _inspect_tier(run: str, local: str, tag: str | None) -> InspectedCheckpoint:
    with leave_on_interrupt():
        from rankless.cli.tier.show_local import inspect_tier  # noqa: PLC0415 - torch is slow to import
    return inspect_tier(run, local, tag)


def _check_options(for_engine: dict[str, bool], without_engine: dict[str, bool], *, is_for_engine: bool) -> None:
    """Check that the options belong together. Raises ``InvalidArgumentError``."""
    for name, is_passed in (without_engine if is_for_engine else for_engine).items():
        if is_passed:
            needs = "is not possible with --for" if is_for_engine else "needs --for, with the name of an engine"
            raise InvalidArgumentError(f"{name} {needs}")


def _print_engine_reads(
    reader: Reader, engine: str, layout: EngineLayout, config: str | None, *, as_json: bool
) -> None:
    with leave_on_interrupt():
        from rankless.cli.show import engine_reads  # noqa: PLC0415 - torch is slow to import
    if config is None and not store_of(reader.path).is_file(reader.path / "config.json"):
        raise InvalidArgumentError(f"{reader.path} has no config.json: name the folder that has it by --config FOLDER")
    engine_reads.print_engine_reads(reader, engine, layout, config or str(reader.path), as_json=as_json)


def _pattern_hint(checkpoint: str, pattern: str) -> str:
    """Return a hint for a pattern that matches nothing. The user may have passed a tag in its place."""
    if any(info.tag == pattern for info in inspected_checkpoint.list_targets(parse_location(checkpoint))):
        return f"There is a checkpoint with this tag: use --tag {pattern}."
    return "Without a pattern all tensors are shown."


class _Layout(NamedTuple):
    """The extent of the output: the ``whole`` checkpoint, equal layers ``folded``, modules down to ``depth``."""

    whole: bool
    folded: bool
    depth: int | None


def _print_sections(
    inspected: InspectedCheckpoint, tensors: dict[str, TensorInfo], tied: dict[str, str], layout: _Layout
) -> None:
    out = terminal_console()
    tables = [sections.header_section(inspected, _find_lineage(inspected))]
    if layout.whole:
        modules = summarize_modules(inspected.reader.groups, layout.depth)
        tables += [sections.summary_section(fold_modules(modules) if layout.folded else modules)]
    if tensors or tied:
        tables += [sections.tensor_section(tensors, tied, folded=layout.folded)]
    if layout.whole:
        tables += sections.value_section(inspected.read_values())
    for i, table in enumerate(table for table in tables if table.rows):
        out.print(*[""] * bool(i), table)
    for note in inspected.notes:
        out.print(escape_control_characters(note), style="yellow")


def _find_lineage(inspected: InspectedCheckpoint) -> Lineage | None:
    """Return the lineage of a checkpoint; ``None`` if it has none, or if its run cannot be read: it is shown anyway."""
    if (manifest := inspected.manifest) is not None:
        with suppress(StorageError):
            return find_lineage(inspected.path, manifest.id, manifest.incarnation)
    return None


def _tensors_by_name(inspected: InspectedCheckpoint) -> dict[str, TensorInfo]:
    return {f"{group}/{name}": info for group, name, info in inspected.iterate_tensors() if group not in VALUE_GROUPS}


def _ties_by_name(inspected: InspectedCheckpoint) -> dict[str, str]:
    tied = inspected.reader.tied.items()
    return {f"{group}/{alias}": f"{group}/{name}" for group, names in tied for alias, name in names.items()}


def _json_record(
    inspected: InspectedCheckpoint, tensors: dict[str, TensorInfo], tied: dict[str, str], depth: int | None
) -> dict[str, object]:
    manifest, files, lineage = inspected.manifest, inspected.file_sizes(), _find_lineage(inspected)
    abandoned_by = lineage.abandoned_by if lineage else None
    return {
        "path": str(inspected.path),
        "format": inspected.reader.format,
        "family": inspected.reader.describe_family() if isinstance(inspected.reader, FamilyReader) else None,
        "tag": tag_of(inspected.path) if manifest else None,
        "step": manifest.step if manifest else None,
        "sequence": manifest.sequence if manifest else None,
        "incarnation": manifest.incarnation if manifest else None,
        "current": lineage.is_current if lineage else None,
        "saved_by": incarnation_record(lineage.saved_by) if lineage else None,
        "abandoned_by": incarnation_record(abandoned_by) if abandoned_by else None,
        "time": manifest.time if manifest else None,
        "world_size": manifest.provenance.world_size if manifest else None,
        "metrics": inspected.metrics,
        "edits": [
            {"parents": edit.parents, "recipe": edit.recipe} for edit in (manifest.edits if manifest else ()) or ()
        ],
        "bytes": sum(files.values()),
        "files": [{"path": str(file), "bytes": size} for file, size in files.items()],
        "tensors": [
            {"name": name, "dtype": info.dtype, "shape": list(info.value_shape), "bytes": info.nbytes}
            for name, info in tensors.items()
        ],
        "tied": tied,
        "notes": list(inspected.notes),
        "modules": [
            {"group": module.group, "module": module.name or None, "tensors": module.tensors, "bytes": module.nbytes}
            for module in summarize_modules(inspected.reader.groups, depth)
        ],
        "values": as_plain_value(inspected.read_values().shared),
    }
