"""``rankless export``: writes a model as a folder that can be uploaded to the Hugging Face Hub.

It calls :func:`rankless.export_model` in one process.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rankless.cli.checkpoint_argument import Tag, resolve_path
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import complete_checkpoints, complete_dtypes
from rankless.cli.convert import print_result, show_conversion


def export(  # noqa: PLR0917 - the options of a command
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's folder, or a checkpoint of any format.", autocompletion=complete_checkpoints
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write; must not exist.")
    ],
    tag: Tag = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model, if the checkpoint has several.")] = None,
    config: Annotated[
        str | None, typer.Option(metavar="PATH", help="A config.json; default: that of the checkpoint.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="FOLDER", help="The files of a tokenizer.")] = None,
    card: Annotated[
        str | None, typer.Option(metavar="FILE", help="The model card; default: one that names the checkpoint.")
    ] = None,
    license_id: Annotated[str, typer.Option("--license", metavar="ID", help="For the card, such as apache-2.0.")] = "",
    base_model: Annotated[str, typer.Option(metavar="NAME", help="For the card: the model this one began from.")] = "",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Cast to bfloat16, float16, float32, …", autocompletion=complete_dtypes),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The maximum bytes of tensors in one file.")
    ] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Write a model folder for the Hugging Face Hub: weights, configuration, tokenizer and model card.

    Of a model with PEFT adapters the folder has the adapters; to merge them first, use rankless convert --merge.
    """
    with leave_on_interrupt():
        from rankless.conversion.hub_export import export_model  # noqa: PLC0415 - torch is slow

    src = resolve_path(run, tag)
    with show_conversion(src) as show_event:
        path = export_model(
            src,
            output,
            model=model,
            config=config,
            tokenizer=tokenizer,
            card=card,
            license=license_id,
            base_model=base_model,
            dtype=dtype,
            max_shard_size=max_shard_size,
            on_event=show_event,
        )
    print_result(path, "hub", as_json=as_json)
