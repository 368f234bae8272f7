"""Calls of the command line in this process, and in one that must not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from rankless.cli.main import app


def assert_needs_no_torch(*command: str) -> None:
    """A command that works without torch and without NumPy."""
    code = (
        f"import sys\nsys.argv = {['rankless', *command]!r}\nfrom rankless.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def invoke(*args: object, code: int = 0, columns: int | None = None) -> Any:
    """Run a command in this process; ``columns`` is the width asked for by the environment."""
    env = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner().invoke(app, [str(arg) for arg in args], env=env)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def invoke_json(*args: object, code: int = 0) -> Any:
    return json.loads(invoke(*args, "--json", code=code).stdout)
