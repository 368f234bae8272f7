"""Short forms of ``python -m campaigns.hosts``: several kernels with caches of their own, docs/test-bed.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.hosts.packages import DEFAULT_FOLDER, missing_parts

ROOT = Path(__file__).parents[2]
REASONS = missing_parts(DEFAULT_FOLDER)

pytestmark = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))


def rows(*arguments: str) -> dict[tuple[str, str], str]:
    """Run a scene, and return its answer to each question on each kind of mount."""
    command = [sys.executable, "-m", "campaigns.hosts", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=1200)
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    return {(kind, question): answer for kind, question, answer in lines}


def test_hosts_lose_bytes_only_if_a_client_writes_back_whole_pages() -> None:
    answers = rows("pages", "--times", "2", "--mounts", "nfs4.2", "fuse-writeback")
    for way in ("direct, edges buffered", "buffered, O_WRONLY"):
        assert answers["nfs4.2", way].startswith("wrong at the server: 0 of 2 files, 0 bytes")
    # The control: the same calls do lose bytes on such a client, so the test above can fail.
    assert answers["fuse-writeback", "buffered, O_WRONLY"].startswith("wrong at the server: 2 of 2 files")


@pytest.mark.full
def test_random_histories_of_runs_on_several_hosts() -> None:
    answers = rows("histories", "--times", "2", "--mounts", "nfs4.2")
    assert set(answers.values()) == {"none wrong"}
