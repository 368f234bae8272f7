"""An environment in which torch is not installed, and programs that run in it."""

from __future__ import annotations

import os
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

import rankless

#: What rankless depends on.
_DEPENDENCIES = ("awscrt", "msgspec", "numpy", "rich", "safetensors", "typer")


def make_environment(folder: Path) -> Path:
    """Return the interpreter of an environment with the dependencies of rankless, linked from this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen: set[str] = set()
    for name in _DEPENDENCIES:
        for path in _files_of(name, seen):
            if path.name != "__pycache__" and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
    (packages / "rankless.pth").write_text(f"{Path(rankless.__file__).parents[1]}\n")
    return folder / "bin/python"


def _files_of(name: str, seen: set[str]) -> set[Path]:
    """Return the top-level files and folders of a distribution and of all that it requires."""
    if name in seen:
        return set()
    seen.add(name)
    try:
        found = distribution(name)
    except PackageNotFoundError:  # required on another system only
        return set()
    tops = {Path(str(found.locate_file(file.parts[0]))) for file in found.files or () if file.parts[0] != ".."}
    requirements = map(Requirement, found.requires or ())
    wanted = [item.name for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    return tops.union(*(_files_of(item, seen) for item in wanted))


def run(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=python.parent)
