"""Tests the local tier of a run in an object store: what a job leaves in memory is loaded, and is uploaded.

Ranks play hosts: each host has a folder of its own for the tier.
"""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.run.cleanup import clean_up
from rankless.save import drain_attempts
from rankless.storage.http.connection import HttpResponse
from rankless.storage.object_path import ObjectPath
from rankless.tier.host_folder import TierFolder
from tests.golden.reader import read
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import BUCKET, FakeStore
from tests.helpers.fake_s3 import GOOGLE, FakeS3, failure, gcs_at, store_at
from tests.helpers.file_contents import read_state_files
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.pool import Ranks
from tests.helpers.small_parts import small_parts
from tests.helpers.tier_runs import continue_from, go_on
from tests.helpers.training import assert_equal, gather_run, start_run, train_run

#: Small parts, so that small checkpoints have several, with bytes of several ranks.
PART = 512

#: A number of saves of which none is drained.
NEVER = 10**6

WRITERS = [("plain", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3)]
READERS = [("plain", 1), ("ddp", 3), ("fsdp", 2), ("fsdp", 4)]

#: By day one of each number of ranks of a host: test_local_tier.py has each layout.
BY_DAY = [(("fsdp", 3), ("ddp", 3), 1), (("ddp", 2), ("fsdp", 4), 4)]
GENERATIONS = [*BY_DAY, *(case for case in itertools.product(WRITERS, READERS, [1, 4]) if case not in BY_DAY)]


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    with mock.patch("tests.helpers.fake_s3.MIN_PART", 1):
        yield FakeS3()


def run_path(url: str) -> ObjectPath:
    return store_at(url, retry_seconds=0.5).path(f"{BUCKET}/run")


def tier_of(base: Path, ranks_per_host: int = 1, **options: Any) -> rankless.LocalTier:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rankless.LocalTier(base / f"host{rank // ranks_per_host}", **options)


def save(run: Path, base: Path | None, layout: str, ranks_per_host: int = 1, steps: int = 3, **options: Any) -> None:
    """Save into the tier in folders of ``base``; without one, into the run. Nothing is drained unless it is said."""
    state = train_run(layout, "adamw", steps=steps)
    local = None if base is None else tier_of(base, ranks_per_host, **{"drain_every": NEVER, "copies": 0} | options)
    with small_parts(PART):
        directory = rankless.RunDirectory(run, local=local, max_shard_size=3000)
        go_on(directory)
        tag = f"step_{steps}"
        directory.save(tag, state.model, state.optimizer, state.scheduler, {"n": steps}, step=steps)
        directory.wait()


def load(run: Path, base: Path, layout: str, ranks_per_host: int = 1) -> tuple[Any, str, str, list[str]]:
    """Return the tensors, the tag, where it was loaded from, and the warnings. What was loaded is durable then."""
    state = start_run(layout, "adamw", seed=9)
    with warnings.catch_warnings(record=True) as caught, small_parts(PART):
        warnings.simplefilter("always")
        directory = rankless.RunDirectory(run, local=tier_of(base, ranks_per_host))
        result = directory.restore(None, state.model, state.optimizer, state.scheduler)
        directory.finalize()
    assert result.verified
    return gather_run(state), result.tag, result.source, [str(warning.message) for warning in caught]


def files_of(fake: FakeStore, tag: str = "step_3") -> dict[str, bytes]:
    """The objects of the only folder of a tag, by their names in it."""
    prefix = f"run/{tag}."
    folders = {key.removeprefix(prefix).partition("/")[0] for key in fake.objects if key.startswith(prefix)}
    assert len(folders) == 1, folders
    start = f"{prefix}{folders.pop()}/"
    return {key.removeprefix(start): stored.data for key, stored in fake.objects.items() if key.startswith(start)}


def download(fake: FakeStore, folder: Path, tag: str = "step_3") -> Path:
    for name, data in files_of(fake, tag).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def expected_files(ranks: Ranks, tmp_path: Path, steps: int = 3) -> Any:
    """The files of a save on a disk without a tier."""
    ranks(2, save, tmp_path / "disk", None, "fsdp", 1, steps)
    return read_state_files(tmp_path / f"disk/step_{steps}")


def tags(run: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(run)]


