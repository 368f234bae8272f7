"""``python -m campaigns.versions``: the core tests with other versions of Python and torch.

Each pair gets a virtual environment of its own, with pinned versions of the few other packages that these tests need.
Interpreters are looked up by name (``python3.11``) on the PATH, and packages come from where ``pip`` is configured to
look. A pair that cannot be installed is reported with the reason. Needs Python alone, and for each pair 6 to 8 GB in
the folder, unless ``pip`` is given an index with builds of torch for the CPU.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from campaigns.common.case_runner import format_table

ROOT = Path(__file__).parents[1]

#: The packages besides torch and rankless, which brings its own, that the core tests import.
PACKAGES = frozenset(
    {"hypothesis", "jsonschema", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "safetensors", "torchdata"}
    | {"awscrt", "click", "msgspec", "rich", "typer"}
)

#: All tests of rankless itself, and those with torch's own checkpoints.
CORE = (
    *("tests/unit", "tests/distributed", "tests/failure", "tests/golden", "tests/hostile"),
    *("tests/interop/torch", "tests/interop/dcp"),
)

#: A few minutes of these, those that depend on torch most.
SHORT = (
    *("tests/golden", "tests/unit/state", "tests/unit/engine", "tests/distributed/test_layouts.py"),
    *(
        "tests/distributed/test_fsdp1.py",
        "tests/distributed/test_zero_redundancy_optimizer.py",
        "tests/distributed/test_optimizers.py",
    ),
    *("tests/interop/dcp/test_dcp_storage.py", "tests/interop/dcp/test_dcp_writer.py"),
)


@dataclass(frozen=True)
class Pair:
    """A version of Python and one of torch."""

    python: str
    torch: str


#: Every minor version of torch from the oldest supported one on, and every Python.
PAIRS = (
    Pair("3.11", "2.7.0"),
    Pair("3.11", "2.8.0"),
    Pair("3.12", "2.9.1"),
    Pair("3.12", "2.10.0"),
    Pair("3.12", "2.11.0"),
    Pair("3.13", "2.12.1"),
    Pair("3.13", "2.13.0"),
    Pair("3.14", "2.14.1"),
    Pair("3.14", "2.15.0"),
)


@dataclass(frozen=True)
class Outcome:
    """The numbers of tests that passed and failed, or the reason why none ran."""

    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: int = 0
    reason: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether tests failed, or none passed although all was installed."""
        return bool(self.failed) or not (self.passed or self.reason)


class NotInstallableError(Exception):
    """A pair cannot be installed on this machine."""


def main() -> int:
    """Run the tests with all or some pairs, and print a table. Return 1 if tests failed, or none ran."""
    options = _parse_options()
    outcomes = [(pair, _run_pair(pair, options)) for pair in _select_pairs(options)]
    print(format_table(("Python and torch", "passed", "failed", "skipped", "not run because"), _rows(outcomes)))
    for pair, outcome in outcomes:
        for name in outcome.failed:
            print(f"FAILED with Python {pair.python} and torch {pair.torch}: {name}")
    return int(any(outcome.is_failure for _, outcome in outcomes) or all(outcome.reason for _, outcome in outcomes))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="only with this Python, such as 3.11; with --torch: this pair")
    parser.add_argument("--torch", help="only with this torch, such as 2.7.0; with --python: this pair")
    parser.add_argument("--short", action="store_true", help="a selection of a few minutes")
    parser.add_argument("--workers", type=int, default=2, help="how many tests run at a time (default: 2)")
    parser.add_argument("--folder", type=Path, help="for the environments, one at a time (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the environments in --folder, and use them again")
    parser.add_argument("tests", nargs="*", help="these tests (default: the core tests)")
    return parser.parse_args()


def _select_pairs(options: argparse.Namespace) -> Sequence[Pair]:
    if options.python and options.torch:
        return [Pair(options.python, options.torch)]
    return [pair for pair in PAIRS if options.python in {None, pair.python} and options.torch in {None, pair.torch}]


def _run_pair(pair: Pair, options: argparse.Namespace) -> Outcome:
    tests = options.tests or (SHORT if options.short else CORE)
    with tempfile.TemporaryDirectory(prefix="rankless-") as temporary:
        folder = (options.folder or Path(temporary)).absolute() / f"python{pair.python}-torch{pair.torch}"
        try:
            python = _install(pair, folder)
            return _run_tests(python, tests, options.workers, folder / "results.xml")
        except NotInstallableError as error:
            return Outcome(reason=str(error))
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)


def _install(pair: Pair, folder: Path) -> Path:
    """Return the interpreter of an environment with this pair. Raises ``NotInstallableError``."""
    name, python = f"python{pair.python}", folder / "bin/python"
    try:
        _run(name, "--version")  # may also be a launcher without this version behind it
    except (OSError, subprocess.CalledProcessError):
        raise NotInstallableError(f"there is no {name} on the PATH") from None
    if python.exists():
        return python
    print(f"installing torch {pair.torch} for {name}", file=sys.stderr)
    packages = [f"torch=={pair.torch}", *_pinned_packages(), "--editable", str(ROOT)]
    try:
        _run(name, "-m", "venv", folder)
        _run(python, "-m", "pip", "install", "--quiet", *packages)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder, ignore_errors=True)
        lines: list[str] = error.stderr.splitlines()
        raise NotInstallableError(next((line for line in lines if line.startswith("ERROR")), str(error))) from error
    return python


def _run(*command: str | Path) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def _pinned_packages() -> Iterator[str]:
    for line in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").split():
        if line.partition("==")[0] in PACKAGES:
            yield line


def _run_tests(python: Path, tests: Sequence[str], workers: int, results: Path) -> Outcome:
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-n",
        str(workers),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        f"--junitxml={results}",
        *tests,
    ]
    results.unlink(missing_ok=True)
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    return _read_results(results) if results.exists() else Outcome()


def _read_results(results: Path) -> Outcome:
    cases = list(ET.parse(results).iter("testcase"))  # noqa: S314 - pytest has just written it
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = tuple(f"{case.get('classname')}::{case.get('name')}" for case in failed)
    return Outcome(len(cases) - len(failed) - skipped, names, skipped)


def _rows(outcomes: Sequence[tuple[Pair, Outcome]]) -> Iterator[Sequence[object]]:
    for pair, outcome in outcomes:
        numbers = ("", "", "") if outcome.reason else (outcome.passed, len(outcome.failed), outcome.skipped)
        yield f"{pair.python}, {pair.torch}", *numbers, outcome.reason


if __name__ == "__main__":
    sys.exit(main())
