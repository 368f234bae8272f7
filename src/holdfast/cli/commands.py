"""Which commands there are. Each is imported when it is called: ``--help`` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer

from holdfast.cli.process import leave_on_interrupt


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command: the function of its name in ``module``, what it does in a line, and how it is called."""

    module: str
    summary: str
    example: str


COMMANDS: Mapping[str, CommandSpec] = {
    "ls": CommandSpec("ls", "List the checkpoints of a run.", "holdfast ls runs/a --all"),
    "show": CommandSpec("show", "Show what is in a checkpoint.", "holdfast show runs/a 'model/*.bias'"),
    "verify": CommandSpec("verify", "Read every byte, check every CRC.", "holdfast verify runs/a/step_1000"),
    "diff": CommandSpec("diff", "Tell two checkpoints apart.", "holdfast diff runs/a/step_1000 runs/b/step_1000"),
    "convert": CommandSpec(
        "convert", "Write a checkpoint in another format.", "holdfast convert runs/a out --to hf --dtype bfloat16"
    ),
    "consolidate": CommandSpec(
        "convert",
        "Make one file of a checkpoint.",
        "holdfast consolidate logs/epoch=0-step=3.ckpt --output_file all.ckpt",
    ),
    "nxd-convert-zero-checkpoints": CommandSpec(
        "nxd",
        "Convert a ZeRO-1 state of NeuronX Distributed.",
        "holdfast nxd-convert-zero-checkpoints --input_dir ckpt/step_10 --output_dir ckpt4/step_10 "
        "--convert_to_sharded --dp_size 4",
    ),
    "prune": CommandSpec("prune", "Remove old checkpoints.", "holdfast prune runs/a --keep 5 --leftovers --dry-run"),
}

#: How every command speaks.
SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def is_on_terminal() -> bool:
    """Whether help is in colour. Elsewhere it is plain: rich's takes as long to import as all the rest."""
    return sys.stdout.isatty()


class LazyCommands(Mapping[str, Any]):
    """The commands by name, each made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        command = COMMANDS[name]
        with leave_on_interrupt():
            function = getattr(import_module(f"holdfast.cli.{command.module}"), name.replace("-", "_"))
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich" if is_on_terminal() else None, **SETTINGS)
        alone.command(name, epilog=f"Example: {command.example}")(function)
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)
