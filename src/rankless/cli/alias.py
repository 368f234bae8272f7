"""``rankless alias``: gives a checkpoint a further name, lists these names, or removes one.

It is run in one process, at any time, next to jobs that save.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rankless.cli.checkpoint_argument import check_run
from rankless.cli.completion import complete_checkpoints
from rankless.cli.output import print_json
from rankless.cli.table import Column, Table
from rankless.errors import InvalidArgumentError
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.run.aliases import delete_alias, list_meant
from rankless.run.catalog import list_checkpoints
from rankless.run.tag_arguments import give_alias
from rankless.storage.location import parse_location


def alias(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=complete_checkpoints)],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The alias. Without it all aliases are listed.")
    ] = None,
    tag: Annotated[
        str | None, typer.Argument(metavar="TAG", help="The checkpoint; default: the latest of the run.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias; the checkpoint stays.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Give a checkpoint a further name, such as "production", for --tag and for Python.

    Retention and prune do not remove a checkpoint that has an alias.
    """
    path = parse_location(run)
    check_run(path)
    if remove and (name is None or tag is not None):
        raise InvalidArgumentError("--remove needs the name of an alias, and no tag")
    out = terminal_console()
    if name is not None and remove:
        delete_alias(path, name)
    elif name is not None:
        tag = give_alias(path, name, tag).tag
    meant = list_meant(path, list_checkpoints(path))
    aliases = {known: escape_control_characters(of) for known, of in meant.items()}
    if as_json:
        print_json({"aliases": aliases})
    elif name is None:
        rows = [(escape_control_characters(known), meant) for known, meant in aliases.items()]
        out.print(Table([Column("alias"), Column("checkpoint")], rows), end="")
    elif remove:
        out.print(f"removed the alias {escape_control_characters(name)}")
    else:
        out.print(f"{escape_control_characters(name)} means {tag}")