class TestLoads:
    @first_of(2, ("writer", "reader", "ranks_per_host"), GENERATIONS)
    def test_any_layout_loads_a_generation_of_any_other_and_makes_it_durable(
        self,
        ranks: Ranks,
        fake: FakeS3,
        tmp_path: Path,
        writer: tuple[str, int],
        reader: tuple[str, int],
        ranks_per_host: int,
    ) -> None:
        with fake.served() as url:
            run = run_path(url)
            ranks(writer[1], partial(save, copies=3), run, tmp_path, writer[0], ranks_per_host, 3)
            assert tags(run) == []
            for tensors, tag, source, _ in ranks(reader[1], load, run, tmp_path, reader[0], ranks_per_host):
                assert_equal(tensors, gather_run(train_run("plain", "adamw")))
                assert (tag, source) == ("step_3", "local tier")
            assert tags(run) == ["step_3"]
            folder = download(fake, tmp_path / "objects")
        read(folder)
        assert not fake.uploads
        save(tmp_path / "disk", None, "plain")
        assert read_state_files(folder) == read_state_files(tmp_path / "disk/step_3")

    def test_what_is_durable_is_loaded_if_the_hosts_have_lost_everything(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path
    ) -> None:
        with fake.served() as url:
            run = run_path(url)
            ranks(2, partial(save, drain_every=1), run, tmp_path, "fsdp", 1, 3)
            ranks(2, save, run, tmp_path, "fsdp", 1, 5)
            for host in range(2):
                shutil.rmtree(tmp_path / f"host{host}")
            for tensors, tag, source, _ in ranks(3, load, run, tmp_path, "fsdp"):
                assert_equal(tensors, gather_run(train_run("plain", "adamw")))
                assert (tag, source) == ("step_3", "run directory")

    def test_a_corrupt_part_leads_back_to_the_store(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        with fake.served() as url:
            run = run_path(url)
            ranks(2, save, run, None, "fsdp")
            ranks(2, save, run, tmp_path, "fsdp", 2, 5)
            corrupt = flip_bytes(tmp_path / "host0", run, rank=1)
            loaded = ranks(2, load, run, tmp_path, "fsdp", 2)
            assert [result[1:3] for result in loaded] == [("step_3", "run directory")] * 2
            assert any(str(corrupt) in message for message in loaded[0][3])

    def test_an_abandoned_branch_is_never_the_newest(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        with fake.served() as url:
            run = run_path(url)
            ranks(2, save, run, None, "fsdp")
            ranks(2, save, run, tmp_path, "fsdp", 2, 5)
            (tmp_path / "host0").rename(tmp_path / "away")  # the host is disconnected, and the job goes on without it
            assert ranks(2, load, run, tmp_path, "fsdp", 2)[0][1] == "step_3"
            shutil.rmtree(tmp_path / "host0")
            (tmp_path / "away").rename(tmp_path / "host0")
            assert ranks(2, load, run, tmp_path, "fsdp", 2)[0][1:3] == ("step_3", "run directory")


def flip_bytes(folder: Path, run: Path, rank: int) -> Path:
    """Change a byte of the part of a rank on its own host."""
    tier = TierFolder.find(folder, run)
    (name,) = [name for names in tier.list_parts().values() for name in names if name.rank == rank]
    path = tier.path / tier.read_part(name).data
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    return path


class TestDrains:
    @pytest.mark.parametrize(("layout", "n"), [("plain", 1), ("ddp", 2), ("fsdp", 3), ("fsdp", 4)])
    def test_a_save_that_is_drained_at_once_has_the_bytes_of_an_ordinary_save(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path, layout: str, n: int
    ) -> None:
        with fake.served() as url:
            ranks(n, partial(save, drain_every=1), run_path(url), tmp_path, layout, 1, 3)
            assert read_state_files(download(fake, tmp_path / "objects")) == expected_files(ranks, tmp_path)
        read(tmp_path / "objects")
        assert not fake.uploads

    def test_a_drain_is_the_same_at_google_and_azure(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        expected = expected_files(ranks, tmp_path)
        fake.profile, azure = GOOGLE, FakeAzure()
        with fake.served() as url, azure.served() as azure_url:
            runs: list[tuple[FakeStore, ObjectPath]] = [
                (fake, gcs_at(url).path(f"{BUCKET}/run")),
                (azure, azure.store_at(azure_url).path(f"{BUCKET}/run")),
            ]
            for number, (store, run) in enumerate(runs):
                base = tmp_path / str(number)
                ranks(2, save, run, base / "a", "fsdp")
                assert [result[2] for result in ranks(3, load, run, base / "a", "ddp")] == ["local tier"] * 3
                assert read_state_files(download(store, base / "loaded")) == expected
                ranks(2, partial(save, drain_every=1), run, base / "a", "fsdp", 1, 4)
                assert read_state_files(download(store, base / "saved", "step_4"))
                assert not store.uploads

    @each_value({"kind": ["part", "complete", "create upload", "put"], "stage": ["before", "after"]})
    def test_a_drain_whose_requests_fail_is_tried_again(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path, kind: str, stage: str
    ) -> None:
        with fake.served() as url:
            run = run_path(url)
            fake.on_request = FailFor(
                3, lambda request: request.kind == kind and "/.history/" not in request.key, stage
            )
            outcomes = ranks(2, drain_in_background, run, tmp_path)
            assert outcomes[0][0] >= 1  # the rank that reports events
            assert [after for _, after in outcomes] == [["b", "c", "d"]] * 2
            assert_only_published_folders(fake)
            assert torch.equal(rankless.open(run / "b")["model/w"], torch.ones(3000))

    @pytest.mark.parametrize("on_failure", ["raise", "warn"])
    def test_a_drain_that_always_fails_raises_or_warns(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path, on_failure: str
    ) -> None:
        with fake.served() as url:
            run = run_path(url)
            fake.on_request = FailFor(
                10**6, lambda request: request.method == "PUT" and "/.history/" not in request.key
            )
            errors = ranks(2, drain_in_vain, run, tmp_path, on_failure)
            assert all(("AccessDenied" in error) == (on_failure == "raise") for error in errors), errors
            fake.on_request = lambda *_: None
            assert tags(run) == []
            assert not fake.uploads

    def test_a_pointer_whose_answer_is_lost_is_found(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        with fake.served() as url:
            run = run_path(url)
            fake.on_request = FailFor(3, lambda request: request.method == "PUT" and "/.tags/" in request.key, "after")
            ranks(2, drain_in_background, run, tmp_path)
            assert tags(run) == ["b", "c", "d"]
            assert_only_published_folders(fake)

    def test_retention_counts_drained_checkpoints(self, fake: FakeS3, tmp_path: Path) -> None:
        with fake.served() as url:
            keep, kept = rankless.KeepLast(2) | rankless.KeepBest("loss", 1), list[list[str]]()
            for run in (tmp_path / "run", run_path(url)):
                local = tier_of(tmp_path / type(run).__name__, drain_every=2)
                directory = rankless.RunDirectory(run, local=local, keep=keep)
                for step, loss in enumerate((3.0, 2.0, 1.0, 5.0, 6.0, 7.0, 8.0, 9.0)):
                    directory.save(f"step_{step}", {"w": torch.ones(3)}, step=step, metrics={"loss": loss})
                kept.append([info.tag for info in directory.list()])
            assert kept == [["step_2", "step_4", "step_6"]] * 2
            assert_only_published_folders(fake)

    def test_a_checkpoint_without_tensors_is_drained_twice(self, fake: FakeS3, tmp_path: Path) -> None:
        with fake.served() as url:
            run, other = run_path(url), tmp_path / "other"
            local = tier_of(tmp_path, drain_every=NEVER)
            rankless.RunDirectory(run, local=local).save("a", user_content={"n": 1}, rng=False)
            shutil.copytree(tmp_path / "host0", other)
            assert rankless.drain(run, other).status == "published"
            assert rankless.RunDirectory(run).load() == {"n": 1}

    def test_a_tag_may_be_overwritten(self, fake: FakeS3, tmp_path: Path) -> None:
        with fake.served() as url:
            run = run_path(url)
            directory = rankless.RunDirectory(run, local=tier_of(tmp_path, drain_every=NEVER))
            directory.save("a", {"w": torch.ones(3)})
            with pytest.raises(rankless.TagExistsError):
                directory.save("a", {"w": torch.ones(3)})
            directory.finalize()
            directory.save("a", {"w": torch.zeros(3)}, overwrite=True)
            directory.finalize()
            assert torch.equal(rankless.open(run / "a")["model/w"], torch.zeros(3))

    def test_without_memory_a_save_goes_to_the_store(self, fake: FakeS3, tmp_path: Path) -> None:
        from rankless.storage import mapped_file

        with fake.served() as url, mock.patch.object(mapped_file, "count_free_bytes", return_value=10):
            directory = rankless.RunDirectory(run_path(url), local=tier_of(tmp_path, drain_every=NEVER))
            with pytest.warns(UserWarning, match="without the local tier"):
                directory.save("a", {"w": torch.ones(3000)})
            assert tags(directory.path) == ["a"]


class FailFor:
    """The store answers some requests with an error: the first ``count`` of a kind, each as often as it is repeated."""

    def __init__(self, count: int, is_meant: Callable[[Any], bool], stage: str = "before") -> None:
        self.count, self.is_meant, self.stage = count, is_meant, stage

    def __call__(self, request: Any, stage: str) -> HttpResponse | None:
        if stage != self.stage or not self.is_meant(request) or self.count <= 0:
            return None
        self.count -= 1
        return failure(403, "AccessDenied")


def drain_in_background(run: Path, base: Path) -> tuple[int, list[str]]:
    """Save several times while drains fail. Return how often one has failed, and what is there in the end."""
    events: list[rankless.Event] = []
    with mock.patch.object(drain_attempts, "_FIRST_SECONDS", 0.05), small_parts(PART):
        directory = rankless.RunDirectory(run, local=tier_of(base), async_save=True, on_event=events.append)
        for tag in ("b", "c", "d"):
            directory.save(tag, {"w": torch.ones(3000)}).wait()
        dist.barrier()
        return sum(isinstance(event, rankless.DrainFailed) for event in events), tags(run)


def drain_in_vain(run: Path, base: Path, on_failure: str) -> str:
    with (
        mock.patch.object(drain_attempts, "_FIRST_SECONDS", 0.01),
        small_parts(PART),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        directory = rankless.RunDirectory(run, local=tier_of(base, on_failure=on_failure), async_save=True)
        handle = directory.save("a", {"w": torch.ones(3000)})
        try:
            handle.wait()
        except rankless.StorageError as error:
            return str(error)
    return ""


def assert_only_published_folders(fake: FakeStore) -> None:
    """Nothing is left of attempts that have failed."""
    folders = {key.split("/")[1] for key in fake.objects} - {".tags", ".history", ".journal"}
    pointers = [key for key in fake.objects if key.startswith("run/.tags/")]
    assert len(folders) == len(pointers)
    assert not fake.uploads


class TestOtherJobs:
    def test_a_job_that_was_replaced_publishes_nothing(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        with fake.served() as url:
            run = run_path(url)
            ranks(2, save_after_another_job, run, tmp_path)
            assert tags(run) == []
            assert not fake.uploads
            assert {key.split("/")[1] for key in fake.objects} == {".history"}

    @pytest.mark.parametrize("stage", ["before", "after"])
    @pytest.mark.parametrize("start", [0, 1])
    def test_a_job_that_is_stopped_at_its_pointer_publishes_no_abandoned_branch(
        self, fake: FakeS3, tmp_path: Path, stage: str, start: int
    ) -> None:
        """Another one has continued the run meanwhile: from nothing, or from this checkpoint, which is no harm."""
        claimed = itertools.count()

        def continue_elsewhere(request: Any, at: str) -> None:
            if request.method == "PUT" and "/.tags/" in request.key and at == stage and next(claimed) == 0:
                continue_from(run, start)

        with fake.served() as url:
            run = run_path(url)
            directory = rankless.RunDirectory(run, local=tier_of(tmp_path))
            fake.on_request = continue_elsewhere
            if start:
                directory.save("a", {"w": torch.ones(3)})
                assert tags(run) == ["a"]
            else:
                with pytest.raises(rankless.StateError, match="another job has continued the run"):
                    directory.save("a", {"w": torch.ones(3)})
                assert tags(run) == []
            assert_only_published_folders(fake)

    def test_two_jobs_that_drain_one_generation_publish_it_once(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path
    ) -> None:
        with fake.served() as url:
            run = run_path(url)
            ranks(2, save, run, tmp_path, "fsdp", 2)
            shutil.copytree(tmp_path / "host0", tmp_path / "copy/host0")
            assert ranks(2, load, run, tmp_path, "fsdp", 2)[0][2] == "local tier"
            ranks(2, load, run, tmp_path / "copy", "fsdp", 2)
            assert tags(run) == ["step_3"]
            assert_only_published_folders(fake)

    def test_each_of_two_claims_whose_answers_are_lost_gets_another_number(self, fake: FakeS3) -> None:
        lost = itertools.count()

        def lose(request: Any, stage: str) -> None:
            if request.method == "PUT" and stage == "after" and next(lost) == 0:
                claimed.append(continue_from(run, 0))  # the same start, between the effect and the repetition
                raise ConnectionError

        claimed: list[int] = []
        with fake.served() as url:
            run = run_path(url)
            fake.on_request = lose
            claimed.append(continue_from(run, 0))
        assert len(set(claimed)) == 2


def save_after_another_job(run: Path, base: Path) -> None:
    with small_parts(PART):
        directory = rankless.RunDirectory(run, local=tier_of(base, 2, drain_every=NEVER))
        directory.save("a", {"w": torch.ones(3000)})
        dist.barrier()
        if dist.get_rank() == 0:
            continue_from(run, 0)
        dist.barrier()
        with pytest.raises(rankless.StateError, match="another job has continued the run"):
            directory.finalize()


def test_a_clean_up_leaves_the_history_and_parts(ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
    with fake.served() as url:
        run = run_path(url)
        ranks(2, save, run, tmp_path, "fsdp")
        rankless.drain(run, tmp_path / "host0")
        before = sorted(fake.objects)
        clean_up(run)
        assert sorted(fake.objects) == before
