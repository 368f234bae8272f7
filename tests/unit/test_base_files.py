"""Tests which ranges of a file of the base an incremental save clones, on any file system."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from rankless.engine.io.checkpoint_files import CheckpointFiles
from rankless.engine.plan.save_plan import plan_save
from rankless.ondisk import block_crcs
from rankless.save.base_files import BaseFiles
from tests.helpers.simulated_jobs import Job

BLOCK, PAGE = 2 * 2**20, 4096


class CloningFileSystem:
    """Clones whatever it is asked for, and remembers the ranges."""

    def clone_ranges(self, source: int, target: Path, ranges: list[tuple[int, int]], identity: object) -> bool:
        self.ranges = ranges
        return True


def test_whole_pages_of_unchanged_blocks_are_cloned(tmp_path: Path) -> None:
    tensors = {("model", "a"): torch.zeros(100), ("model", "w"): torch.zeros(4 * BLOCK, dtype=torch.uint8)}
    plan = plan_save(Job([0], tensors, {key: {0: None} for key in tensors}).membership(), 0, 2**30)
    (file,) = plan.files
    base: Any = SimpleNamespace(files={file.path: SimpleNamespace(identity=None)})
    sharing: Any = CloningFileSystem()
    files = BaseFiles(base, CheckpointFiles(tmp_path, plan), sharing, linked=[0])
    files.files.create_file(0)
    with mock.patch.object(block_crcs, "BLOCK_BYTES", BLOCK):
        omitted = files.settle({1: [1, 3]}).omitted
    origin = file.data_start + file.entries["w"].data_offsets[0]
    assert origin % PAGE
    unchanged = [(origin + BLOCK, origin + 2 * BLOCK), (origin + 3 * BLOCK, origin + 4 * BLOCK)]
    pages = {
        page
        for page in range(file.size // PAGE)
        if any(start <= page * PAGE and (page + 1) * PAGE <= stop for start, stop in unchanged)
    }
    assert {page for start, stop in sharing.ranges for page in range(start // PAGE, stop // PAGE)} == pages
    assert all(edge % PAGE == 0 for cloned in sharing.ranges for edge in cloned)
    assert omitted[0] == sharing.ranges
