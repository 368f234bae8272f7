"""``python -m holdfast.compat.nxd.convert_zero_checkpoints``: NxD's offline converter of ZeRO-1 states."""

from __future__ import annotations

import typer

from holdfast.cli.main import Commands
from holdfast.cli.nxd import convert_zero_checkpoints

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
app.command()(convert_zero_checkpoints)

if __name__ == "__main__":
    app()
