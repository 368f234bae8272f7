"""``python -m holdfast.lightning.consolidate_checkpoint``: the command of Lightning's guide, for all its folders."""

from __future__ import annotations

import typer

from holdfast.cli.convert import consolidate
from holdfast.cli.main import Commands

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
app.command()(consolidate)

if __name__ == "__main__":
    app()
