"""The table of commands. Each is imported when it is called, so that ``--help`` is fast.

:mod:`rankless.cli.main` reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from rankless.cli.command_process import leave_on_interrupt


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command: the module with the function of its name, a one-line summary, and an example call."""

    module: str
    summary: str
    example: str


COMMANDS: Mapping[str, CommandSpec] = {
    "ls": CommandSpec("rankless.cli.ls", "List the checkpoints of a run.", "rankless ls runs/a --all"),
    "top": CommandSpec("rankless.cli.top", "Show the saves of a training as they happen.", "rankless top runs/a"),
    "show": CommandSpec(
        "rankless.cli.show.show_command", "Show the contents of a checkpoint.", "rankless show runs/a 'model/*.bias'"
    ),
    "verify": CommandSpec(
        "rankless.cli.verify", "Read every byte and check every CRC.", "rankless verify runs/a/step_1000"
    ),
    "stats": CommandSpec(
        "rankless.cli.stats",
        "Show the range, mean and norm of each tensor, and its NaNs.",
        "rankless stats runs/a 'model/*.weight'",
    ),
    "diff": CommandSpec(
        "rankless.cli.diff.diff_command", "Compare two checkpoints.", "rankless diff runs/a/step_1000 runs/b/step_1000"
    ),
    "report": CommandSpec(
        "rankless.cli.report",
        "Show a run, a checkpoint or a difference as an HTML page.",
        "rankless report runs/a -o report.html",
    ),
    "convert": CommandSpec(
        "rankless.cli.convert",
        "Write a checkpoint in another format.",
        "rankless convert runs/a out --to hf --dtype bfloat16",
    ),
    "edit": CommandSpec(
        "rankless.cli.edit",
        "Write a changed copy of a checkpoint, with its optimizer states.",
        "rankless edit runs/a -o grown/step_1000 'resize-vocab 50304'",
    ),
    "consolidate": CommandSpec(
        "rankless.cli.convert",
        "Merge a sharded checkpoint into one file.",
        "rankless consolidate logs/epoch=0-step=3.ckpt --output all.ckpt",
    ),
    "nxd-convert-zero-checkpoints": CommandSpec(
        "rankless.nxd.command",
        "Convert the ZeRO-1 state of a NeuronX Distributed checkpoint.",
        "rankless nxd-convert-zero-checkpoints --input_dir ckpt/step_10 --output_dir ckpt4/step_10 "
        "--convert_to_sharded --dp_size 4",
    ),
    "export": CommandSpec(
        "rankless.cli.export",
        "Write a model folder for the Hugging Face Hub.",
        "rankless export runs/a --output my-model --tokenizer assets/tokenizer --dtype bfloat16",
    ),
    "alias": CommandSpec(
        "rankless.cli.alias", "Give a checkpoint a further name.", "rankless alias runs/a production step_1000"
    ),
    "rollback": CommandSpec(
        "rankless.cli.rollback", "Let a run go on from an older checkpoint.", "rankless rollback runs/a step_1000"
    ),
    "drain": CommandSpec(
        "rankless.cli.drain",
        "Write what the local tier has into the run directory.",
        "rankless drain runs/a --local /dev/shm/a",
    ),
    "follow": CommandSpec(
        "rankless.cli.follow",
        "Keep a folder at the newest version of published weights.",
        "rankless follow s3://bucket/weights /dev/shm/weights",
    ),
    "prune": CommandSpec(
        "rankless.cli.prune",
        "Remove old checkpoints and leftovers of interrupted saves.",
        "rankless prune runs/a --keep 5 --leftovers --dry-run",
    ),
}

#: The Typer settings of every command.
SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def is_on_terminal() -> bool:
    """Return whether to show help in colour. In pipes help is plain, because rich is slow to import."""
    return sys.stdout.isatty()


class LazyCommands(Mapping[str, Any]):
    """The commands by name. Each is created when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        command = COMMANDS[name]
        with leave_on_interrupt():
            function = getattr(import_module(command.module), name.replace("-", "_"))
        app = typer.Typer(add_completion=False, rich_markup_mode="rich" if is_on_terminal() else None, **SETTINGS)
        app.command(name, epilog=f"Example: {command.example}")(function)
        return typer.main.get_command(app)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)
