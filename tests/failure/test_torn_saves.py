"""Tests that an asynchronous save does not contain later changes: the short form of ``campaigns.torn``."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from campaigns.torn.layouts import LAYOUTS
from campaigns.torn.training import ChangingTraining
from rankless.engine.io.device_staging import DeviceStaging
from rankless.engine.io.staging import LaterCopies, StagedTensors
from rankless.engine.io.tensor_bytes import TensorBytes
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.pool import Ranks

ALONE = [layout for layout, made in LAYOUTS.items() if made.ranks == 1]


def torn(path: str, layout: str, staging: str, number: int) -> list[str]:
    run = ChangingTraining(layout)
    return [name for step in range(number) for name in run.save_and_change(Path(path), step, staging)]


@pytest.mark.parametrize("staging", ["eager", "overlapped"])
@pytest.mark.parametrize("layout", ALONE)
@first_of(1, "number", [3, 8])
def test_everything_may_change_when_the_call_returns(tmp_path: Path, layout: str, staging: str, number: int) -> None:
    assert torn(str(tmp_path), layout, staging, number) == []


@each_value({"layout": [layout for layout in LAYOUTS if layout not in ALONE], "staging": ["eager", "overlapped"]})
@first_of(1, "number", [3, 8])
def test_on_ranks_too(ranks: Ranks, tmp_path: Path, layout: str, staging: str, number: int) -> None:
    size = LAYOUTS[layout].ranks
    assert ranks(size, torn, str(tmp_path), layout, staging, number) == [[]] * size


def test_a_save_without_a_copy_would_be_seen(tmp_path: Path) -> None:
    """The campaign can fail."""

    def no_copy(plan: Any, shard_of: Any, *_: object) -> StagedTensors:
        class Live(StagedTensors):
            def shard_of(self, tensor: int) -> TensorBytes:
                return shards[tensor]

        shards = {file_range.tensor: shard_of(file_range.tensor) for file_range in plan.file_ranges}
        find = shards.__getitem__
        return Live(plan.file_ranges, np.empty(0, np.uint8), LaterCopies((), (), find), DeviceStaging((), find))

    with mock.patch("rankless.save.shard_writer.stage_tensors", no_copy):
        actual = torn(str(tmp_path), "plain", "eager", 3)
    assert any("model/" in name for name in actual)
    assert any("optimizer/" in name for name in actual)
