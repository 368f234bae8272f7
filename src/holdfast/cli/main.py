"""``holdfast``: its commands, and the one place where errors become messages and exit codes.

Exit codes: 0, 1 (it found something wrong), 2 (it was called wrongly).
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holdfast._version import __version__
from holdfast.cli import convert, ls, nxd, prune, show, verify
from holdfast.cli.output import print_error
from holdfast.errors import FormatError, HoldfastError, InvalidArgumentError, NoCheckpointError, TagExistsError

#: Errors that the caller can mend by calling otherwise.
_MISUSE = (FormatError, InvalidArgumentError, NoCheckpointError, TagExistsError)


class Commands(TyperGroup):
    """Catches what any command raises, so that none prints a traceback for what the user did or the disk has."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an expected error ends it with a message and the fitting exit code."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (HoldfastError, OSError) as error:
            print_error(error)
            raise typer.Exit(2 if isinstance(error, _MISUSE) else 1) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0, 1 (it found something wrong) or 2 (it was called wrongly).",
)
app.command(epilog="Example: holdfast ls runs/a --all")(ls.ls)
app.command(epilog="Example: holdfast show runs/a 'model/*.bias'")(show.show)
app.command(epilog="Example: holdfast verify runs/a/step_1000")(verify.verify)
app.command(epilog="Example: holdfast convert runs/a out --to hf --dtype bfloat16")(convert.convert)
app.command(epilog="Example: holdfast consolidate logs/epoch=0-step=3.ckpt --output_file all.ckpt")(convert.consolidate)
app.command(
    "nxd-convert-zero-checkpoints",
    epilog="Example: holdfast nxd-convert-zero-checkpoints --input_dir ckpt/step_10 --output_dir ckpt4/step_10 "
    "--convert_to_sharded --dp_size 4",
)(nxd.convert_zero_checkpoints)
app.command(epilog="Example: holdfast prune runs/a --keep 5 --leftovers --dry-run")(prune.prune)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at checkpoints of distributed PyTorch training, check them, convert them, and tidy up."""


def main() -> None:
    """The entry point of the script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of any script, on a terminal of any encoding
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="holdfast")
