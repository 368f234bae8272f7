"""``holdfast``: its commands, and the one place where errors become messages and exit codes.

Exit codes: 0, 1 (it found something wrong or different), 2 (it was called wrongly), 130 (it was interrupted).
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.cli.commands import COMMANDS, SETTINGS, Lazily, on_terminal
from holdfast.errors import FormatError, HoldfastError, InvalidArgumentError, NoCheckpointError, TagExistsError

#: Errors that the caller can mend by calling otherwise.
_MISUSE = (FormatError, InvalidArgumentError, NoCheckpointError, TagExistsError)

#: What shells give for a program that SIGINT has ended.
_INTERRUPTED = 130


class Commands(TyperGroup):
    """Catches what any command raises, so that none prints a traceback for what the user did or the disk has."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = Lazily()

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, none of them imported."""
        del ctx
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """``--help``: in colour on a terminal, with a stand-in for each command, none of them imported."""
        if not on_terminal():
            super().format_help(ctx, formatter)
            return
        from typer.rich_utils import rich_format_help  # noqa: PLC0415 - rich takes its time, and pipes need none of it

        commands: dict[str, Any] = {
            name: TyperCommand(name, help=command.summary) for name, command in COMMANDS.items()
        }
        outline = TyperGroup(name=self.name, help=self.help, epilog=self.epilog, params=self.params, commands=commands)
        rich_format_help(obj=outline, ctx=ctx, markup_mode="rich")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The part of ``--help`` that lists the commands, none of them imported."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an expected error ends it with a message and the fitting exit code."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (HoldfastError, OSError) as error:
            _say(error)
            raise typer.Exit(2 if isinstance(error, _MISUSE) else 1) from None
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(_INTERRUPTED) from None


def _say(error: Exception | str) -> None:
    from holdfast.cli.output import print_error  # noqa: PLC0415 - rich takes its time, and --help needs none of it

    print_error(error)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Exit codes: 0, 1 (something is wrong or different), 2 (called wrongly), 130 (interrupted).",
    **SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from holdfast._version import __version__  # noqa: PLC0415 - metadata of packages, which nothing else needs

        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at checkpoints of distributed PyTorch training, check, compare and convert them, and tidy up."""


def main() -> None:
    """The entry point of the script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of any script, on a terminal of any encoding
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="holdfast")
