"""``holdfast convert``: from any format to any other; ``holdfast consolidate``: a sharded folder into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.completion import FORMATS, complete_checkpoints, complete_dtypes, complete_formats
from holdfast.cli.output import print_json
from holdfast.cli.process import leave_on_interrupt
from holdfast.cli.target import Tag, named_path
from holdfast.errors import InvalidArgumentError
from holdfast.observe.events import Event, Progress
from holdfast.observe.terminal import escape_control_characters, progress_bar, terminal_console
from holdfast.observe.units import format_size
from holdfast.storage.posix import local_path, size_of, walk_files

#: What a file's ending says of its format; anything else is Lightning's.
_ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}

_Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="A checkpoint of any format, or a run: its latest.", autocompletion=complete_checkpoints
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
_Only = Annotated[bool, typer.Option("--model-only", help="Nothing but the model.")]


def convert(  # noqa: PLR0917 - the options of a command
    src: _Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="A path where there is nothing yet.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help=", ".join(FORMATS) + ".", autocompletion=complete_formats)],
    tag: Tag = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Parameters to take. May be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Parameters to leave out. May be repeated.")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=TEXT", help="Other names for them. May be repeated.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Of the model: bfloat16, float16, float32, …", autocompletion=complete_dtypes
        ),
    ] = None,
    model_only: _Only = False,
    key: Annotated[
        list[str] | None, typer.Option(metavar="PART=PATH", help="Where a part is: model=app.net. May be repeated.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="How NxD's ranks divide parameters: llama, mixtral, gpt-neox, or a spec file.")
    ] = None,
    tp_size: Annotated[int | None, typer.Option(help="Of nxd: tensor-parallel ranks; 1 without it.")] = None,
    pp_size: Annotated[int | None, typer.Option(help="Of nxd: stages of the pipeline; 1 without it.")] = None,
    dp_size: Annotated[int | None, typer.Option(help="Of nxd: data-parallel ranks of a ZeRO-1 optimizer.")] = None,
    xser: Annotated[
        bool | None, typer.Option("--xser/--no-xser", help="Of nxd: a file for each tensor, as without it.")
    ] = None,
    master_weights: Annotated[
        bool | None, typer.Option("--master-weights/--no-master-weights", help="Of nxd: in the ZeRO-1 state, too.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of tensors in one file.")] = "5GB",
    verify: Annotated[bool, typer.Option(help="Read back what was written.")] = True,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint of any format as one of another, a buffer at a time. SRC is only read."""
    options: dict[str, Any] = {"include": include, "exclude": exclude, "dtype": dtype, "model_only": model_only}
    options |= {"rename": _pairs(rename, "--rename"), "keys": _keys(key), "verify": verify}
    of_nxd = {
        "tp_size": tp_size,
        "pp_size": pp_size,
        "dp_size": dp_size,
        "xser": xser,
        "master_weights": master_weights,
    }
    options |= {name: given for name, given in of_nxd.items() if given is not None}  # refused for another format
    options["layout"] = layout
    options |= {"to": to, "max_shard_size": max_shard_size}
    _convert(named_path(src, tag), local_path(dst), options, as_json=as_json)


def consolidate(
    checkpoint: _Source,
    output_file: Annotated[
        str | None, typer.Option("--output_file", help="Its ending says the format: .ckpt, .pt, .safetensors")
    ] = None,
    tag: Tag = None,
    model_only: _Only = False,
    as_json: _Json = False,
) -> None:
    """Make one file of a checkpoint: a Lightning .ckpt, a file of torch.save (.pt, .pth, .bin), or .safetensors."""
    src = named_path(checkpoint, tag)
    dst = local_path(output_file) if output_file else src.with_name(src.name + ".consolidated")
    to = _ENDINGS.get(dst.suffix, "lightning")
    _convert(src, dst, {"to": to, "model_only": model_only or to == "safetensors"}, as_json=as_json)


def _convert(src: Path, dst: Path, options: dict[str, Any], *, as_json: bool) -> None:
    with leave_on_interrupt():
        from holdfast.conversion.convert import convert as work  # noqa: PLC0415 - torch takes its time, --help does not

    with progress_bar(f"converting {src.name}") as show:

        def tell(event: Event) -> None:
            if isinstance(event, Progress):
                show(event.done, event.total)

        work(src, dst, on_event=tell, **options)
    size = sum(map(size_of, walk_files(dst)))
    if as_json:
        print_json({"path": str(dst), "to": options["to"], "bytes": size})
    else:
        terminal_console().print(f"{escape_control_characters(str(dst))}  {options['to']}, {format_size(size)}")


def _keys(given: list[str] | None) -> dict[str, str]:
    keys = _pairs(given, "--key")
    if not all(part and path for part, path in keys.items()):
        raise InvalidArgumentError("--key takes PART=PATH, such as model=app.net, and neither is empty")
    return keys


def _pairs(given: list[str] | None, option: str) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in given or [])
    if any("=" not in text for text in given or []):
        raise InvalidArgumentError(f"{option} takes NAME=VALUE")
    return pairs
