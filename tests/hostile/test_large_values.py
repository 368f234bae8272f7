"""Tests that values that would make a file too large for readers are refused when they are saved, by name.

The limits are scaled down.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankless
from rankless.errors import UnsupportedValueError
from rankless.ondisk import header, values
from tests.golden import reader
from tests.helpers.pool import Ranks

LIMIT = 20_000


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "VALUES_LIMIT", LIMIT)


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ({"a": 1, "blob": b"x" * LIMIT}, r"user_content\.blob"),
        ({"a": [1, (2, {"deep": bytearray(LIMIT)})]}, r"user_content\.a\[1\]\[1\]\.deep"),
        (OrderedDict({3: {7: "x" * LIMIT}}), r"user_content\[3\]\[7\]"),
        ({"curve": list(range(LIMIT))}, r"user_content\.curve"),
        ({"a": list(range(LIMIT // 2)), "b": list(range(LIMIT // 2))}, "user_content"),
    ],
)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_value_that_no_reader_would_take_is_refused_by_its_path(
    tmp_path: Path, content: Any, path: str, async_save: bool
) -> None:
    with pytest.raises(
        UnsupportedValueError, match=rf"state\.json would have .* largest value is {path}, of .*frombuffer"
    ):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)}, user_content=content, async_save=async_save)
    assert not list(tmp_path.iterdir())


def test_what_is_just_not_too_large_is_read_again(tmp_path: Path) -> None:
    empty = len((rankless.save_checkpoint(tmp_path, "e", user_content="").wait().path / "state.json").read_bytes())
    content = "x" * (LIMIT - empty)
    info = rankless.save_checkpoint(tmp_path, "s", user_content=content).wait()
    assert (info.path / "state.json").stat().st_size == LIMIT
    assert rankless.load_checkpoint(tmp_path) == content
    with pytest.raises(UnsupportedValueError):
        rankless.save_checkpoint(tmp_path, "more", user_content=content + "x")


def test_the_way_out_that_the_error_tells_is_one_for_every_reader_of_version_1(tmp_path: Path) -> None:
    data = bytes(range(256)) * LIMIT
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rankless.save_checkpoint(tmp_path, "s", user_content={"blob": tensor}, per_rank_content={"blob": tensor})
    restored = rankless.restore(tmp_path)
    for actual in (restored.user_content, restored.per_rank_content):
        assert actual["blob"].numpy().tobytes() == data
    assert reader.read(tmp_path / "s").state["user_content"]["blob"].payload.data == data


class Extra(nn.Linear):
    """A module with a large extra state."""

    def __init__(self, size: int = 0) -> None:
        super().__init__(1, 1)
        self.extra = b"x" * size

    def get_extra_state(self) -> Any:
        return {"blob": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["blob"]


def test_values_of_models_and_optimizers_are_looked_at_too(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"largest value is model\._extra_state\.blob"):
        rankless.save_checkpoint(tmp_path, "s", Extra(LIMIT))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = list(range(LIMIT))
    with pytest.raises(UnsupportedValueError, match=r"largest value is optimizer\.groups\[0\]\.state\.weight\.history"):
        rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    assert not list(tmp_path.iterdir())


def save_own(path: str, sizes: list[int]) -> None:
    values.VALUES_LIMIT = LIMIT
    try:
        rankless.save_checkpoint(path, "s", per_rank_content={"blob": b"x" * sizes[dist.get_rank()]})
    finally:
        values.VALUES_LIMIT = 2**30


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, LIMIT], r"ranks\.json would have .*largest value is content\.blob"),
        ([LIMIT // 3, LIMIT // 2], r"ranks\.json would have .*; rank 1 contributes the most"),
    ],
)
def test_what_belongs_to_ranks_is_looked_at_together(
    ranks: Ranks, tmp_path: Path, sizes: list[int], message: str
) -> None:
    errors = ranks.outcomes(2, save_own, str(tmp_path), sizes)
    assert [type(error) for error in errors] == [UnsupportedValueError] * 2
    for error in errors:
        with pytest.raises(UnsupportedValueError, match=message):
            raise error
    assert not list(tmp_path.iterdir())
    assert ranks(2, save_own, str(tmp_path), [1, LIMIT // 2]) == [None] * 2


def test_the_header_of_a_part_and_the_file_of_a_scheduler_have_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "HEADER_LIMIT", LIMIT)
    monkeypatch.setattr(values, "VALUES_LIMIT", 10 * LIMIT)
    with pytest.raises(
        UnsupportedValueError, match=r"header of the first file.*largest value is model\._extra_state\.blob"
    ):
        rankless.save_model(Extra(LIMIT), tmp_path / "m.safetensors")
    rankless.save_model(Extra(LIMIT // 4), tmp_path / "m.safetensors")
    other = Extra()
    rankless.load_model(other, tmp_path / "m.safetensors")
    assert other.extra == b"x" * (LIMIT // 4)
    monkeypatch.setattr(values, "VALUES_LIMIT", LIMIT)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), lr=0.1), 1)
    scheduler.history = list(range(LIMIT))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedValueError, match=r"the file of the scheduler.*largest value is state\.history"):
        rankless.save_lr_scheduler(scheduler, tmp_path / "s.json")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
