"""Tests of the campaign of versions: its table, what it reads from pytest, what it says if nothing can be installed."""

import os
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from campaigns import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_oldest_pair_is_the_oldest_that_is_supported() -> None:
    (torch,) = (line.removeprefix("torch>=") for line in PROJECT["optional-dependencies"]["torch"])
    oldest = versions.PAIRS[0]
    assert numbers(oldest.torch)[:2] == numbers(torch)
    assert f">={oldest.python}" == PROJECT["requires-python"]


def test_no_minor_version_between_is_left_out() -> None:
    for before, after in pairwise(sorted({numbers(pair.torch)[:2] for pair in versions.PAIRS})):
        assert after == (before[0], before[1] + 1)


def test_each_classifier_has_a_pair() -> None:
    named = {match[1] for line in PROJECT["classifiers"] if (match := re.search(r":: (3\.\d+)$", line))}
    assert named <= {pair.python for pair in versions.PAIRS}


def test_all_packages_are_pinned() -> None:
    assert {line.partition("==")[0] for line in versions._pinned_packages()} == versions.PACKAGES


def test_all_tests_exist() -> None:
    assert all((ROOT / path).exists() for path in (*versions.CORE, *versions.SHORT))


def campaign(*options: str, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "campaigns.versions", *options]
    env = os.environ | {"PATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)


def test_a_python_that_is_absent_is_named(tmp_path: Path) -> None:
    done = campaign("--python", "3.11", "--torch", "2.7.0", path=str(tmp_path))
    assert "there is no python3.11 on the PATH" in done.stdout
    assert done.returncode == 1


def test_what_pip_says_is_the_reason(tmp_path: Path) -> None:
    """An interpreter that can make no environment, under the name of one that can."""
    fake = tmp_path / "python3.11"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "ERROR: No matching distribution" >&2\nexit 1\n')
    fake.chmod(0o755)
    done = campaign("--python", "3.11", "--torch", "2.7.0", path=f"{tmp_path}:{os.environ['PATH']}")
    assert "| ERROR: No matching distribution |" in done.stdout
    assert done.returncode == 1


def test_results_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_error(broken): pass\n"
    )
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={results}", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    outcome = versions._read_results(results)
    assert (outcome.passed, outcome.skipped) == (1, 1)
    assert outcome.failed == ("test_some::test_fails", "test_some::test_error")
    assert outcome.is_failure


@pytest.mark.parametrize(
    ("outcome", "fails"),
    [(versions.Outcome(passed=2), False), (versions.Outcome(), True), (versions.Outcome(reason="absent"), False)],
)
def test_tests_that_did_not_run_are_a_failure(outcome: versions.Outcome, fails: bool) -> None:
    assert outcome.is_failure == fails
