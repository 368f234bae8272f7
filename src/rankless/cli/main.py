"""The command ``rankless``, and the only place that turns errors into messages and exit codes.

The exit codes are in the help and in docs/cli.md.

:mod:`rankless.cli.entry` calls it; the commands of :mod:`rankless.nxd` and :mod:`rankless.lightning` run it, too.
Scripts depend on the exit codes: they must stay.
"""

from __future__ import annotations

import gc
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rankless.cli.command_process import (
    INTERRUPTED,
    OUTPUT_CLOSED,
    discard_output,
    ignore_interrupt,
    leave_on_interrupt,
    open_missing_streams,
    raise_on_interrupt,
    unwind_on_signals,
)
from rankless.cli.commands import COMMANDS, SETTINGS, LazyCommands, is_on_terminal
from rankless.errors import FormatError, InvalidArgumentError, NoCheckpointError, RanklessError, TagExistsError
from rankless.torch_import import explain_imports

#: Errors that the caller can fix by other arguments.
_USAGE_ERRORS = (FormatError, InvalidArgumentError, NoCheckpointError, TagExistsError)

_FAILED, _WRONG_USAGE = 1, 2


class Commands(TyperGroup):
    """The group of all commands. It catches expected errors, so that no command prints a traceback for them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, without importing them."""
        del ctx
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write ``--help``, in colour on a terminal, without importing the commands."""
        if not is_on_terminal():
            super().format_help(ctx, formatter)
            return
        from typer.rich_utils import rich_format_help  # noqa: PLC0415 - slow to import, and not needed for pipes

        commands: dict[str, Any] = {
            name: TyperCommand(name, help=command.summary) for name, command in COMMANDS.items()
        }
        outline = TyperGroup(name=self.name, help=self.help, epilog=self.epilog, params=self.params, commands=commands)
        rich_format_help(obj=outline, ctx=ctx, markup_mode="rich")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands in ``--help``, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An expected error ends it with a message and an exit code."""
        try:
            with raise_on_interrupt(), explain_imports("this command"):
                return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(OUTPUT_CLOSED) from None
        except (RanklessError, OSError) as error:
            _report_error(error)
            raise typer.Exit(_WRONG_USAGE if isinstance(error, _USAGE_ERRORS) else _FAILED) from None
        except KeyboardInterrupt:
            _report_error("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def _report_error(error: Exception | str) -> None:
    from rankless.cli.output import print_error  # noqa: PLC0415 - rich is slow to import, and not needed for --help

    print_error(error)


def _show_warning(message: Warning | str, *_: object) -> None:
    """Print a warning as a line for the user, without the line of code that caused it."""
    from rankless.cli.output import print_warning  # noqa: PLC0415 - rich is slow to import

    print_warning(message)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=(
        "Exit codes: 0: success; 1: something is corrupt, different or missing, or could not be read or written; "
        "2: wrong usage, or nothing at the path; 3: drain: parts of other hosts are missing; "
        "130: interrupted by Ctrl-C; 129, 143: ended by SIGHUP or SIGTERM; "
        "141: the reader of the output closed the pipe."
    ),
    **SETTINGS,
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from rankless._version import __version__  # noqa: PLC0415 - reads package metadata, which nothing else needs

        print(f"rankless {__version__}")
        raise typer.Exit


@app.callback()
def _define_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Inspect, verify, compare, convert and remove checkpoints of distributed PyTorch training."""


#: Objects between two passes of the garbage collector. With Python's 700, half of the time of a command that lists
#: 300,000 tensors is in passes that find nothing (measured).
_GC_THRESHOLD = 200_000


def main() -> None:
    """Run the command of the arguments, and end the process with its exit code."""
    gc.set_threshold(_GC_THRESHOLD)
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may have characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        _run_app()
    except BrokenPipeError:
        discard_output()
        sys.exit(OUTPUT_CLOSED)
    except OSError as error:
        discard_output()
        _report_error(error)
        sys.exit(_FAILED)
    finally:
        ignore_interrupt()


def _run_app() -> None:
    with leave_on_interrupt(), unwind_on_signals(), warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        try:
            app(prog_name="rankless")
        finally:
            sys.stdout.flush()  # so that write errors are reported here, not at interpreter exit
