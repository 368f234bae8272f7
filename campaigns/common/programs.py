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


def ask(*command: str) -> str:
    """Run a program that may fail, and return what it printed."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def start(*command: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a program that goes on. What it prints is appended to a file."""
    with log.open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)
