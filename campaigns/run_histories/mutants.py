"""``python -m campaigns.run_histories.mutants``: change the rules of the history, and see whether histories notice.

Each mutant is a copy of the sources with one change: a comparison, an order, a check that is left out, a line that is
not cut. It prints for each whether the tests of the rules (a model of them, and claims) and the random histories have
found a violation, and exits with 1 if neither has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from campaigns.common.case_runner import format_table

_ROOT = Path(__file__).parents[2]

_HISTORY, _CLAIMS, _TIER = "run/history.py", "run/claims.py", "tier/job.py"

_LOCAL = "self._select_local(self._local[-1])"


@dataclass(frozen=True)
class Mutant:
    """A change of one text in one file."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "an overwrite replaces what is newer", _HISTORY, "existing.incarnation > saved", "existing.incarnation < saved"
    ),
    Mutant("the base itself is abandoned", _HISTORY, "-1) >= saved.sequence", "-1) > saved.sequence"),
    Mutant("nothing is abandoned", _HISTORY, "        if branch is None or saved.inc", "        if True or saved.inc"),
    Mutant("no job is superseded", _HISTORY, "None and branch.incarnation > incarnation", "None and False"),
    Mutant("the latest is the last of the list", _HISTORY, "(self._sequence_of(saved), place)", "(place, place)"),
    Mutant("a claim takes no number", _HISTORY, "max(branch.sequence, newest.sequence)", "newest.sequence"),
    Mutant("a number may be taken", _HISTORY, "[self.number, above, *(", "[self.number, *("),
    Mutant("numbers of manifests do not count", _HISTORY, "*(saved.incarnation for saved in found)]", "0]"),
    Mutant("sequences begin anew", _HISTORY, "[*claimed, *(saved.sequence + 1 for saved in found), 1]", "[1]"),
    Mutant("a line is not cut", _HISTORY, "if step[0] < base.incarnation]", "if step[0] != base.incarnation]"),
    Mutant("a line lacks its base", _HISTORY, "return (*kept, (base.incarnation, base.sequence))", "return (*kept,)"),
    Mutant("a base is not cut", _HISTORY, "(base.incarnation, base.sequence))\n", "(base.incarnation, LARGEST))\n"),
    Mutant("lines without entries are empty", _HISTORY, "unknown[saved.incarnation] = saved.sequence", "pass"),
    Mutant("a rollback is not noted", _HISTORY, "rolled_back_to = base.id if", 'rolled_back_to = "" if'),
    Mutant(
        "a late claim comes before other runs",
        _HISTORY,
        "return own if max([*claimed",
        "return own + 99 if max([*claimed",
    ),
    Mutant("other runs are forgotten", _HISTORY, "{**runs, run: branch}", "{run: branch}"),
    Mutant(
        "a run that went on is continued", _CLAIMS, "    if base.newest is not None and (last", "    if False and (last"
    ),
    Mutant(
        "a rollback since the load is undone", _CLAIMS, "return not _has_claimed(", "return False and not _has_claimed("
    ),
    Mutant(
        "a superseded job saves",
        _CLAIMS,
        "    if not newest.has_continued(",
        "    if True or not newest.has_continued(",
    ),
    Mutant(
        "a claim of another job is taken",
        _CLAIMS,
        "(own.job.groups == job.groups if job.groups else own.job.token == job.token)",
        "True",
    ),
    Mutant(
        "the latest checkpoint counts as named if the tier has it",
        "load/selection.py",
        f"_as_latest({_LOCAL}, scan, manifest.run, manifest.sequence)",
        f"msgspec.structs.replace({_LOCAL}, is_latest=True)",
    ),
    Mutant("a superseded job drains", _TIER, "if history.announced > self._announced:", "if False:"),
)


def main() -> int:
    """Try all mutants, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.run_histories.mutants", description=__doc__)
    parser.add_argument("--histories", type=int, default=100, help="how many for each mutant, at most")
    parser.add_argument("names", nargs="*", help="which mutants; all by default")
    options = parser.parse_args()
    rows = []
    for mutant in [mutant for mutant in MUTANTS if mutant.name in (options.names or {mutant.name})]:
        by_tests, by_histories = try_mutant(mutant, options.histories)
        rows.append((mutant.name, "yes" if by_tests else "no", "yes" if by_histories else "no"))
        print(*rows[-1], sep=": ", file=sys.stderr, flush=True)
    print(format_table(("mutant", "found by tests", "found by histories"), rows))
    return int(any(row[1:] == ("no", "no") for row in rows))


def try_mutant(mutant: Mutant, histories: int) -> tuple[bool, bool]:
    """Return whether the tests, and whether the histories, find a violation."""
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(_ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        file = folder / "src" / "rankless" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times")
        file.write_text(text.replace(mutant.old, mutant.new))
        tests = [
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/unit/test_history_rules.py",
            "tests/unit/test_claims.py",
        ]
        history = ["campaigns.run_histories", "--kinds", "tmpfs", "--stop", "--histories", str(histories)]
        return _fails(folder, tests), _fails(folder, history)
    finally:
        shutil.rmtree(folder)


def _fails(folder: Path, command: list[str]) -> bool:
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{_ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=_ROOT, env=environment, capture_output=True, check=False
    )
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
