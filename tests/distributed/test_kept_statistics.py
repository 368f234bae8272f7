"""``stats=True`` on several ranks and in an object store: the statistics do not depend on the ranks that have saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import RankMismatchError
from rankless.inspection.background_statistics import background_statistics
from rankless.storage.object_path import ObjectPath
from tests.helpers import layouts
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks


def save(path: Path, layout: str, tag: str = "s", **options: Any) -> bool:
    """Save with statistics. Return whether this rank has computed any."""
    run = layouts.fill_run(getattr(layouts, layout)())
    with mock.patch.object(background_statistics, "add", wraps=background_statistics.add) as add:
        rankless.save_checkpoint(path, tag, run.model, run.optimizer, stats=True, **options)
        rankless.finalize()
    return add.called


@pytest.mark.parametrize(("layout", "world_size"), [("ddp", 2), ("fsdp", 4), ("fsdp_tp", 4)])
def test_statistics_do_not_depend_on_ranks(ranks: Ranks, tmp_path: Path, layout: str, world_size: int) -> None:
    save(tmp_path / "one", "plain")
    expected = rankless.read_statistics(tmp_path / "one")
    assert ranks(world_size, save, tmp_path / "several", layout) == [True] + [False] * (world_size - 1)
    kept = rankless.read_statistics(tmp_path / "several")
    assert expected is not None
    assert kept is not None
    assert kept.tensors == expected.tensors == rankless.compute_statistics(tmp_path / "several").tensors


def save_differently(path: Path) -> str:
    with pytest.raises(RankMismatchError) as caught:
        rankless.save_checkpoint(path, "a", {"w": torch.ones(2)}, stats=dist.get_rank() == 3)
    return str(caught.value)


def test_ranks_that_disagree_all_raise(ranks: Ranks, tmp_path: Path) -> None:
    assert all("stats" in message for message in ranks(4, save_differently, tmp_path))


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with mock.patch("tests.helpers.fake_s3.MIN_PART", 1):
        yield FakeS3()


def kept_objects(fake: FakeS3) -> list[str]:
    return [key for key in fake.objects if key.endswith("/.statistics")]


def run_path(url: str) -> ObjectPath:
    return store_at(url, retry_seconds=20.0).path(f"{BUCKET}/run")


class TestObjectStore:
    def test_they_are_one_object(self, ranks: Ranks, fake: FakeS3) -> None:
        with fake.served() as url:
            ranks(2, save, run_path(url), "fsdp")
            assert len(kept_objects(fake)) == 1
            kept = rankless.read_statistics(run_path(url))
            assert kept is not None
            assert kept.tensors == rankless.compute_statistics(run_path(url)).tensors

    def test_retention_removes_them_too(self, fake: FakeS3) -> None:
        with fake.served() as url:
            save(run_path(url), "plain", "a")
            save(run_path(url), "plain", "b", keep=1)
            assert ["/b." in key for key in kept_objects(fake)] == [True]

    def test_of_a_checkpoint_that_is_removed_meanwhile_nothing_is_left(self, fake: FakeS3) -> None:
        from rankless.inspection import checkpoint_statistics

        measure, was_read, may_go_on = checkpoint_statistics.measure_checkpoint, threading.Event(), threading.Event()

        def measure_slowly(*args: Any) -> Any:
            result = measure(*args)
            was_read.set()
            may_go_on.wait(20)
            return result

        with fake.served() as url:
            run = run_path(url)
            with mock.patch.object(checkpoint_statistics, "measure_checkpoint", measure_slowly):
                rankless.save_checkpoint(run, "a", {"w": torch.ones(3)}, stats=True)
                assert was_read.wait(20)
                rankless.save_checkpoint(run, "b", {"w": torch.ones(3)}, keep=1)
                may_go_on.set()
                rankless.finalize()
            assert [info.tag for info in rankless.list_checkpoints(run)] == ["b"]
            assert not any("/a." in key for key in fake.objects)


def save_into_tier(base: str, layout: str, asynchronous: bool) -> list[str]:
    """Save steps 1 to 5, of which each second one is drained, and the last one. Return the tags of `Saved` events."""
    rank, saved = dist.get_rank() if dist.is_initialized() else 0, []
    run = layouts.fill_run(getattr(layouts, layout)())
    local = rankless.LocalTier(f"{base}/host{rank}", drain_every=2)
    directory = rankless.RunDirectory(
        f"{base}/run",
        local=local,
        async_save=asynchronous,
        on_event=lambda event: saved.append(event.path.name) if isinstance(event, rankless.Saved) else None,
    )
    for step in range(1, 6):
        directory.save(f"step_{step}", run.model, run.optimizer, step=step, stats=True).wait()
    directory.finalize()
    rankless.finalize()
    return saved


class TestLocalTier:
    @each_value({"layout, world_size": [("plain", 1), ("fsdp", 2)], "asynchronous": [False, True]})
    def test_checkpoints_that_are_drained_have_them(
        self, ranks: Ranks, tmp_path: Path, layout: str, world_size: int, asynchronous: bool
    ) -> None:
        saved = ranks(world_size, save_into_tier, str(tmp_path), layout, asynchronous)
        infos = rankless.list_checkpoints(tmp_path / "run")
        assert [info.tag for info in infos] == saved[0]
        assert infos[-1].tag == "step_5"
        for info in infos:
            kept = rankless.read_statistics(info.path)
            assert kept is not None
            assert kept.tensors == rankless.compute_statistics(info.path).tensors
        assert not list(tmp_path.glob("host*/**/.statistics"))

    def test_the_training_never_waits_for_them(self, tmp_path: Path) -> None:
        from rankless.inspection import checkpoint_statistics

        may_go_on = threading.Event()

        def wait_before(*args: Any) -> Any:
            may_go_on.wait(20)
            return measure(*args)

        measure = checkpoint_statistics.measure_checkpoint
        directory = rankless.RunDirectory(tmp_path / "run", local=tmp_path / "host", async_save=True)
        with mock.patch.object(checkpoint_statistics, "measure_checkpoint", wait_before):
            for step in range(1, 4):
                directory.save(f"step_{step}", {"w": torch.full((3,), float(step))}, step=step, stats=True).wait_local()
            directory.finalize()
            assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")][-1] == "step_3"
            may_go_on.set()
            rankless.finalize()
        kept = rankless.read_statistics(tmp_path / "run")
        assert kept is not None
        assert kept.tensors["model/w"].maximum == 3.0
