"""``rankless convert`` writes another format; ``rankless consolidate`` merges a sharded checkpoint into one file.

Both run in one process; :mod:`rankless.cli.export` uses the progress bar and the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rankless.cli.checkpoint_argument import Tag, resolve_path
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import FORMATS, complete_checkpoints, complete_dtypes, complete_formats
from rankless.cli.output import print_json
from rankless.errors import InvalidArgumentError
from rankless.observe.events import Event, OnEvent, Progress
from rankless.observe.terminal import escape_control_characters, progress_bar, terminal_console
from rankless.observe.units import format_size
from rankless.ondisk.data_files import SHARD_SIZE
from rankless.storage.location import parse_location
from rankless.storage.store import count_stored_bytes

#: The format of each file suffix. All other suffixes mean Lightning.
_FORMATS_BY_SUFFIX = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}

_Source = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint of any format, or a run's folder for its latest one.",
        autocompletion=complete_checkpoints,
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
_Only = Annotated[bool, typer.Option("--model-only", help="Convert only the model.")]


def convert(  # noqa: PLR0917 - the options of a command
    checkpoint: _Source,
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The output path; must not exist.")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="One of " + ", ".join(FORMATS) + ".", autocompletion=complete_formats)
    ],
    tag: Tag = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Convert only these parameters. May be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave out these parameters. May be repeated.")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=TEXT", help="Rename parameters. May be repeated.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Cast the model to bfloat16, float16, float32, …", autocompletion=complete_dtypes
        ),
    ] = None,
    model_only: _Only = False,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART=PATH", help="The path of a component in the source: model=app.net. May be repeated."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="NxD: the layout of sharded parameters: llama, mixtral, gpt-neox, or a spec file. Megatron: hf."
        ),
    ] = None,
    tp_size: Annotated[int | None, typer.Option(help="NxD: the number of tensor-parallel ranks; default: 1.")] = None,
    pp_size: Annotated[int | None, typer.Option(help="NxD: the number of pipeline stages; default: 1.")] = None,
    dp_size: Annotated[
        int | None, typer.Option(help="NxD: the number of data-parallel ranks of a ZeRO-1 optimizer.")
    ] = None,
    xser: Annotated[
        bool | None, typer.Option("--xser/--no-xser", help="NxD: one file per tensor (default), or one per rank.")
    ] = None,
    master_weights: Annotated[
        bool | None,
        typer.Option("--master-weights/--no-master-weights", help="NxD: whether the ZeRO-1 state has master weights."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="To megatron: the config.json of the model; default: the source's."),
    ] = None,
    vocab_divisible_by: Annotated[
        int | None, typer.Option(metavar="N", help="To megatron: pad the embedding with rows of zeros.")
    ] = None,
    consumed_samples: Annotated[
        int | None, typer.Option(metavar="N", help="To megatron: the samples that the training has consumed.")
    ] = None,
    expert_parallel: Annotated[
        bool | None,
        typer.Option("--expert-parallel", help="To megatron: the optimizer is for a training with expert parallelism."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The training step, if the source does not name it.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The maximum bytes of tensors in one file.")
    ] = SHARD_SIZE,
    verify: Annotated[bool, typer.Option(help="Read the output back.")] = True,
    merge: Annotated[
        bool, typer.Option("--merge", help="hf: merge the PEFT adapter into the weights. Needs peft and transformers.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint of any format in another format, one buffer at a time. CHECKPOINT is only read."""
    if merge:
        _check_merge(to, [include, exclude, rename, dtype, key, layout])
        _merge_adapters(resolve_path(checkpoint, tag), parse_location(output), max_shard_size, as_json=as_json)
        return
    options: dict[str, Any] = {"include": include, "exclude": exclude, "dtype": dtype, "model_only": model_only}
    options |= {"rename": _parse_pairs(rename, "--rename"), "keys": parse_keys(key), "verify": verify}
    format_options = {
        "tp_size": tp_size,
        "pp_size": pp_size,
        "dp_size": dp_size,
        "xser": xser,
        "master_weights": master_weights,
        "config": config,
        "vocab_divisible_by": vocab_divisible_by,
        "consumed_samples": consumed_samples,
        "expert_parallel": expert_parallel,
    }
    options |= {name: value for name, value in format_options.items() if value is not None}  # other formats refuse them
    options["layout"] = layout
    options |= {"to": to, "max_shard_size": max_shard_size}
    options["step"] = step
    _run_conversion(resolve_path(checkpoint, tag), parse_location(output), options, as_json=as_json)


def consolidate(
    checkpoint: _Source,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The output; its suffix selects the format: .ckpt, .pt, .safetensors.",
        ),
    ] = None,
    tag: Tag = None,
    model_only: _Only = False,
    as_json: _Json = False,
) -> None:
    """Merge a sharded checkpoint into one file.

    It is a Lightning .ckpt, a file of torch.save (.pt, .pth, .bin), or .safetensors.
    """
    src = resolve_path(checkpoint, tag)
    dst = parse_location(output) if output else src.with_name(src.name + ".consolidated")
    to = _FORMATS_BY_SUFFIX.get(dst.suffix, "lightning")
    _run_conversion(src, dst, {"to": to, "model_only": model_only or to == "safetensors"}, as_json=as_json)


def _check_merge(to: str, other_options: list[Any]) -> None:
    if to != "hf" or any(other_options):
        raise InvalidArgumentError(
            "--merge writes a Hugging Face folder of the whole model: pass --to hf without "
            "options that select, rename or cast"
        )


def _merge_adapters(src: Path, dst: Path, max_shard_size: str, *, as_json: bool) -> None:
    with leave_on_interrupt():
        from rankless.components.merged_export import merge_adapters  # noqa: PLC0415 - torch is slow
    merge_adapters(src, dst, max_shard_size=max_shard_size)
    print_result(dst, "hf", as_json=as_json)


def _run_conversion(src: Path, dst: Path, options: dict[str, Any], *, as_json: bool) -> None:
    with leave_on_interrupt():
        from rankless.conversion.convert import convert as convert_checkpoint  # noqa: PLC0415 - torch is slow

    with show_conversion(src) as show_event:
        convert_checkpoint(src, dst, on_event=show_event, **options)
    print_result(dst, options["to"], as_json=as_json)


@contextmanager
def show_conversion(src: Path) -> Iterator[OnEvent]:
    """Show a progress bar, and yield the listener of the conversion that drives it."""
    with progress_bar(f"converting {src.name}") as show:

        def show_event(event: Event) -> None:
            if isinstance(event, Progress):
                show(event.done, event.total)

        yield show_event


def print_result(dst: Path, to: str, *, as_json: bool) -> None:
    """Print the path, the format and the size of an output."""
    size = count_stored_bytes(dst)
    if as_json:
        print_json({"path": str(dst), "to": to, "bytes": size})
    else:
        terminal_console().print(f"{escape_control_characters(str(dst))}  {to}, {format_size(size)}")


def parse_keys(given: list[str] | None) -> dict[str, str]:
    """Return the paths of components in another system's checkpoint, given the options ``--key``."""
    keys = _parse_pairs(given, "--key")
    if not all(part and path for part, path in keys.items()):
        raise InvalidArgumentError("--key takes PART=PATH, such as model=app.net; neither may be empty")
    return keys


def _parse_pairs(given: list[str] | None, option: str) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in given or [])
    if any("=" not in text for text in given or []):
        raise InvalidArgumentError(f"{option} takes NAME=VALUE: '=' is missing")
    return pairs
