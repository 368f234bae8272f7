"""``python -m campaigns.near``: prints the files of tests that can reach what has changed, for ``make test-near``.

A test reaches a module that it imports, directly or not, and a file or a folder that it names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from campaigns.imports import ROOT, Code, Imports, is_test, list_named_paths, read_code, read_imports

#: They need packages that their own commands install.
_APART = ("tests.frameworks.", "tests.peers.", "tests.browser.")


def main() -> int:
    """Print one file a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base", default="HEAD", help="what has changed since this commit, and since the branch left main"
    )
    base = parser.parse_args().base
    for file in select_tests(list_changes(base), read_imports(), ROOT):
        print(file)
    return 0


def list_changes(base: str) -> set[str]:
    """Return the paths that differ from ``base`` or from where the branch left main, with new and removed files."""
    origin = _git("merge-base", "HEAD", "main", check=False)
    changes = [_git("diff", "--name-only", commit) for commit in {base, *origin.split()}]
    changes.append(_git("ls-files", "--others", "--exclude-standard"))
    return {path for lines in changes for path in lines.splitlines()}


def select_tests(changed: Collection[str], imports: Imports, root: Path) -> list[str]:
    """Return the files of tests that can reach one of the paths ``changed``, relative to ``root``."""
    paths = {module: file.relative_to(root).as_posix() for module, file in imports.files.items()}
    modules = {module for path in changed for module in _list_modules(path, paths)}
    reached = imports.distances(modules).keys()
    # The conftest of the top folder is in no package: imports do not have it.
    folders = {path.parent for path in map(PurePosixPath, changed) if path.name == "conftest.py"}
    folders |= {
        PurePosixPath(paths[module]).parent
        for module in paths
        if module.endswith(".conftest") and (module in modules or imports.direct[module] & modules)
    }
    return sorted(
        path
        for module, path in paths.items()
        if is_test(module) and not module.startswith(_APART)
        if module in reached
        or folders.intersection(PurePosixPath(path).parents)
        or names_path(read_code(imports.files[module]), changed)
    )


def names_path(test: Code, changed: Collection[str]) -> bool:
    """Return whether ``test`` names one of the paths, a folder above it, or a page of the top folder without suffix."""
    named = list_named_paths(test)
    for path in map(PurePosixPath, changed):
        above = {str(parent) for parent in path.parents} - {"."}
        if named & ({str(path), path.name} if path.suffix != ".py" else {str(path)}) or named & above:
            return True
        if path.suffix == ".md" and path.with_suffix("").as_posix() in named:
            return True
    return False


def _list_modules(path: str, paths: dict[str, str]) -> Collection[str]:
    """Return the module at ``path``; of a data file, the modules of the package around it."""
    for folder in [PurePosixPath(path), *PurePosixPath(path).parents]:
        if folder.name and (
            modules := [m for m, file in paths.items() if folder in {PurePosixPath(file), PurePosixPath(file).parent}]
        ):
            return modules
    return []


def _git(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=check)  # noqa: S607
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
