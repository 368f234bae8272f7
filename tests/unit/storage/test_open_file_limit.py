"""How many files a reader or a writer of many files keeps open."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankless.storage import open_file_limit
from rankless.storage.open_file_limit import max_open_files


@pytest.fixture(autouse=True)
def _low_limit() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


#: Prints the limit, and the limit with 400 files open. The process of the tests has unknown numbers of open files.
OPENING = """
import resource
from rankless.storage.open_file_limit import max_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
before = max_open_files()
files = [open("/dev/null") for _ in range(400)]
print(before, max_open_files())
"""


def test_it_falls_as_the_process_opens_files() -> None:
    done = subprocess.run([sys.executable, "-c", OPENING], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert after == before - 50


@pytest.mark.parametrize("missing", [(1,), (0, 1)])
def test_a_root_may_lack_the_folders_of_descriptors(
    missing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [
        tmp_path / "missing" if place in missing else folder
        for place, folder in enumerate(open_file_limit._DESCRIPTORS)
    ]
    monkeypatch.setattr(open_file_limit, "_DESCRIPTORS", folders)
    assert 1 <= max_open_files() <= 128
