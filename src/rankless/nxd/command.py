"""``rankless nxd-convert-zero-checkpoints``: NxD's offline converter, with the same flags.

The command line names it (:mod:`rankless.cli.commands`); it runs in one process.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rankless.cli.command_process import leave_on_interrupt
from rankless.errors import InvalidArgumentError
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.storage.posix import local_path


def nxd_convert_zero_checkpoints(  # noqa: PLR0917 - the options of a command
    input_dir: Annotated[str, typer.Option("--input_dir", help="One NxD checkpoint: the folder of a tag.")],
    output_dir: Annotated[str, typer.Option("--output_dir", help="Output path; must not exist.")],
    dp_size: Annotated[
        int | None, typer.Option("--dp_size", help="Number of data-parallel ranks of the output.")
    ] = None,
    num_workers: Annotated[int, typer.Option("--num_workers", help="Ignored: threads share the work.")] = 1,
    to_full: Annotated[
        bool, typer.Option("--convert_to_full", help="Write the whole state, for any number of ranks.")
    ] = False,
    to_sharded: Annotated[bool, typer.Option("--convert_to_sharded", help="Write shards for --dp_size ranks.")] = False,
) -> None:
    """Convert the ZeRO-1 state of an NxD checkpoint, and copy its other files. The input is only read."""
    del num_workers
    if to_full == to_sharded:
        raise InvalidArgumentError("pass either --convert_to_full or --convert_to_sharded")
    if to_sharded and dp_size is None:
        raise InvalidArgumentError(
            "--convert_to_sharded needs --dp_size, the number of data-parallel ranks to shard for"
        )
    with leave_on_interrupt():
        from rankless.nxd.offline_zero_conversion import ZeroRequest, convert_zero_checkpoints  # noqa: PLC0415 - importing torch is slow

    output = convert_zero_checkpoints(
        ZeroRequest(local_path(input_dir), local_path(output_dir), dp_size if to_sharded else None)
    )
    terminal_console().print(escape_control_characters(str(output)))
