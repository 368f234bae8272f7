"""The entry point of the script. It handles Ctrl-C before the slow imports.

The script ``rankless`` and ``python -m rankless`` call it.
"""

from __future__ import annotations

from rankless.cli.command_process import leave_on_interrupt

with leave_on_interrupt():
    from rankless.cli.main import main

__all__ = ["main"]
