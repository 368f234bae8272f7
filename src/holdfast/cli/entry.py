"""The entry point of the script: what takes its time is imported when Ctrl-C is already taken care of."""

from __future__ import annotations

from holdfast.cli.process import leave_on_interrupt

with leave_on_interrupt():
    from holdfast.cli.main import main

__all__ = ["main"]
