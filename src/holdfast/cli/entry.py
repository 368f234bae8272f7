"""The entry point of the script. It handles Ctrl-C before the slow imports."""

from __future__ import annotations

from holdfast.cli.process import leave_on_interrupt

with leave_on_interrupt():
    from holdfast.cli.main import main

__all__ = ["main"]
