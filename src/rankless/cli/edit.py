"""``rankless edit``: writes a changed copy of a checkpoint, with its optimizer states. It runs in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankless.cli.checkpoint_argument import Tag, resolve_path
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import EDIT_FORMATS, complete_checkpoints, complete_edit_formats
from rankless.cli.convert import parse_keys, print_result, show_conversion
from rankless.cli.output import print_json
from rankless.errors import InvalidArgumentError
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count
from rankless.ondisk.data_files import SHARD_SIZE, parse_size
from rankless.storage.location import parse_location

if TYPE_CHECKING:
    from rankless.edits.apply_edits import EditReport


def edit(  # noqa: PLR0917 - the options of a command
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint of any format, or a run's folder for its latest one.",
            autocompletion=complete_checkpoints,
        ),
    ],
    edits: Annotated[
        list[str] | None, typer.Argument(metavar="EDIT", help="A verb with its arguments: 'resize-vocab 50304'.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="OUTPUT", help="The output path; must not exist.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE", help="A TOML file with the edits instead: tables [[edit]].")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would change.")] = False,
    tag: Tag = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="One of " + ", ".join(EDIT_FORMATS) + ".", autocompletion=complete_edit_formats
        ),
    ] = "native",
    model_only: Annotated[bool, typer.Option("--model-only", help="Write only the model.")] = False,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="PART=PATH", help="The path of a component in the source. May be repeated."),
    ] = None,
    layout: Annotated[str | None, typer.Option(help="The layout of a source of NxD or Megatron.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="The training step of the output.")] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The maximum bytes of tensors in one file.")
    ] = SHARD_SIZE,
    verify: Annotated[bool, typer.Option(help="Read the output back.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Write a changed copy of a checkpoint: weights, optimizer states, parameter groups and configuration.

    The edits take effect in their order, in one pass: average, cast, dequantise, freeze, layers, rename, resize-vocab,
    unfreeze, upcycle. CHECKPOINT is only read.
    """
    if bool(edits) == bool(recipe):
        raise InvalidArgumentError("pass edits such as 'resize-vocab 50304', or --recipe FILE")
    if bool(output) == dry_run:
        raise InvalidArgumentError("pass one of --output PATH and --dry-run, which only shows what would change")
    chosen: str | list[str] = recipe or edits or []
    source, keys = resolve_path(checkpoint, tag), parse_keys(key)
    options: dict[str, Any] = {"to": to, "model_only": model_only, "keys": keys, "layout": layout, "step": step}
    parse_size(max_shard_size)
    if output is None:
        _print_report(_explain(source, chosen, options), as_json=as_json)
        return
    options |= {"max_shard_size": max_shard_size, "verify": verify}
    _write(source, parse_location(output), chosen, options)
    print_result(parse_location(output), to, as_json=as_json)


def _explain(source: Path, edits: str | Sequence[str], options: Mapping[str, Any]) -> EditReport:
    with leave_on_interrupt():
        from rankless.conversion.edit import explain_edit  # noqa: PLC0415 - slow to import
    return explain_edit(source, edits, **options)


def _write(source: Path, output: Path, edits: str | Sequence[str], options: Mapping[str, Any]) -> None:
    with leave_on_interrupt():
        from rankless.conversion.edit import edit as edit_checkpoint  # noqa: PLC0415 - slow to import
    with show_conversion(source) as show_event:
        edit_checkpoint(source, output, edits, on_event=show_event, process_group="self", **options)


def _print_report(report: EditReport, *, as_json: bool) -> None:
    if as_json:
        print_json({"changes": list(report.lines), "groups": list(report.totals), "new": list(report.reconstructed)})
        return
    console = terminal_console()
    for line in (*(report.lines or ["nothing would change"]), "", *report.totals):
        console.print(escape_control_characters(line), highlight=False, markup=False)
    if report.reconstructed:
        new = format_count(len(report.reconstructed), "thing")
        console.print(f"new, and in no checkpoint: {new}", highlight=False)
        for name in report.reconstructed:
            console.print(f"  {escape_control_characters(name)}", highlight=False, markup=False)
