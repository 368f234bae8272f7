"""Tests sparse files: each process writes its own bytes of them."""

import errno
from pathlib import Path

import numpy as np
import pytest

from rankless.errors import StorageError
from rankless.storage.sparse_file import SparseFile


def test_bytes_are_where_they_were_written_in_any_order(tmp_path: Path) -> None:
    with SparseFile(tmp_path / "file") as one, SparseFile(tmp_path / "file") as other:
        one.write(6, np.array([7, 8], np.uint8))
        other.write(1, np.array([2], np.uint8))
        one.write(3, np.array([4, 5], np.uint8))
    assert (tmp_path / "file").read_bytes() == bytes([0, 2, 0, 4, 5, 0, 7, 8])


def test_it_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "file").symlink_to(tmp_path / "target")
    with pytest.raises(StorageError) as caught:
        SparseFile(tmp_path / "file")
    assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "target").read_bytes() == b"kept"
