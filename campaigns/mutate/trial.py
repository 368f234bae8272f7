"""One mutant: the tests that reach it run in a copy of the tree until one fails."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from campaigns.mutate.forked_pytest import run_pytest
from campaigns.mutate.mutants import Mutant

#: A test that takes longer than these seconds fails, with this word in its message.
_TEST_SECONDS = 180
_TIMEOUT = "from pytest-timeout"

#: The number of files of tests that one process collects. Each further process gets twice as many.
_FIRST_BATCH = 3

#: As pytest's ``-vv`` writes them.
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?$", re.MULTILINE)
_PASSED = re.compile(r"^tests/.* PASSED", re.MULTILINE)

CAUGHT, TIMED_OUT, SURVIVED, UNDECIDED = "caught", "timed out", "survived", "undecided"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. ``test`` has caught it; ``passed`` tests have not."""

    status: str
    test: str
    passed: int


@dataclass(frozen=True)
class Tree:
    """A copy of the repository, whose files may be changed."""

    root: Path

    @classmethod
    def copy(cls, source: Path, root: Path) -> Tree:
        """Copy all files of ``source`` that git does not ignore."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
        for name in done.stdout.splitlines():
            if (source / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name)
        return cls(root)

    def try_mutant(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> Outcome:
        """Change the file, run ``tests`` in this order for at most ``seconds``, and restore the file."""
        file = self.root / mutant.path
        source = file.read_text(encoding="utf-8")
        try:
            self._write(file, mutant.apply(source))
            return self._run_batches(tests, time.monotonic() + seconds)
        finally:
            self._write(file, source)

    def _run_batches(self, tests: Sequence[str], end: float) -> Outcome:
        """Run a few files first: to collect all takes longer than the tests that catch most mutants."""
        passed, start, size = 0, 0, _FIRST_BATCH
        while start < len(tests):
            outcome = self.run(tests[start : start + size], max(0.0, end - time.monotonic()))
            passed += outcome.passed
            if outcome.status != SURVIVED:
                return replace(outcome, passed=passed)
            start, size = start + size, 2 * size
        return Outcome(SURVIVED, "", passed)

    def run(self, tests: Sequence[str], seconds: float) -> Outcome:
        """Run ``tests`` until the first one fails."""
        options = ["-x", "-vv", "-rfE", "--tb=line", "-p", "campaigns.mutate.order", "-p", "no:cacheprovider"]
        log = self.root / "mutant.log"
        code = run_pytest(self.root, [*options, f"--timeout={_TEST_SECONDS}", *tests], log, seconds)
        return read_outcome(code, log.read_text(encoding="utf-8", errors="replace"))

    @staticmethod
    def _write(file: Path, source: str) -> None:
        """Write the file, and remove its bytecode: of the same size and second, it would be taken for current."""
        file.write_text(source, encoding="utf-8")
        for bytecode in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            bytecode.unlink()


def read_outcome(code: int | None, output: str) -> Outcome:
    """Return the outcome of a run of pytest, which wrote ``output``; ``code`` is ``None`` if its time was over."""
    passed = len(_PASSED.findall(output))
    failures = _FAILURE.findall(output)
    if code is None and not failures:
        return Outcome(UNDECIDED, "", passed)
    if code in {0, 5}:  # 5: no case was left
        return Outcome(SURVIVED, "", passed)
    if failures:
        return Outcome(TIMED_OUT if _TIMEOUT in output else CAUGHT, failures[0], passed)
    return Outcome(CAUGHT, f"pytest ended with {code}", passed)
