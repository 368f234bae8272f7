"""Running of other programs."""

from __future__ import annotations

import subprocess
from pathlib import Path


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a program, and return what it printed. Raises ``RuntimeError`` with its messages if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout
