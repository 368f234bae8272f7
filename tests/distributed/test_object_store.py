"""Saves into an object store and loads from it, by several ranks: the objects are the files of a save on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import TagExistsError
from rankless.storage.object_path import ObjectPath
from tests.golden.reader import read
from tests.helpers import layouts
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import BUCKET, FakeStore
from tests.helpers.fake_s3 import GOOGLE, FakeS3, gcs_at, store_at
from tests.helpers.file_contents import read_state_files
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.small_parts import small_parts
from tests.helpers.training import train_run

#: Small parts, so that small checkpoints have several, with bytes of several ranks.
PART = 512

CASES = [("plain", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)]
TENSOR_PARALLEL = [("fsdp_tp", 4), ("hsdp", 4), ("tp", 2), ("hsdp_tp", 8)]


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with mock.patch("tests.helpers.fake_s3.MIN_PART", 1):
        yield FakeS3()


def run_path(url: str, name: str = "run") -> ObjectPath:
    return store_at(url, retry_seconds=20.0).path(f"{BUCKET}/{name}")


def save(path: Path, layout: str, asynchronous: bool = False) -> None:
    run = train_run(layout, "adamw")
    with small_parts(PART):
        rankless.save_checkpoint(
            path,
            "s",
            run.model,
            run.optimizer,
            run.scheduler,
            {"epoch": 1},
            step=3,
            max_shard_size=3000,
            async_save=asynchronous,
        )
        rankless.finalize()


def save_in_large_parts(path: Path) -> None:
    run = train_run("plain", "adamw")
    rankless.save_checkpoint(path, "earlier", run.model, run.optimizer, step=1)


def save_layout(path: Path, layout: str) -> None:
    run = layouts.fill_run(getattr(layouts, layout)())
    with small_parts(PART):
        rankless.save_checkpoint(path, "s", run.model, run.optimizer, step=1, max_shard_size=20_000)


def download(fake: FakeStore, folder: Path) -> Path:
    """Copy the checkpoint of the store into a folder, as any tool does."""
    for key, stored in fake.objects.items():
        name = key.partition("/s.")[2].partition("/")[2]
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(stored.data)
    return folder


def etags(fake: FakeS3) -> dict[str, str]:
    """The ETags of the files whose bytes depend on the state alone."""
    named = {key.partition("/s.")[2].partition("/")[2]: stored.etag for key, stored in fake.objects.items()}
    return {name: etag for name, etag in named.items() if name and not name.startswith(("ranks", "manifest"))}


def test_ranks_that_saved_before_plan_with_the_parts_of_this_test(ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
    """A rank that kept the size of parts of an earlier save would send what the others do not expect."""
    with fake.served() as url:
        ranks(2, save_in_large_parts, run_path(url, "earlier"))
        ranks(3, save, run_path(url), "fsdp")
    read(download(fake, tmp_path))
    assert any("-" in etag for etag in etags(fake).values())


@first_of(
    1,
    "asynchronous, cases",
    [(False, CASES[::2]), (False, [CASES[0], *CASES[1::2]]), (True, CASES)],
    ids=["some", "the others", "asynchronous"],
)
def test_objects_are_the_files_of_a_save_on_a_disk_whatever_the_ranks(
    ranks: Ranks, fake: FakeS3, tmp_path: Path, asynchronous: bool, cases: list[tuple[str, int]]
) -> None:
    save(tmp_path / "disk", "plain")
    expected, seen = read_state_files(tmp_path / "disk/s"), list[dict[str, str]]()
    with fake.served() as url:
        for number, (layout, n) in enumerate(cases):
            fake.objects.clear()
            ranks(n, save, run_path(url), layout, asynchronous)
            folder = download(fake, tmp_path / str(number))
            assert read_state_files(folder) == expected, (layout, n)
            read(folder)
            assert not fake.uploads
            seen.append(etags(fake))
    assert all(of_case == seen[0] for of_case in seen)
    assert any("-" in etag for etag in seen[0].values())  # made of several parts


@first_of(2, "layout, n", TENSOR_PARALLEL)
def test_objects_of_sharded_layouts_are_equal_too(
    ranks: Ranks, fake: FakeS3, tmp_path: Path, layout: str, n: int
) -> None:
    save_layout(tmp_path / "disk", "plain")
    with fake.served() as url:
        ranks(n, save_layout, run_path(url), layout)
    assert read_state_files(download(fake, tmp_path / layout)) == read_state_files(tmp_path / "disk/s")


def load(path: Path, layout: str) -> bool:
    run = train_run(layout, "adamw", steps=0)
    restored = rankless.restore(path, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    assert restored.verified
    expected = train_run(layout, "adamw")
    return all(
        torch.equal(rankless_local(a), rankless_local(b))
        for a, b in zip(run.model.state_dict().values(), expected.model.state_dict().values(), strict=True)
    )


def rankless_local(tensor: torch.Tensor) -> torch.Tensor:
    return layouts.local_tensor(tensor)


def test_a_checkpoint_is_loaded_by_other_ranks_in_another_layout(ranks: Ranks, fake: FakeS3) -> None:
    with fake.served() as url:
        ranks(3, save, run_path(url), "fsdp")
        for layout, n in (("plain", 1), ("ddp", 2), ("fsdp", 4)):
            assert all(ranks(n, load, run_path(url), layout)), (layout, n)


def test_objects_at_google_are_the_same(ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
    save(tmp_path / "disk", "plain")
    fake.profile = GOOGLE
    with fake.served() as url:
        run = gcs_at(url, retry_seconds=20.0).path(f"{BUCKET}/run")
        ranks(2, save, run, "fsdp")
        assert read_state_files(download(fake, tmp_path / "objects")) == read_state_files(tmp_path / "disk/s")
        assert not fake.uploads
        assert any(request.kind == "complete" for request in fake.requests)
        assert all(ranks(2, load, run, "ddp"))


def save_on_one(path: Path) -> str:
    """All ranks raise the error of the one that fails."""
    try:
        save(path, "ddp")
    except TagExistsError as error:
        return str(error)
    return f"saved by {dist.get_world_size()}"


def test_all_ranks_raise_the_same_error_if_the_tag_exists(ranks: Ranks, fake: FakeS3) -> None:
    with fake.served() as url:
        assert set(ranks(2, save_on_one, run_path(url))) == {"saved by 2"}
        (error,) = {*ranks(2, save_on_one, run_path(url))}
    assert "s exists already" in error
    assert len([key for key in fake.objects if key.endswith("manifest.json")]) == 1


def test_azure_has_the_same_objects(ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path / "disk", "plain")
    azure = FakeAzure()
    with azure.served() as url:
        run = azure.store_at(url, retry_seconds=20.0).path(f"{BUCKET}/run")
        ranks(2, save, run, "fsdp")
        assert all(ranks(2, load, run, "ddp"))
    assert read_state_files(download(azure, tmp_path / "azure")) == read_state_files(tmp_path / "disk/s")
    assert not azure.uploads
