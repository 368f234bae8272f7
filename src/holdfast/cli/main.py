"""``holdfast``: its commands, and the one place where errors become messages and exit codes.

Exit codes are in the help, and in docs/guides/command-line.md.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.cli.commands import COMMANDS, SETTINGS, LazyCommands, is_on_terminal
from holdfast.cli.process import (
    INTERRUPTED,
    UNREAD,
    discard_output,
    ignore_interrupt,
    leave_on_interrupt,
    open_missing_streams,
    raise_on_interrupt,
    unwind_on_signals,
)
from holdfast.errors import FormatError, HoldfastError, InvalidArgumentError, NoCheckpointError, TagExistsError

#: Errors that the caller can mend by calling otherwise.
_MISUSE = (FormatError, InvalidArgumentError, NoCheckpointError, TagExistsError)

_FAILED, _CALLED_WRONGLY = 1, 2


class Commands(TyperGroup):
    """Catches what any command raises, so that none prints a traceback for what the user did or the disk has."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, none of them imported."""
        del ctx
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """``--help``: in colour on a terminal, with a stand-in for each command, none of them imported."""
        if not is_on_terminal():
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
            with raise_on_interrupt():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(UNREAD) from None
        except (HoldfastError, OSError) as error:
            _say(error)
            raise typer.Exit(_CALLED_WRONGLY if isinstance(error, _MISUSE) else _FAILED) from None
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def _say(error: Exception | str) -> None:
    from holdfast.cli.output import print_error  # noqa: PLC0415 - rich takes its time, and --help needs none of it

    print_error(error)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=(
        "Exit codes: 0; 1: something is wrong, different or missing in what was looked at, or could not be written; "
        "2: called wrongly, or there is nothing at the path; 130: interrupted by Ctrl-C; 129, 143: ended by SIGHUP or "
        "SIGTERM; 141: whoever read the output went away."
    ),
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
    """Run the command that the arguments name, and end the process with its exit code."""
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of any script, on a terminal of any encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        _run()
    except BrokenPipeError:
        discard_output()
        sys.exit(UNREAD)
    except OSError as error:
        discard_output()
        _say(error)
        sys.exit(_FAILED)
    finally:
        ignore_interrupt()


def _run() -> None:
    with leave_on_interrupt(), unwind_on_signals():
        try:
            app(prog_name="holdfast")
        finally:
            sys.stdout.flush()  # what cannot be written is told here, and not when the interpreter ends
